"""Clients train with Megatron-Core by the same calls: the numbers are those of plain torch and the other backend."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness.runs.running import coordinator, process_of, wait_until
from tests.harness.tinker.server import served

_CLOSE = 1e-5


def _with(**megatron: Any) -> dict[str, Any]:
    return {"policy": {"megatron_cfg": {"enabled": True, **megatron}}}


_ADAPTERS = _with(peft={"enabled": True, "dim": 4, "alpha": 8})


def test_ten_steps_are_those_of_torch_and_of_the_other_backend() -> None:
    with served(_with()) as server:
        found = server.client("steps")
        assert max(found.values()) < _CLOSE, found
        assert server.client("custom") < _CLOSE
        server.command.signal(signal.SIGKILL)
        server.command.wait()
    done = coordinator("replay", "run")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("equal to the bit to those of run", done.stdout)) == 2, done.stdout
    for change in (["cluster.trainers=1"], ["policy.megatron_cfg.enabled=false"]):
        done = coordinator("replay", "run", *change)
        assert done.returncode == 0, done.stderr
        gaps = [float(each) for each in re.findall(r"losses and norms within (\S+),", done.stdout)]
        assert len(gaps) == 2, done.stdout
        assert max(gaps) < 10 * _CLOSE, "of the ten steps together, each beside its own"
    for setting, why in (
        ("policy.megatron_cfg.optimizer.optimizer=sgd", "optimizer: coordinator tinker steps by AdamW alone: set adam"),
        ("policy.megatron_cfg.optimizer.decoupled_weight_decay=false", "decoupled_weight_decay: coordinator tinker"),
        ("policy.megatron_cfg.optimizer.use_precision_aware_optimizer=true", "cannot set the state of this optimizer"),
        ("policy.router_replay.enabled=true", "policy.router_replay.enabled"),
    ):
        refused = coordinator("tinker", "tinker.yaml", "--restart", setting)
        assert refused.returncode == 2, setting
        assert why in refused.stderr


def test_two_trainers_of_one_model_step_save_and_publish() -> None:
    with served(_with(tensor_model_parallel_size=2)) as server:
        found = server.client("steps")
        assert max(found.values()) < _CLOSE, found
        assert server.client("samples")["worst"] < _CLOSE
        found = server.client("saved")
        server.command.signal(signal.SIGKILL)
        server.command.wait()
    assert (found["with_optimizer"], found["first_without"], found["second_without"]) == (True, True, False)
    done = coordinator("replay", "run")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("equal to the bit to those of run", done.stdout)) == 5, done.stdout


def test_two_models_side_by_side_are_those_that_each_is_alone() -> None:
    with served(_ADAPTERS, "--models", "2") as server:
        found = server.client("several")
        server.command.signal(signal.SIGINT)
        assert server.command.wait() == 0
    assert found["differ"]
    assert found["base"] < _CLOSE
    for way, both in found["gaps"].items():
        for trained, sampled in both:
            assert trained == 0.0, (way, found)
            assert sampled < _CLOSE, (way, found)
    done = coordinator("replay", "run")
    assert done.returncode == 0, done.stderr
    equal = re.findall(r"gradients?(?:, | and )\d+ steps?(?: and 1 saved state)?: equal to the bit", done.stdout)
    assert len(equal) == 6, done.stdout


def test_an_engine_a_trainer_and_the_refit_service_are_killed() -> None:
    with served(_with()) as server:
        client = server.start("killed")
        for name, kind, index in (("engine", "rollout", 0), ("trainer", "trainer", 1), ("service", "refit", 0)):
            wait_until(Path(f"{name}.ready").exists, lambda: server.command.output(), lambda: client.poll() is not None)
            process_of(server.command, kind, index).kill()
            Path(f"{name}.killed").touch()
        found = server.result_of(client)
    assert found["gap"] < _CLOSE, "the engine in its place has the same weights"
    assert "a trainer was" in found["lost"]
    assert found["went_on"] == pytest.approx(found["losses"][1:], abs=_CLOSE), "from the saved state"
