"""Data is tokenised when it is drawn; what is wrong with it is mostly said before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_harness import character_tokenizer, data_config

from tandem.common.config import Config
from tandem.common.errors import DataError
from tandem.common.tokenizer import load_tokenizer
from tandem.coordinator.algorithms import make_feed
from tandem.coordinator.algorithms.given import GivenFeed
from tandem.coordinator.algorithms.grpo import GrpoFeed
from tandem.coordinator.data import Drawn, epoch_stream
from tandem.coordinator.data.drawn import NUM_CHECKED

NUM = 2 * NUM_CHECKED
TOO_LONG = "longer than data.max_input_seq_length and policy.max_total_sequence_length allow"


def rows(num: int = NUM, **changed: str) -> dict[str, Any]:
    """Write sums to a file; ``_7="x"`` changes the question of row 7."""
    inputs = [changed.get(f"_{index}", f"{index} + 1") for index in range(num)]
    text = "\n".join(json.dumps({"input": asked, "output": f" = {index + 1}"}) for index, asked in enumerate(inputs))
    Path("sums.jsonl").write_text(text)
    return {"dataset_name": "jsonl", "train_data_path": "sums.jsonl", "val_data_path": "held_out.jsonl"}


@pytest.fixture(autouse=True)
def held_out() -> None:
    Path("held_out.jsonl").write_text('{"input": "- 1", "output": " = - 1"}\n')


def place(config: Config, position: int, num: int = NUM) -> int:
    """The row that a run draws at this position."""
    return epoch_stream(config.algorithm_section.seed, num, position, 1)[0]


def questions(feed: GivenFeed | GrpoFeed, config: Config, steps: range) -> list[str]:
    """What each step asks, in order."""
    if isinstance(feed, GrpoFeed):
        groups = [group for step in steps for group in feed.prompt_groups(step, "train", range(4))]
        return [group.problem.question for group in groups]
    tokenizer, found = load_tokenizer(config), []
    for step in steps:
        batch, _ = feed.batch(step, "train")
        end = 0
        for length in batch.lengths_S:
            found.append(tokenizer.decode(batch.token_ids_T[end : end + length].tolist()).split(" = ")[0])
            end += length
    return found


def feed_of(config: Config) -> Any:
    return make_feed(config, load_tokenizer(config) if Path("model").exists() else character_tokenizer(config))


def test_only_the_first_items_are_encoded_at_once_and_the_rest_when_they_are_drawn() -> None:
    asked: list[int] = []

    def encode(item: int) -> str:
        asked.append(item)
        return str(item)

    config = data_config("sft", **rows())
    drawn = Drawn(config, range(NUM), encode)
    order = epoch_stream(config.sft.seed, NUM, 0, NUM)
    assert asked == order[:NUM_CHECKED]
    assert drawn.draw(0, NUM) == [str(item) for item in order]
    assert asked == order, "each once"
    made = data_config("sft", num_train=NUM)
    asked.clear()
    Drawn(made, range(NUM), encode)
    assert len(asked) == NUM, "what a task made is wrong altogether if it is wrong anywhere"


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_an_item_that_is_too_long_gives_its_place_to_the_next_whenever_it_is_drawn(algorithm: str) -> None:
    config = data_config(algorithm, **rows())
    late, early = place(config, NUM - 1), place(config, 0)
    config = data_config(algorithm, **rows(**{f"_{late}": "1" * 70, f"_{early}": "2" * 70}))
    feed = feed_of(config)
    (notice,) = feed.notices
    checked = NUM_CHECKED + 1
    assert notice == f"data: 1 of the first {checked} left out, and others when it is their turn: {TOO_LONG}"
    size = 8 if algorithm == "sft" else 4
    epoch = questions(feed, config, range(1, NUM // size + 1))
    expected = [f"{(index + (index in (late, early))) % NUM} + 1" for index in epoch_stream(1, NUM, 0, NUM)]
    assert epoch == expected
    last = range(NUM // size, NUM // size + 1)
    assert questions(feed_of(config), config, last) == expected[-size:], "a resumed run draws the same"


@pytest.mark.parametrize("algorithm", ["sft", "grpo"])
def test_what_cannot_be_tokenised_is_named_at_once_among_the_first_and_else_when_it_is_drawn(algorithm: str) -> None:
    config = data_config(algorithm, **rows())
    first, last = place(config, NUM_CHECKED - 1), place(config, NUM - 1)
    unknown = "the tokenizer in model does not know the character 'x'"
    with pytest.raises(DataError, match=f"^problem 'sums.jsonl:{first + 1}': {unknown}$"):
        feed_of(data_config(algorithm, **rows(**{f"_{first}": "x"})))
    config = data_config(algorithm, **rows(**{f"_{last}": "x"}))
    feed, num_steps = feed_of(config), NUM // (8 if algorithm == "sft" else 4)
    questions(feed, config, range(1, num_steps))
    with pytest.raises(DataError, match=f"^problem 'sums.jsonl:{last + 1}': {unknown}$"):
        questions(feed, config, range(num_steps, num_steps + 1))


@pytest.mark.parametrize(("num", "which"), [(9, "every one"), (NUM, f"each of the first {NUM_CHECKED}")])
def test_a_file_of_which_nothing_fits_is_refused(num: int, which: str) -> None:
    long = {f"_{index}": f"{index} " + "1" * 70 for index in range(num)}
    with pytest.raises(DataError, match=f"^data: {which} is longer than policy.max_total_sequence_length allows$"):
        feed_of(data_config("sft", **rows(num, **long)))
    Path("held_out.jsonl").write_text(json.dumps({"input": "1" * 70, "output": "2"}))
    with pytest.raises(DataError, match=r"^data: everything held out is longer than policy.max_total_sequence"):
        feed_of(data_config("sft", **rows(num)))
