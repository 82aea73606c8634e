"""Fused kernels by ``torch.compile``, for what is neither a matrix product nor attention.

Norms, rotations, activations and sums over logits read and write memory at each operation; compiled, each chain of
them goes through memory once. Kernels are made at the first step, which takes about a minute. One graph serves all
layers of the same kind, and all lengths of rows.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import transformers
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.checkpoint import checkpoint

from tandem.trainer import context
from tandem.trainer.attention import images, rows
from tandem.trainer.models import checkpoint_activations, decoder_layers

torch._inductor.config.compile_threads = 1  # others start compiler processes, which outlive a killed trainer

_CPU = Path("/proc/cpuinfo")


def instruction_set() -> str:
    """Return the instruction set that kernels for this processor are made for, as a folder may be named."""
    flags = re.search(r"^(flags|Features)\s*:(.*)$", _CPU.read_text(), re.MULTILINE) if _CPU.exists() else None
    digest = hashlib.sha256(flags[2].encode() if flags else b"").hexdigest()[:8]
    return f"{torch.backends.cpu.get_cpu_capability()}-{digest}"


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of tensors with fused kernels, for any sizes of them."""
    _separate_caches()
    return torch.compile(function, dynamic=True)


@functools.cache
def _separate_caches() -> None:
    """Keep kernels of other processors apart: torch 2.13 names kernels by their graphs, and takes any that it finds.

    One made for another instruction set gives wrong sums or ends the process, where hosts share a cache.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_dir()) / instruction_set())


def compile_layers(model: torch.nn.Module, *, with_attention: bool, recomputes: bool) -> None:
    """Compile each layer of a model. Call this before sharding, to keep its hooks outside.

    With its attention, a layer is one graph. Without, it is one before attention and one after.

    Args:
        model: a whole model.
        with_attention: whether all that attention takes are tensors.
        recomputes: whether the backward pass recomputes activations, as by `checkpoint_activations`.
    """
    if not with_attention:
        for name, attend in (
            (rows.ATTENTION_NAME, rows.attend),
            (images.WITH_IMAGES, images.attend_with_images),
            (context.ATTENTION_NAME, context.context_attention),
        ):
            transformers.AttentionInterface.register(name, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    for layer in decoder_layers(model):
        forward = layer.forward
        if with_attention and recomputes:
            forward = types.MethodType(_recomputed, layer)
        layer.forward = compiled(forward)
    if recomputes and not with_attention:
        checkpoint_activations(model)


def _recomputed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer whose activations the backward pass recomputes, as a part of the graph."""
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
