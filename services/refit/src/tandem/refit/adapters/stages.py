"""Assignment of layers to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tandem.common.errors import RefitError


def contiguous(counts: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of consecutive stages with the given numbers of layers."""
    ends = list(accumulate(counts))
    return tuple(range(end - n, end) for end, n in zip(ends, counts, strict=True))


def vllm(num_layers: int, pp: int) -> tuple[range, ...]:
    """Return the layers of each of vLLM's stages, without ``VLLM_PP_LAYER_PARTITION``.

    Remaining layers go to the stages before the last, starting from the back.
    """
    counts = [num_layers // pp] * pp
    for stage in range(num_layers % pp):
        counts[-2 - stage] += 1
    return contiguous(counts)


def megatron(
    num_layers: int, pp: int, vpp: int, in_first: int | None = None, in_last: int | None = None
) -> tuple[tuple[range, ...], ...]:
    """Return the layers of each chunk of each Megatron-Core stage: ``[stage][chunk]``.

    Args:
        num_layers: of the model.
        pp: number of stages.
        vpp: number of chunks per stage, interleaved: layers fill chunk 0 of all stages, then chunk 1, and so on.
        in_first: layers of the first stage, all chunks together; None for as many as the middle stages.
        in_last: layers of the last stage; None likewise.

    Raises:
        RefitError: the layers do not divide this way.

    """
    num_middle_layers = num_layers - (in_first or 0) - (in_last or 0)
    middle = pp - (in_first is not None) - (in_last is not None)
    if num_middle_layers < 0 or middle < 0 or (num_middle_layers % middle if middle else num_middle_layers):
        raise RefitError(f"{num_middle_layers} layers cannot be split evenly over {middle} pipeline stages")
    counts = [num_middle_layers // middle] * middle if middle else []
    counts = [*([] if in_first is None else [in_first]), *counts, *([] if in_last is None else [in_last])]
    if any(n % vpp for n in counts):
        raise RefitError(f"stages of {counts} layers cannot be split evenly into {vpp} chunks each")
    in_order = contiguous([n // vpp for n in counts] * vpp)
    return tuple(tuple(in_order[chunk * pp + stage] for chunk in range(vpp)) for stage in range(pp))
