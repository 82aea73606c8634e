"""Clients of the Tinker API train on a GPU: the numbers are those of plain torch, and saved states go on to the bit."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.harness.tinker.server import served
from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("tinker") is None, reason="Tinker's SDK is not installed"),
    pytest.mark.skipif(IS_RUNNING, reason="clients would run on simulated GPUs as well"),
]

TOLERANCE = 1e-4
"""Of float32 sums that are taken in another order."""
ONE: dict[str, Any] = {"cluster": {"trainers": 1}, "policy": {"new_model": None}}


def test_steps_and_samples_are_those_of_torch() -> None:
    with served(ONE) as server:
        found = server.client("steps")
        assert max(found.values()) < TOLERANCE, found
        assert server.client("custom") < TOLERANCE
    with served({**ONE, "logger": {"log_dir": "samples"}}) as server:
        found = server.client("samples")
        assert found["worst"] < TOLERANCE


def test_saved_states_go_on_to_the_bit() -> None:
    with served(ONE) as server:
        found = server.client("saved")
    assert {name: found[name] for name in ("with_optimizer", "first_without", "second_without")} == {
        "with_optimizer": True,
        "first_without": True,
        "second_without": False,
    }
