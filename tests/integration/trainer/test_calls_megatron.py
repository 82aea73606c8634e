"""A front end's calls to Megatron-Core, however it spreads a model, compute what plain torch does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.common.messages import StepOptimizer
from tandem.config import Config
from tandem.trainer.backend import LossOfMicroBatch, OptimizerStep, TrainerBackend
from tandem.trainer.micro_batches import MicroBatch
from tests.harness.trainers.megatron_harness import (
    BATCHES,
    CP2,
    EP2,
    PLAIN,
    PP2,
    SP,
    TP2,
    VIRTUAL,
    config_for,
    make,
    make_checkpoint,
)
from tests.harness.trainers.reference import assert_same_numbers, numbers_of, plain_numbers
from tests.harness.trainers.trainer_harness import ADAMW

pytestmark = pytest.mark.usefixtures("rank_server")

OVERLAP = {"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 2000}}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, PLAIN),
    "DP2 distributed optimizer, overlapped": (2, OVERLAP),
    "TP2+SP+EP2": (2, TP2 | SP | EP2),
    "CP2": (2, CP2),
    "PP2 with virtual stages": (2, PP2 | VIRTUAL | OVERLAP),
}


@pytest.mark.parametrize(("num_ranks", "megatron"), CASES.values(), ids=CASES)
def test_three_steps_of_two_gradients(num_ranks: int, megatron: dict[str, Any], tmp_path: Path) -> None:
    """Between them, another set of weights has its turn."""
    folder = make_checkpoint(tmp_path / "model", "qwen3_moe")
    expected = plain_numbers(folder, BATCHES, temperature=0.7, kl=0.1)
    assert max(norm for _, norm in expected.steps) > 1.0, "clipping is part of what is compared"
    found = numbers_of(num_ranks, make_called, config_for(folder, num_ranks, megatron), BATCHES, tmp_path / "saved")
    assert_same_numbers(found, expected, 1e-5)


def make_called(config: Config, checkpoint: Path | None = None) -> TrainerBackend:
    """Make a backend that takes its steps by calls."""
    from tandem.trainer.calls.of_megatron import OfMegatron  # as Megatron-Core is: once `make` has prepared it

    backend: Any = make(config, checkpoint)
    called = OfMegatron(backend)
    numbers = {
        "learning_rate": ADAMW["lr"],
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": ADAMW["eps"],
        "weight_decay": ADAMW["weight_decay"],
        "max_grad_norm": 1.0,
    }
    command = StepOptimizer(command_id=1, deadline_s=60.0, **numbers)

    def take(micro_batches: Sequence[MicroBatch], loss: LossOfMicroBatch, model: str, **_: bool) -> OptimizerStep:
        parts = micro_batches[:1], micro_batches[1:]
        assert all(parts)
        first = called.add_gradient(parts[0], loss)
        assert called.score(parts[0], loss) == pytest.approx(first, abs=1e-6)
        before = {name: tensor.clone() for name, tensor in called.trained_here().items()}
        progress = called.set_aside(has_gradient=True)
        called.add_gradient(parts[1], loss)
        called.step(command, 0.0, has_gradient=True)
        called.forget_steps()
        called.take_back(progress)
        for name, tensor in called.trained_here().items():
            tensor.copy_(before[name])
        total = first + called.add_gradient(parts[1], loss)
        norm = called.step(command, total, has_gradient=True)
        return OptimizerStep(loss=total, grad_norm=norm, learning_rate=command.learning_rate)

    backend.train_step = take
    return backend
