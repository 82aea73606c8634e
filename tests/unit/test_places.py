"""Places of the stream of problems: dynamic sampling takes the next ones, and skips none."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from data_harness import character_tokenizer

from tandem.common.messages import PromptGroup
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.algorithms.places import NUM_BATCHES, PlaceUnknown, StreamPlaces
from tandem.observe.run_folder.journal import StepRecord

SIZE = 4
"""Groups of a batch."""


def settings(age: int = 0, **over: Any) -> Config:
    plain: dict[str, Any] = {
        "grpo": {
            "num_prompts_per_step": SIZE,
            "num_generations_per_prompt": 2,
            "use_dynamic_sampling": True,
            "async_grpo": {"enabled": age > 0, "max_trajectory_age_steps": max(1, age)},
        },
        "policy": {
            "model_name": "model",
            "train_global_batch_size": 8,
            "max_total_sequence_length": 64,
            "generation": {"colocated": {"enabled": age == 0}},
        },
        "data": {"dataset_name": "jsonl", "train_data_path": "rows.jsonl", "num_validation": 1, "shuffle": False},
        "env": {"exact_match": {}},
    }
    plain["data"] |= over
    return build_config(plain)


class Draws:
    """The draws of a run, in the scheduler's order: further batches of a step, and first ones up to the age ahead."""

    def __init__(self, places: StreamPlaces, age: int, num_batches: list[int], first_step: int = 1) -> None:
        self.order: list[tuple[int, int]] = []
        """Step and batch of each draw."""
        self.places: list[list[int]] = []
        drawn = first_step - 1
        for step in range(first_step, len(num_batches) + 1):
            while drawn < step + age:
                drawn += 1
                self._draw(places, drawn, 0)
            for batch in range(1, num_batches[step - 1]):
                self._draw(places, step, batch)
            places.finish(step, num_batches[step - 1] * SIZE)

    def _draw(self, places: StreamPlaces, step: int, batch: int) -> None:
        self.order.append((step, batch))
        self.places.append([places.of(step, batch * SIZE + group) for group in range(SIZE)])


def some_batches(seed: int, num_steps: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.choice((1, 1, 2, 5)) for _ in range(num_steps)]


@pytest.mark.parametrize("age", [0, 1, 3])
def test_no_place_is_skipped_and_none_is_drawn_twice(age: int) -> None:
    draws = Draws(StreamPlaces(settings(age)), age, some_batches(age, 50))
    assert [place for batch in draws.places for place in batch] == [*range(SIZE * len(draws.order))]


@pytest.mark.parametrize("age", [0, 1, 3])
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(age: int) -> None:
    num_batches = some_batches(age, 20)
    whole = Draws(StreamPlaces(settings(age)), age, num_batches)
    expected = dict(zip(whole.order, whole.places, strict=True))
    for checkpoint in (0, 1, 7):
        resumed = StreamPlaces(settings(age))
        resumed.resume(records(num_batches[:checkpoint]))
        rest = Draws(resumed, age, num_batches, first_step=checkpoint + 1)
        assert rest.order
        assert {draw: expected[draw] for draw in rest.order} == dict(zip(rest.order, rest.places, strict=True))


def records(num_batches: list[int]) -> list[StepRecord]:
    """Return what a journal has of these steps."""
    journal = [step_record(0, {})]
    return [*journal, *(step_record(n, {NUM_BATCHES: float(count)}) for n, count in enumerate(num_batches, 1))]


def step_record(step: int, metrics: dict[str, float]) -> StepRecord:
    fields: dict[str, Any] = dict.fromkeys(StepRecord.__struct_fields__)
    return StepRecord(**{**fields, "step": step, "metrics": metrics})


def test_an_earlier_attempt_is_forgotten_where_a_run_goes_back() -> None:
    places = StreamPlaces(settings())
    Draws(places, 0, [1, 5, 5])
    places.finish(1, 2 * SIZE)
    assert places.of(2, 0) == 2 * SIZE
    with pytest.raises(PlaceUnknown):
        places.of(3, 0)


def test_without_dynamic_sampling_a_step_has_the_places_after_those_before_it() -> None:
    config = settings(val_data_path=write_rows("held.jsonl", 1000, 1))
    write_rows("rows.jsonl", 0, 200)
    grpo = msgspec.structs.replace(config.grpo, use_dynamic_sampling=False)
    config = msgspec.structs.replace(config, grpo=grpo)
    running = GrpoAlgorithm(config, character_tokenizer(config))
    groups = [*running.prompt_groups(2, "train", range(SIZE)), *running.prompt_groups(51, "train", range(SIZE))]
    assert [group.problem.question for group in groups] == ["4", "5", "6", "7", "0", "1", "2", "3"]


# --- problems --------------------------------------------------------------------------------------------------------


def write_rows(path: str, start: int, count: int) -> str:
    rows = ({"input": f"{number}", "output": f"{number}"} for number in range(start, start + count))
    Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def drawn(algorithm: GrpoAlgorithm, num_batches: list[int]) -> list[str]:
    """Return the questions that a synchronous run draws, in its order."""
    asked: list[PromptGroup] = []
    for step, count in enumerate(num_batches, 1):
        for batch in range(count):
            asked += algorithm.prompt_groups(step, "train", range(batch * SIZE, (batch + 1) * SIZE))
        assert algorithm.places is not None
        algorithm.places.finish(step, count * SIZE)
    return [str(group.problem.question) for group in asked]


def test_an_unshuffled_file_is_drawn_in_its_order() -> None:
    write_rows("rows.jsonl", 0, 200)
    write_rows("held.jsonl", 1000, 1)
    config = settings(val_data_path="held.jsonl")
    num_batches = some_batches(1, 40)
    expected = [str(number % 200) for number in range(SIZE * sum(num_batches))]
    assert drawn(GrpoAlgorithm(config, character_tokenizer(config)), num_batches) == expected
    assert len({*expected}) == 200


def test_each_of_two_loaders_is_drawn() -> None:
    sets = [{"data_path": write_rows(f"{start}.jsonl", start, 40)} for start in (0, 100)]
    held = [{"data_path": write_rows("held.jsonl", 1000, 1)}]
    data = {"train": sets, "validation": held, "use_multiple_dataloader": True, "num_prompts_per_dataloader": SIZE}
    config = build_config(
        {
            "grpo": {"num_prompts_per_step": SIZE, "num_generations_per_prompt": 2, "use_dynamic_sampling": True},
            "policy": {"model_name": "model", "train_global_batch_size": 8, "max_total_sequence_length": 64},
            "data": {**data, "shuffle": False},
            "env": {"exact_match": {}},
        }
    )
    questions = drawn(GrpoAlgorithm(config, character_tokenizer(config)), [1, 2, 1])
    expected = [[first + number for number in range(SIZE)] for first in (0, 100, SIZE, 100 + SIZE)]
    assert questions == [str(number) for batch in expected for number in batch]
