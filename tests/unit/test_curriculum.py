"""Levels that follow accuracy: a function of the journal, and problems that are those of reasoning-gym's levels."""

from __future__ import annotations

from typing import Any

import pytest
from data_harness import character_tokenizer
from reasoning_gym.factory import create_curriculum, create_dataset

from tandem.common.errors import ConfigError, DataError
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.curriculum import CurriculumLevels
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.algorithms.places import PlaceUnknown
from tandem.rollout.environments.reasoning_gym import ReasoningGym
from tandem.samples.data_sets.reasoning_tasks import CurriculumSettings
from tandem.samples.model_files import load_tokenizer

CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
SETTINGS = CurriculumSettings(last_k=2, success_threshold=0.8, failure_threshold=0.2, max_level=3)


def levels_of(accuracies: list[float | None], age: int, first: int = 1) -> list[int]:
    """Return the levels of the steps that had these accuracies, and of the one after them."""
    levels = CurriculumLevels(SETTINGS, {"chain_sum": first}, age)
    drawn = []
    for step, accuracy in enumerate(accuracies, start=1):
        metrics = {} if accuracy is None else {"train_chain_sum/accuracy": accuracy}
        drawn.append(levels.finish(step, metrics)["train_chain_sum/level"])
    return [*map(int, drawn), levels.of(len(accuracies) + 1)["chain_sum"]]


@pytest.mark.parametrize(
    ("accuracies", "age", "expected"),
    [
        ([0.5, 0.5, 0.5], 0, [1, 1, 1, 1]),
        ([0.9, 0.7], 0, [1, 1, 2]),
        ([0.9, 0.7, 0.9, 0.7, 0.9, 0.9], 0, [1, 1, 2, 2, 3, 3, 3]),
        ([0.1, 0.3], 0, [1, 1, 0]),
        ([0.0, 0.0, 0.0, 0.0], 0, [1, 1, 0, 0, 0]),
        ([0.5, 0.9, 0.9], 0, [1, 1, 1, 2]),
        ([0.9, None, 0.9], 0, [1, 1, 1, 2]),
        # Two steps of level 1 decide; those drawn at it before the change is seen do not count for level 2.
        ([0.9, 0.9, 0.9, 0.0, 0.0], 1, [1, 1, 1, 2, 2, 2]),
        ([0.9, 0.9, 0.9, 0.0, 0.0, 0.5], 1, [1, 1, 1, 2, 2, 2, 1]),
    ],
)
def test_levels_follow_the_accuracy_of_the_last_steps_at_a_level(
    accuracies: list[float | None], age: int, expected: list[int]
) -> None:
    assert levels_of(accuracies, age) == expected


@pytest.mark.parametrize("age", [0, 1, 3])
def test_levels_after_a_resume_are_those_without_it(age: int) -> None:
    class Record:
        def __init__(self, step: int, accuracy: float) -> None:
            self.step, self.metrics = step, {"train_chain_sum/accuracy": accuracy}

    accuracies = [0.9, 0.85, 0.1, 0.9, 0.95, 0.8, 0.0, 0.1, 0.0, 0.3]
    whole = levels_of([*accuracies], age)
    for stop in range(len(accuracies)):
        levels = CurriculumLevels(SETTINGS, {"chain_sum": 1}, age)
        for step in range(1, 1 + min(len(accuracies), stop + 2)):  # what was done after the checkpoint is forgotten
            levels.finish(step, {"train_chain_sum/accuracy": 1.0 if step > stop else accuracies[step - 1]})
        levels.resume([Record(step, accuracies[step - 1]) for step in range(1, stop + 1)])  # type: ignore[arg-type]
        for step in range(1, stop + 2 + age):
            assert levels.of(step)["chain_sum"] == (whole + [levels.of(step)["chain_sum"]] * age)[step - 1]
        with pytest.raises(PlaceUnknown, match=f"step {stop + 1} has yet to train"):
            levels.of(stop + 2 + age)


MIXTURE: list[dict[str, Any]] = [
    {"name": "chain_sum", "level": 1, "config": {"min_terms": 2}},
    {"name": "decimal_arithmetic"},
]


