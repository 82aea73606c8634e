"""A rollout process whose weights come to harm behind the transfer: a module that tests start.

``DAMAGES ARGUMENTS...``: the first word says what happens, as ``VERSION:HARM`` with commas between; ``*`` is every
version, and every attempt at it, a number only the first attempt. The rest goes to the real command.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence

import torch

from tandem.common.errors import RefitError
from tandem.refit.weights import Weights
from tandem.rollout import cli
from tandem.rollout.engines.transformers import TransformersEngine
from tests.harness.processes import stream_harms

Tensors = dict[str, torch.Tensor]
Harm = Callable[[Tensors, Tensors], None]
"""Takes the live weights, and a copy of what they were before the transfer."""

LAYER = "model.layers.{}.{}.weight"
Q, K, OUT = (LAYER.format(0, f"self_attn.{name}_proj") for name in "qko")
GATE, DOWN = (LAYER.format(1, f"mlp.{name}_proj") for name in ("gate", "down"))
EMBEDDING = "model.embed_tokens.weight"


def swap_q_and_k(held: Tensors, before: Tensors) -> None:
    q, k = held[Q].clone(), held[K].clone()
    held[Q].copy_(k)
    held[K].copy_(q)


def exchange_two_rows(held: Tensors, before: Tensors) -> None:
    held[DOWN][[3, 5]] = held[DOWN][[5, 3]]


def shift_a_shard(held: Tensors, before: Tensors) -> None:
    held[GATE].copy_(held[GATE].roll(1, dims=0))


def keep_a_stale_tensor(held: Tensors, before: Tensors) -> None:
    held[OUT].copy_(before[OUT])


def flip_one_bit(held: Tensors, before: Tensors) -> None:
    held[EMBEDDING].view(torch.int32)[7, 11] ^= 1


def treble_the_embedding(held: Tensors, before: Tensors) -> None:
    held[EMBEDDING].mul_(3)


HARMS: dict[str, Harm] = {
    "swap": swap_q_and_k,
    "exchange": exchange_two_rows,
    "shift": shift_a_shard,
    "stale": keep_a_stale_tensor,
    "flip": flip_one_bit,
    "treble": treble_the_embedding,
}
PARTIAL, DIES, PAYLOAD = "partial", "dies", "payload"
"""The transfer fails when half of it is there; the process is gone when its peers begin to transfer; a bit of a
difference is flipped on its way."""
PARTIAL_BECAUSE = "the cable was bitten through"

_real_apply = TransformersEngine.apply
_real_transfer = Weights.apply
_harms: dict[str, str] = {}


def _take_harm(version: int, *kinds: str) -> str:
    """Return what happens to a version now, of these kinds."""
    for key in ("*", str(version)):
        if _harms.get(key) in kinds:
            return _harms[key] if key == "*" else _harms.pop(key)
    return ""


def _apply(
    engine: TransformersEngine,
    version: int,
    deadline_s: float,
    only: Collection[str] = (),
    joining_engines: Collection[str] | None = None,
) -> dict[str, int]:
    """Apply a version for real, and damage what is held afterwards."""
    held = {name: parameter.data for name, parameter in engine._model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in held.items()}
    num_bytes = _real_apply(engine, version, deadline_s, only, joining_engines)
    if harm := _take_harm(version, *HARMS):
        HARMS[harm](held, before)
    return num_bytes


def _transfer(
    weights: Weights,
    version: int,
    deadline_s: float,
    only: Collection[str],
    joining_engines: Collection[str] | None = None,
) -> dict[str, int]:
    """Move a version for real, and lose half of it."""
    if _take_harm(version, DIES):
        os.kill(os.getpid(), signal.SIGKILL)
    if _take_harm(version, PAYLOAD):
        stream_harms.damage()
    before = {name: tensor.detach().clone() for name, tensor in weights.storages.items()}
    num_bytes = _real_transfer(weights, version, deadline_s, only, joining_engines)
    if _take_harm(version, PARTIAL):
        for name in [*before][::2]:
            weights.storages[name].data.copy_(before[name])
        raise RefitError(PARTIAL_BECAUSE)
    return num_bytes


def main(arguments: Sequence[str]) -> int:
    """Run the real command with the engine patched."""
    _harms.update(word.split(":") for word in arguments[0].split(","))
    TransformersEngine.apply = _apply  # type: ignore[method-assign]
    Weights.apply = _transfer  # type: ignore[method-assign]
    return cli.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
