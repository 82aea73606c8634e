"""Rollout routing replay in Megatron-Core: tokens go to the experts that the engine chose.

Routers ask an object of this project, in the place of Megatron-Core's ``RouterReplay``, for their choice. The original
knows one micro-batch at a time, in the order of a list for all models of the process. Here routes are stored with their
row, so that each pass finds its own, also with pipelines and recomputation.

Shapes: ``M`` tokens of a row on a rank; ``N`` of them that a router sees, if tensor-parallel ranks share the row
    between layers; ``L`` layers of the whole model, ``K`` experts a token, ``V`` experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclasses.dataclass
class RoutedSequences(PackedSeqParams):  # type: ignore[misc]
    """Bounds of a row's sequences, which every layer gets, with the experts of their tokens."""

    lengths: tuple[int, ...] = ()
    """Lengths of the sequences over all context-parallel ranks. They are kept here because reading `cu_seqlens_q` would
    wait for the GPU.
    """
    routed_experts_MLK: torch.Tensor | None = None
    """int16; -1 where the router chooses itself. None if it always does."""


class RouterReplay:
    """The choice of one router in every forward pass. Its method has Megatron-Core's name."""

    def __init__(self) -> None:
        self.given_NK: torch.Tensor | None = None
        """The experts in the next pass."""

    def get_replay_topk(
        self,
        scores_NV: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the indices of the experts that each token goes to, ``[N, K]``."""
        own_scores_NK, own_NK = default_compute_topk(scores_NV, topk, num_groups=num_groups, group_topk=group_topk)
        if self.given_NK is None:
            return own_scores_NK, own_NK
        given_NK = self.given_NK.to(own_NK.dtype)
        chosen_NK = torch.where(given_NK < 0, own_NK, given_NK)
        return scores_NV.gather(1, chosen_NK), chosen_NK


def replay_routes(chunk: torch.nn.Module) -> None:
    """Let the routers of a chunk choose the experts in the `RoutedSequences` of each pass."""
    for layer in chunk.modules():
        router = getattr(getattr(layer, "mlp", None), "router", None)
        if isinstance(layer, TransformerLayer) and router is not None:
            router.router_replay = RouterReplay()
            is_cut = layer.config.sequence_parallel
            give = functools.partial(_give, router.router_replay, layer.layer_number - 1, is_cut)
            layer.register_forward_pre_hook(give, with_kwargs=True)


def _give(replay: RouterReplay, layer: int, is_cut: bool, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    sequences = kwargs.get("packed_seq_params")
    experts_MLK = sequences.routed_experts_MLK if isinstance(sequences, RoutedSequences) else None
    if experts_MLK is None:
        replay.given_NK = None
        return
    given_MK = experts_MLK[:, layer]
    if is_cut:
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
        given_MK = given_MK.chunk(size)[rank]
    replay.given_NK = given_MK
