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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import transformers
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.utils.checkpoint import checkpoint

from tandem.trainer import attention, context, models, scoring
from tandem.trainer.batching.masks import TokenMasks
from tandem.trainer.scores import StudentScores, TokenScores

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
        apart = {**attention.OUTSIDE_OF_GRAPHS, context.ATTENTION_NAME: context.context_attention}
        for name, attend in apart.items():
            transformers.AttentionInterface.register(name, torch.compiler.disable(attend))  # type: ignore[no-untyped-call]
    for layer in models.decoder_layers(model):
        forward = layer.forward
        if with_attention and recomputes:
            forward = types.MethodType(_recomputed, layer)
        layer.forward = compiled(forward)
    if recomputes and not with_attention:
        models.checkpoint_activations(model)


def _recomputed(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a layer whose activations the backward pass recomputes, as a part of the graph."""
    return checkpoint(type(layer).forward, layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


_LOGITS = 2**27
"""Logits that may exist at once: 256 MiB of bfloat16."""


def score_tokens(
    hidden_KH: torch.Tensor,
    weight_VH: torch.Tensor,
    target_K: torch.Tensor,
    *,
    temperature: float,
    vocabulary: scoring.VocabularyShard | None = None,
    others_KN: torch.Tensor | None = None,
    learns_entropy: bool = False,
    undrawable: Sequence[int] = (),
    masks: TokenMasks | None = None,
) -> TokenScores | StudentScores:
    """Return what `tandem.trainer.scoring.score_tokens` does, by fused kernels where these can.

    There, each operation on the logits goes through memory. Here a chunk of logits stays in the type of the matrix
    product, is read twice for the sums, and in the backward pass is read once and its gradient written once. One token
    is scored at each position, by a rank that holds the whole output layer.

    If not all logits fit into a chunk, the backward pass computes them again.
    """
    if vocabulary is not None or others_KN is not None or learns_entropy or undrawable or masks is not None:
        return scoring.score_tokens(
            hidden_KH,
            weight_VH,
            target_K,
            temperature=temperature,
            vocabulary=vocabulary,
            others_KN=others_KN,
            learns_entropy=learns_entropy,
            undrawable=undrawable,
            masks=masks,
        )
    chunk = max(1, _LOGITS // weight_VH.shape[0])
    keeps = torch.is_grad_enabled() and len(hidden_KH) <= chunk
    scores: tuple[torch.Tensor, ...] = _FusedScores.apply(  # type: ignore[no-untyped-call]
        hidden_KH, weight_VH, target_K, temperature, chunk, keeps
    )
    return TokenScores(*scores)


class _FusedScores(torch.autograd.Function):
    """The scoring function. Forward goes over the tokens in chunks, and backward over the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_KH: torch.Tensor,
        weight_VH: torch.Tensor,
        target_K: torch.Tensor,
        temperature: float,
        chunk: int,
        keeps: bool,
    ) -> tuple[torch.Tensor, ...]:
        logits_RV = None
        parts = []
        for hidden_RH, target_R in zip(torch.split(hidden_KH, chunk), torch.split(target_K, chunk), strict=True):
            logits_RV = None  # before the next are made
            logits_RV = hidden_RH @ weight_VH.T
            parts.append(compiled(_sums)(logits_RV, target_R, temperature))
        max_K, sum_K, weighted_K, logit_K = torch.cat(parts, dim=1)
        ctx.save_for_backward(hidden_KH, weight_VH, target_K, max_K, sum_K, logits_RV if keeps else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        log_sum_K = sum_K.log()
        entropy_K = log_sum_K - weighted_K / sum_K
        is_likeliest_K = (logit_K == 0.0).float()  # relative to the largest, so zero for that one
        ctx.mark_non_differentiable(is_likeliest_K, entropy_K)
        return logit_K - log_sum_K, entropy_K, is_likeliest_K

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_KH, weight_VH, target_K, max_K, sum_K, logits_KV = ctx.saved_tensors
        grad_K = grads[0] / ctx.temperature
        grad_hidden_KH = torch.zeros(hidden_KH.shape, dtype=torch.float32, device=hidden_KH.device)
        grad_weight_VH = torch.empty_like(weight_VH) if ctx.needs_input_grad[1] else None
        num_columns = scoring.columns_at_once(ctx.chunk * len(weight_VH), len(hidden_KH))
        for first in range(0, len(weight_VH), num_columns):
            columns = slice(first, min(first + num_columns, len(weight_VH)))
            weight_CH = weight_VH[columns]
            logits_KC = hidden_KH @ weight_CH.T if logits_KV is None else logits_KV[:, columns]
            grad_KC = compiled(_gradient)(logits_KC, max_K, sum_K, target_K - first, grad_K, ctx.temperature)
            grad_hidden_KH += grad_KC @ weight_CH
            if grad_weight_VH is not None:
                torch.mm(grad_KC.T, hidden_KH, out=grad_weight_VH[columns])
            del logits_KC, grad_KC  # before the next are made
        return grad_hidden_KH.to(hidden_KH.dtype), grad_weight_VH, None, None, None, None


def _sums(logits_RV: torch.Tensor, target_R: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return, ``[4, R]``, the largest logit ``m``, the sums of ``exp(x)`` and ``x exp(x)``, and ``x`` of the target.

    ``x`` are the logits minus ``m``.
    """
    scaled_RV = logits_RV.float() / temperature
    max_R = scaled_RV.amax(dim=1)
    below_RV = scaled_RV - max_R[:, None]
    exp_RV = below_RV.exp()
    of_target_R = below_RV.gather(1, target_R[:, None])[:, 0]
    return torch.stack([max_R, exp_RV.sum(dim=1), (below_RV * exp_RV).sum(dim=1), of_target_R])


def _gradient(
    logits_KC: torch.Tensor,
    max_K: torch.Tensor,
    sum_K: torch.Tensor,
    column_K: torch.Tensor,
    grad_K: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """Return the gradient by logits, in their type: that of log p[token] is one-hot(token) - p.

    `column_K` is outside of the columns where the token is not among them.
    """
    p_KC = (logits_KC.float() / temperature - max_K[:, None]).exp() / sum_K[:, None]
    is_token_KC = torch.arange(logits_KC.shape[1], device=logits_KC.device) == column_K[:, None]
    return ((is_token_KC.float() - p_KC) * grad_K[:, None]).to(logits_KC.dtype)
