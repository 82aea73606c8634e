"""Whole runs in which what a member says is changed on its way: well-formed, and wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tandem.common.messages import FromRollout, FromTrainer
from tests.harness.processes.relay import Relay, Tampering
from tests.harness.runs.by_hand import assert_same_results, undisturbed_run
from tests.harness.runs.running import Command, joins, steps_of, write_config

SIX: dict[str, Any] = {
    "grpo": {"max_num_steps": 6, "val_period": 3},
    "checkpointing": {"save_period": 6},
    "cluster": {"max_replacements": 10},
}


def nan_reward(message: dict[str, Any], arrays: dict[str, Any]) -> None:
    message["samples"][-1]["reward"] = float("nan")


def another_version(message: dict[str, Any], arrays: dict[str, Any]) -> None:
    for sample in message["samples"]:
        sample["newest_version"] = 100


def too_many_tokens(message: dict[str, Any], arrays: dict[str, Any]) -> None:
    message["samples"][0]["num_tokens"] = 10**9


def negative_response(message: dict[str, Any], arrays: dict[str, Any]) -> None:
    message["samples"][0]["response_length"] = -5


ENGINES: list[tuple[int, Tampering, str]] = [
    (1, nan_reward, r"samples\[\d+\].reward: Expected `float` .*"),
    (2, another_version, r"samples\[0\].newest_version: 100, must be .*"),
    (3, too_many_tokens, r"samples\[0\].num_tokens: 1000000000, must be at most \d+"),
    (4, negative_response, r"samples\[0\].response_length: Expected `int` >= 0"),
]
"""In which step each engine's samples are changed, how, and what is said of it."""


def test_engines_that_say_what_cannot_be_are_replaced_and_nothing_else_differs(tmp_path: Path) -> None:
    folder = tmp_path / "undisturbed"
    folder.mkdir()
    undisturbed = undisturbed_run(folder, SIX)
    by_hand = SIX | {"cluster": SIX["cluster"] | {"launch": {"trainers": 1, "refit": True}}}
    with Command("coordinator", "up", write_config(by_hand)) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]
        for step, tamper, what in ENGINES:

            def is_wanted(message: dict[str, Any], step: int = step) -> bool:
                return message["type"] == "SamplesFinished" and message["step"] == step

            with (
                Relay(address, "rollout", FromRollout, is_wanted, tamper) as relay,
                Command("rollout", *relay.joins) as rollout,
            ):
                said = run.wait_for(rf"rollout-0 is lost: (it broke the protocol: SamplesFinished\.{what}); start")[1]
                assert rollout.wait() == 0
                assert f"rollout-0 leaves: {said}" in rollout.output()
        with Command("rollout", *joins(address)) as rollout:
            assert run.wait() == 0, run.output()
            assert rollout.wait() == 0
    assert "Traceback" not in run.output()
    assert_same_results("run", undisturbed)


def nan_metric(message: dict[str, Any], arrays: dict[str, Any]) -> None:
    message["metrics"]["loss"] = float("nan")


def a_million_metrics(message: dict[str, Any], arrays: dict[str, Any]) -> None:
    message["metrics"] = {f"metric {i}": 0.0 for i in range(10**6)}


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (nan_metric, r"Trained\.metrics\['loss'\]: nan, must be a finite number"),
        (a_million_metrics, r"Trained\.metrics: Expected `object` of length <= 1000"),
    ],
    ids=["NaN", "a million"],
)
def test_a_trainer_that_says_what_cannot_be_ends_the_run_with_one_line(tamper: Tampering, what: str) -> None:
    over = SIX | {"cluster": {"launch": {"rollouts": 1, "refit": True}, "max_replacements": 0}}
    with Command("coordinator", "up", write_config(over)) as run:
        address = run.wait_for(r"listens on (tcp://\S+)")[1]

        def is_wanted(message: dict[str, Any]) -> bool:
            return message["type"] == "Trained" and message["step"] == 2

        with (
            Relay(address, "trainer", FromTrainer, is_wanted, tamper) as relay,
            Command("trainer", *relay.joins) as trainer,
        ):
            assert run.wait() == 1, run.output()
            assert trainer.wait() == 0, trainer.output()
    (line,) = (line for line in run.output().splitlines() if "error" in line)
    assert re.fullmatch(rf"error: trainer-0 failed while training: it broke the protocol: {what}", line), line
    assert "Traceback" not in run.output()
    assert [step.step for step in steps_of()] == [1]
