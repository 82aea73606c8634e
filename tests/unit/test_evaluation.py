"""Validation with samples of its own, and runs that do nothing but validate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from data_harness import character_tokenizer, data_config

from tandem.common.errors import DataError, RewardError
from tandem.common.messages import Problem
from tandem.config import Config
from tandem.config.checks import find_broken_rules
from tandem.coordinator.algorithms.grpo import GrpoAlgorithm
from tandem.coordinator.loop.spec import run_spec
from tandem.rollout.environments.answers import ExactMatch
from tandem.rollout.environments.environment import Score
from tandem.rollout.environments.math import MathVerify
from tandem.rollout.environments.outcomes import checked, step_of
from tandem.rollout.environments.reasoning_gym import ReasoningGym
from tandem.rollout.environments.several_turns import Calculator
from tandem.samples.model_files import load_tokenizer


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_grpo(config: Config, **settings: Any) -> Config:
    return msgspec.structs.replace(config, grpo=msgspec.structs.replace(config.grpo, **settings))


def made(config: Config) -> GrpoAlgorithm:
    is_there = Path(config.policy.model_name).exists()
    return GrpoAlgorithm(config, load_tokenizer(config) if is_there else character_tokenizer(config))


def held_out_file() -> str:
    Path("held_out.jsonl").write_text("".join(f'{{"input": "{a} + 1", "output": "{a + 1}"}}\n' for a in range(5)))
    return "held_out.jsonl"


def test_validation_may_have_a_temperature_of_its_own() -> None:
    plain, greedy = made(data_config()), made(with_grpo(data_config(), val_temperature=0.0))
    assert plain.sampling("validate") == plain.sampling("train") == greedy.sampling("train")
    assert greedy.sampling("validate") == msgspec.structs.replace(plain.sampling("train"), temperature=0.0)


def test_validation_may_have_samples_and_a_seed_of_its_own() -> None:
    plain = made(data_config())
    own = made(with_grpo(data_config(), num_val_generations_per_prompt=3, val_seed=77))
    same = made(with_grpo(data_config(), num_val_generations_per_prompt=3, val_seed=data_config().grpo.seed))
    groups = [algorithm.prompt_groups(0, "validate", range(4)) for algorithm in (plain, own, same)]
    assert [len(group.seeds) for group in groups[1]] == [3] * 4
    assert [group.prompt_ids for group in groups[0]] == [group.prompt_ids for group in groups[1]], "the same problems"
    assert [group.seeds[0] for group in groups[0]] == [group.seeds[0] for group in groups[2]]
    assert not {seed for group in groups[1] for seed in group.seeds} & {s for group in groups[2] for s in group.seeds}
    assert plain.prompt_groups(3, "train", range(2)) == own.prompt_groups(3, "train", range(2))


def test_a_run_without_steps_needs_held_out_problems_alone() -> None:
    data = {"dataset_name": "jsonl", "val_data_path": held_out_file(), "train_data_path": "not there.jsonl"}
    config = with_grpo(data_config(**data, num_validation=None, num_train=None), max_num_steps=0)
    running = made(config)
    assert (running.num_steps, running.num_validation, running.notices) == (0, 5, ())
    with pytest.raises(DataError, match=r"not there\.jsonl"):
        made(with_grpo(config, max_num_steps=1))


def test_its_held_out_problems_are_those_of_training() -> None:
    rows = [json.dumps({"input": f"{a} + {b}", "output": str(a + b)}) for a in range(10) for b in range(5)]
    Path("sums.jsonl").write_text("\n".join(rows))
    config = data_config(dataset_name="jsonl", train_data_path="sums.jsonl", num_validation=9, num_train=None)
    training, evaluating = made(config), made(with_grpo(config, max_num_steps=0))
    assert training.prompt_groups(0, "validate", range(9)) == evaluating.prompt_groups(0, "validate", range(9))


def test_a_run_without_steps_is_validated_whatever_its_period() -> None:
    config = with_grpo(data_config(), max_num_steps=0, val_period=0)
    assert not find_broken_rules(config).found, "also checkpoints can be ranked"

    def spec(config: Config) -> bool:
        return run_spec(
            config, first_step=1, last_step=0, num_validation=1, resume_from="", checkpoint_folder=""
        ).validate_at_start

    assert spec(config)
    assert not spec(with_grpo(config, max_num_steps=1))


def test_greedy_samples_are_refused_only_where_training_compares_them() -> None:
    config = data_config()
    policy = msgspec.structs.replace(
        config.policy, generation=msgspec.structs.replace(config.policy.generation, temperature=0.0)
    )
    greedy = msgspec.structs.replace(config, policy=policy)
    assert [problem.key for problem in find_broken_rules(greedy).found] == ["policy.generation.temperature"]
    assert not find_broken_rules(with_grpo(greedy, max_num_steps=0)).found


@pytest.mark.parametrize(
    ("environment", "answer", "response", "expected"),
    [
        (ExactMatch(answer_after="="), "4", "2 + 2 = 4", "4"),
        (ExactMatch(ignore_case=True), "Yes", " YES ", "yes"),
        (ExactMatch(), "4", "  ", None),
        (Calculator(), "0.5", "1.50", "3/2"),
        (MathVerify(), r"\frac{1}{2}", "so $x = 0.5$", r"\frac{1}{2}"),
        (MathVerify(), "7", r"it is \boxed{8}", "8"),
        (MathVerify(), "7", "no idea", None),
        (ReasoningGym("chain_sum", {}, answer_after="="), "12", "5 + 7 = 12", "12"),
    ],
)
def test_environments_say_what_they_took_for_the_answer(
    environment: Any, answer: str, response: str, expected: str | None
) -> None:
    problem = Problem(problem_id="p", question="q", answer=answer, metadata={})
    step = step_of(environment)
    score = step(problem, [{"role": "assistant", "content": response}])
    assert isinstance(score, Score)
    assert score.answer == expected
    assert checked(score, is_multi_turn=False) == score, "as it leaves the worker"


def test_an_answer_that_is_no_text_is_refused() -> None:
    with pytest.raises(RewardError, match="answer is 4, not a text or None"):
        checked(Score(1.0, correct=True, answer=4), is_multi_turn=False)  # type: ignore[arg-type]
