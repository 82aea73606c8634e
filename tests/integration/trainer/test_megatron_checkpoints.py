"""Checkpoints of the Megatron-Core backend: whatever the parallelism was and will be, training goes on as if unbroken.

Most gradients here are made up, tensor by tensor of the Hugging Face checkpoint, so that they are the same however a
model is cut: what AdamW makes of them is then the same as well, and one process tells what.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tandem.common.errors import CheckpointError
from tandem.config import Config
from tandem.trainer.backends import make_backend
from tests.harness.trainers.checkpoint_harness import no_pickle
from tests.harness.trainers.megatron_harness import (
    EP2,
    OPTIMIZER,
    PLAIN,
    PP2,
    SP,
    TP2,
    VIRTUAL,
    config_for,
    make_checkpoint,
    tensors_in,
)
from tests.harness.trainers.trainer_harness import digest_of, make_batch, run_ranks, train_on, train_while_saving

pytestmark = pytest.mark.usefixtures("rank_server")

CASES: dict[str, tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "TP2 to one rank": ("llama", (2, TP2), (1, {})),
    "one rank to TP2": ("qwen2", (1, PLAIN), (2, TP2)),
    "PP2 to one rank": ("qwen3 tied", (2, PP2), (1, PLAIN)),
    "virtual stages to TP2": ("qwen3", (2, PP2 | VIRTUAL | PLAIN), (2, TP2 | PLAIN)),
    "DP4 to DP2": ("qwen3", (4, {}), (2, {})),
    "DP2 whole to DP2 split": ("qwen3", (2, PLAIN), (2, {})),
    "EP2 to one rank": ("qwen3_moe", (2, EP2), (1, {})),
    "TP2 EP2 to PP2": ("qwen3_moe", (2, TP2 | SP | EP2), (2, PP2 | PLAIN)),
    "one rank to EP2": ("qwen3_moe", (1, {}), (2, EP2)),
}


@pytest.mark.parametrize(("model", "before", "after"), CASES.values(), ids=CASES)
def test_training_goes_on_with_another_parallelism(
    model: str, before: tuple[int, dict[str, Any]], after: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    start = make_checkpoint(tmp_path / "start", model)
    first, second = (config_for(start, *each) for each in (before, after))
    run_ranks(before[0], step_and_save, first, None, range(2), tmp_path / "step_2")
    found, *_ = run_ranks(after[0], step_and_save, second, tmp_path / "step_2", range(2, 4), None)
    expected = trained_by_torch(tensors_in(start), 4)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=1e-6, err_msg=name)


def step_and_save(
    rank: int, config: Config, checkpoint: Path | None, steps: range, folder: Path | None
) -> dict[str, Any]:
    backend: Any = make_backend(config, checkpoint=checkpoint)
    assert backend._held["policy", 0].num_steps == steps.start
    for number in steps:
        take_step(backend, number)
    if folder is not None:
        backend.save(folder).num_bytes.result()
    weights = backend._held["policy", 0].weights
    return {name: tensor.numpy() for batch in weights.gathered() for name, tensor in batch.items()}


def take_step(backend: Any, number: int) -> None:
    """Step with the gradients of step `number`, as they are once they have been reduced, and not clipped."""
    policy = backend._held["policy", 0]
    held = policy.weights
    for name, parameter in held.parameters.items():
        into, size = parameter.main_grad, parameter.element_size()
        into.zero_()
        for tensor, piece in held.pieces[name]:
            region = piece.box.region
            strides = [stride // size for stride in piece.strides]
            there = into.as_strided(piece.box.shape, strides, into.storage_offset() + piece.offset // size)
            there.copy_(gradient_of(tensor.name, tensor.shape, number)[region])
    policy.optimizer.prepare_grads()
    policy.optimizer.step_with_ready_grads()
    policy.num_steps += 1


def gradient_of(name: str, shape: tuple[int, ...], number: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode())))


def trained_by_torch(tensors: dict[str, torch.Tensor], num_steps: int) -> dict[str, torch.Tensor]:
    """One process takes all steps. Megatron-Core decays no vectors."""
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    matrices, vectors = ([p for p in parameters.values() if (p.dim() > 1) is more] for more in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=OPTIMIZER["lr"],
        weight_decay=OPTIMIZER["weight_decay"],
        eps=OPTIMIZER["adam_eps"],
    )
    for number in range(num_steps):
        for name, parameter in parameters.items():
            parameter.grad = gradient_of(name, tuple(parameter.shape), number)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize(
    ("megatron", "precision"),
    [({}, "float32"), ({}, "bfloat16"), (PLAIN, "bfloat16"), (TP2 | SP, "float32")],
    ids=["split", "split bfloat16", "whole bfloat16", "TP2"],
)
def test_a_resumed_run_equals_an_uninterrupted_one(megatron: dict[str, Any], precision: str, tmp_path: Path) -> None:
    start = make_checkpoint(tmp_path / "start", "qwen3")
    config = config_for(start, 2, megatron, precision=precision)
    unbroken = run_ranks(2, train_and_save, config, None, range(4), None)
    saving = run_ranks(2, save_aside, config, range(4), 2, tmp_path / "step_2")
    resumed = run_ranks(2, train_and_save, config, tmp_path / "step_2", range(2, 4), None)
    assert saving == unbroken, "to save changes nothing"
    assert [digest for _, digest in resumed] == [digest for _, digest in unbroken]
    assert [metrics for metrics, _ in resumed] == [metrics[2:] for metrics, _ in unbroken]


def train_and_save(
    rank: int, config: Config, checkpoint: Path | None, seeds: range, folder: Path | None
) -> tuple[list[dict[str, float]], int]:
    backend = make_backend(config, checkpoint=checkpoint)
    metrics = [train_on(backend, make_batch(16, seed=seed), config).metrics for seed in seeds]
    if folder is not None:
        backend.save(folder).num_bytes.result()
    return metrics, digest_of(backend, config.policy.precision)


def save_aside(
    rank: int, config: Config, seeds: range, num_before: int, folder: Path
) -> tuple[list[dict[str, float]], int]:
    backend = make_backend(config, checkpoint=None)
    metrics = train_while_saving(backend, config, seeds, num_before, folder)
    return metrics, digest_of(backend, config.policy.precision)


def test_nothing_is_pickled_and_what_is_lost_is_named(tmp_path: Path) -> None:
    config, saved = config_for(make_checkpoint(tmp_path / "start", "qwen3"), 2, {}), tmp_path / "step_1"
    run_ranks(2, save_and_load_without_pickle, config, saved)
    kinds = {path.suffix for path in saved.rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json", ".jinja"}
    (saved / "optimizer" / "boxes-00001-00000.safetensors").unlink()
    for error in run_ranks(2, fail_to_load, config, saved):
        assert f"cannot read {saved / 'optimizer'}: " in error
        assert "missing" in error


def save_and_load_without_pickle(rank: int, config: Config, folder: Path) -> None:
    from tandem.trainer.backends.megatron import held

    backend: Any = make_backend(config, checkpoint=None)
    take_step(backend, 0)
    with no_pickle():
        backend.save(folder).num_bytes.result()
        dist.barrier()
        policy = backend._held["policy", 0]
        held.load_model(folder, policy.weights, "policy")
        counts = held.load_optimizer(folder, policy.weights, policy.optimizer, "policy")
        assert counts.steps == 1


def fail_to_load(rank: int, config: Config, folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        make_backend(config, checkpoint=folder)
    return str(raised.value)
