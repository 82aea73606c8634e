"""Norm and attention for Megatron-Core's layers on torch alone, for packed rows and any device.

A row holds sequences one after the other. No token attends across a boundary. Under context parallelism each sequence
is divided into 2 × cp chunks, and rank r has chunks r and 2 × cp - 1 - r of it, so that causal attention is equal work
for all (Megatron-Core's layout). Keys and values are gathered. Each local chunk then attends to the prefix of its
sequence that ends with it.

Shapes: ``N`` tokens of the row on this rank, ``H`` heads of this rank, ``G`` of them of keys and values, ``D`` elements
of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from tandem.common.attention.segments import attend
from tandem.trainer.backends.megatron.routing import RoutedSequences
from tandem.trainer.context import gather_shares


class AttentionNorm(torch.nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467, equation 4) with gradients that sequence parallelism sums."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CoreAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention of packed rows, each sequence by itself."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._window = None if config.window_size is None else config.window_size[0] + 1
        self._group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query_NHD: torch.Tensor,
        key_NGD: torch.Tensor,
        value_NGD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: RoutedSequences,
        **_: Any,
    ) -> torch.Tensor:
        """Return the attention output of each token, ``[N, H * D]``."""
        size = self._group.size()
        lengths = [length // size for length in packed_seq_params.lengths]
        if size == 1:
            segments = [(n, n) for n in lengths]
            attended_NHD = attend(query_NHD, key_NGD, value_NGD, segments, self._scale, self._window)
        else:
            attended_NHD = self._attend_to_all_ranks(query_NHD, key_NGD, value_NGD, lengths)
        return attended_NHD.flatten(1)

    def _attend_to_all_ranks(
        self, query_NHD: torch.Tensor, key_NGD: torch.Tensor, value_NGD: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        rank, size = self._group.rank(), self._group.size()
        dims = [key_NGD.size(-1), value_NGD.size(-1)]
        gathered = gather_shares(torch.cat((key_NGD, value_NGD), dim=-1), self._group)
        of_ranks = [torch.split(part, list(lengths)) for part in gathered.chunk(size)]
        segments, prefixes = [], []
        for index, length in enumerate(lengths):
            half = length // 2
            firsts = [parts[index][:half] for parts in of_ranks]
            seconds = [parts[index][half:] for parts in reversed(of_ranks)]
            sequence = torch.cat([*firsts, *seconds])
            for chunk in (rank, 2 * size - 1 - rank):
                segments.append((half, (chunk + 1) * half))
                prefixes.append(sequence[: (chunk + 1) * half])
        key, value = torch.split(torch.cat(prefixes), dims, dim=-1)
        return attend(query_NHD, key, value, segments, self._scale, self._window)