def curriculum_config(
    datasets: list[dict[str, Any]] = MIXTURE, max_level: int = 2, max_input_seq_length: int = 500
) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 2},
            "policy": {
                "model_name": "nowhere",
                "train_global_batch_size": 16,
                "max_total_sequence_length": 2_048,
            },
            "data": {
                "dataset_name": "reasoning_gym",
                "task": "composite",
                "task_params": {"datasets": datasets, "curriculum": {"last_k": 1, "max_level": max_level}},
                "max_input_seq_length": max_input_seq_length,
                "num_train": 64,
                "num_validation": 16,
            },
        }
    )


def test_problems_are_those_of_the_level_and_never_held_out() -> None:
    config = curriculum_config()
    running = GrpoAlgorithm(config, character_tokenizer(config, CHARACTERS))
    assert running.curriculum is not None
    held_out = {str(group.problem.question) for group in running.prompt_groups(0, "validate", range(16))}
    first = running.prompt_groups(1, "train", range(8))
    running.curriculum.levels.finish(1, {"train_chain_sum/accuracy": 1.0, "train_decimal_arithmetic/accuracy": 1.0})
    second = running.prompt_groups(2, "train", range(8))
    running.curriculum.levels.finish(2, {"train_chain_sum/accuracy": 0.0})
    third = running.prompt_groups(3, "train", range(8))
    curriculum = create_curriculum("chain_sum")
    curriculum.set_global_level(2)
    made = curriculum.generate_configuration()
    environment = ReasoningGym("composite", config.data.task_params)
    seen: set[str] = set()
    for groups, level in ((first, None), (second, 2), (third, None)):
        for group in groups:
            problem = group.problem
            assert str(problem.question) not in held_out
            of_chain_sum = problem.metadata["source_dataset"] == "chain_sum"
            assert problem.metadata.get("curriculum_level") == (level if of_chain_sum else None)
            assert environment.score(problem, str(problem.answer)).correct
            assert not environment.score(problem, "xyzzy").correct
            if of_chain_sum and level is not None:
                seed = int(problem.problem_id.rpartition("-")[2]) + 1  # of a composite's first part
                sizes = {"min_terms": 2, "max_terms": made.max_terms, "min_digits": made.min_digits}
                own = create_dataset("chain_sum", seed=seed, size=1, max_digits=made.max_digits, **sizes)[0]
                assert (own["question"], own["answer"]) == (problem.question, problem.answer)
            seen.add(problem.problem_id)
    assert len(seen) == 24, "no problem comes twice"
    assert {"chain_sum", "decimal_arithmetic"} == {str(group.problem.metadata["source_dataset"]) for group in second}
    again = GrpoAlgorithm(config, load_tokenizer(config))
    assert again.curriculum is not None
    again.curriculum.levels.finish(1, {"train_chain_sum/accuracy": 1.0})
    assert again.prompt_groups(2, "train", range(8)) == second
    with pytest.raises(PlaceUnknown):
        again.prompt_groups(3, "train", [0])


def test_a_level_whose_problems_do_not_fit_is_refused_before_the_run() -> None:
    boards: list[dict[str, Any]] = [{"name": "game_of_life", "level": 0}]  # 523, 1633 and 5483 characters
    fitting = curriculum_config(boards, max_level=1, max_input_seq_length=2_000)
    tokenizer = character_tokenizer(fitting, CHARACTERS)
    GrpoAlgorithm(fitting, tokenizer)
    with pytest.raises(DataError, match=r"of game_of_life at level 2 can be trained on: .* bounds the levels\)$"):
        GrpoAlgorithm(curriculum_config(boards, max_level=2, max_input_seq_length=2_000), tokenizer)


def test_only_runs_with_responses_follow_accuracy() -> None:
    data = {
        "dataset_name": "reasoning_gym",
        "task": "composite",
        "task_params": {"datasets": MIXTURE, "curriculum": {}},
    }
    values = {"algorithm": "sft", "sft": {}, "policy": {"model_name": "nowhere"}, "data": data}
    with pytest.raises(ConfigError, match=r"data\.task_params\.curriculum: levels follow the accuracy of responses"):
        build_config(values)
