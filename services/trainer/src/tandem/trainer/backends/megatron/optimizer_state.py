"""The state of Megatron-Core's optimizers as boxes of the checkpoint's tensors.

An optimizer keeps its state beside a flat range of a parameter (the distributed optimizer), or beside the parameter.
The layout maps these to elements of the checkpoint's tensors, so the state can be written and read as
``exp_avg/model.layers.0.self_attn.q_proj.weight``, whatever the parallelism was or will be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

from tandem.common.errors import CheckpointError
from tandem.refit.layout import Box, LayoutPiece
from tandem.trainer.backends.megatron.weights import RankWeights
from tandem.trainer.files.box_files import BoxFiles, BoxPart, boxes_of_range

_MAIN = "param"
"""The key of a more precise copy of the parameter, which the optimizer steps."""
_MAIN_OF_AWARE = "master_param"
"""The same key in Transformer Engine's precision-aware optimizer, which keeps the copy in its state."""


class _Shard(NamedTuple):
    """The part of one parameter that an optimizer of torch steps on this rank."""

    parameter: str
    first: int
    """Index of the first element in the flattened parameter."""
    stepped: torch.Tensor
    is_copy: bool
    """Whether it is a copy, and not the parameter's own memory."""
    is_split: bool
    """Whether each data-parallel replica has a different part of the parameter."""
    item_size: int
    """Bytes of an element of the parameter, which the layout counts in."""
    optimizer: Any
    main_dtype: torch.dtype | None
    """The dtype of a precision-aware optimizer's copy of the parameter; int16 if it holds only the missing bits."""


def parts_of(optimizer: Any, weights: RankWeights) -> Iterator[BoxPart]:
    """Yield this rank's part of an optimizer's state. A part that several ranks hold is written by one.

    Raises `CheckpointError` for an optimizer with unknown state.
    """
    for shard in _shards(optimizer, weights):
        for key, tensor in _tensors(shard).items():
            flat = tensor.detach().reshape(-1)
            for described, piece in weights.pieces[shard.parameter]:
                if not _is_written_here(weights, described.name, piece, shard.is_split):
                    continue
                for box, view in _boxes(piece, shard, flat):
                    yield BoxPart(f"{key}/{described.name}", described.shape, box, view)


@torch.no_grad()
def read(optimizer: Any, weights: RankWeights, files: BoxFiles, num_steps: int) -> None:
    """Fill an optimizer's state, in its own memory, from files that any number of ranks wrote after `num_steps` steps.

    Raises `CheckpointError`.
    """
    if num_steps and _keeps_state(optimizer):
        files.require_any()
    keys = {name.partition("/")[0] for name in files.shapes}
    for shard in _shards(optimizer, weights):
        tensors = _blank(shard, keys)
        for key, tensor in tensors.items():
            flat = tensor.detach().view(-1)
            for described, piece in weights.pieces[shard.parameter]:
                for box, view in _boxes(piece, shard, flat):
                    files.read(f"{key}/{described.name}", described.shape, box, view)
        _keep(shard, tensors)
    if num_steps:
        _set_steps(optimizer, num_steps)


def _keeps_state(optimizer: Any) -> bool:
    """Return whether a step leaves state: not that of SGD without momentum."""
    return any(group.get("momentum") != 0 for part in _chained(optimizer) for group in part.optimizer.param_groups)


def precise_copies(optimizer: Any, weights: RankWeights) -> dict[str, torch.Tensor]:
    """Return the more precise copies of parameters that an optimizer steps on this rank, by parameter."""
    return {shard.parameter: shard.stepped.detach() for shard in _shards(optimizer, weights) if shard.is_copy}


Taken = list[tuple[Any, list[Any]]]
"""The state of each optimizer of torch, and the numbers of steps that its groups count."""


def take(optimizer: Any) -> Taken:
    """Return an optimizer's state, and leave it none, as if no step had been taken."""
    states: Taken = []
    for part in _chained(optimizer):
        inner = part.optimizer
        states.append((inner.state, [group.pop("step", None) for group in inner.param_groups]))
        inner.state = defaultdict(dict)
    return states


def give(optimizer: Any, state: Taken) -> None:
    """Give an optimizer back the state that was taken from it."""
    for part, (part_state, counts) in zip(_chained(optimizer), state, strict=True):
        part.optimizer.state = part_state
        for group, count in zip(part.optimizer.param_groups, counts, strict=True):
            if count is not None:
                group["step"] = count


def _set_steps(optimizer: Any, num_steps: int) -> None:
    """Set the number of steps of each optimizer.

    Torch's optimizers keep it beside every parameter, and add one to each. Megatron-Core's own loading gives all of
    them the same tensor, which then counts every parameter's step. From then on, Adam's bias corrections
    (arXiv:1412.6980, section 3) are those of a much later step. Here each parameter has its own tensor.
    """
    for part in _chained(optimizer):
        inner = part.optimizer
        if isinstance(inner, torch.optim.Adam):  # AdamW is one
            for state in inner.state.values():
                state["step"] = torch.tensor(float(num_steps), dtype=torch.float32)
        elif not isinstance(inner, torch.optim.SGD):
            for group in inner.param_groups:  # Transformer Engine and Apex count once for each group
                group["step"] = num_steps


def _chained(optimizer: Any) -> Sequence[Any]:
    """Return the optimizers with parameters on this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each for each in chained if not getattr(each, "is_stub_optimizer", False)]


def _shards(optimizer: Any, weights: RankWeights) -> Iterator[_Shard]:
    name_of = {id(tensor): name for name, tensor in weights.parameters.items()}
    for part in _chained(optimizer):
        inner, settings = part.optimizer, part.config
        if settings.optimizer_cpu_offload:
            raise CheckpointError(f"the state of {type(inner).__name__} cannot be saved; choose another optimizer")
        main_dtype = None
        if settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            main_dtype = torch.int16 if settings.store_param_remainders and settings.bf16 else torch.float32
        for parameter, stepped, first in _stepped(part):
            is_split, is_copy = isinstance(part, DistributedOptimizer), stepped.dtype != parameter.dtype
            size = parameter.element_size()
            yield _Shard(name_of[id(parameter)], first, stepped, is_copy, is_split, size, inner, main_dtype)


def _stepped(optimizer: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield each parameter, the tensor that torch's optimizer steps for it, and the index of its first element."""
    if isinstance(optimizer, DistributedOptimizer):
        for parameter, (group, index) in optimizer.model_param_group_index_map.items():
            first = optimizer._get_model_param_range_map(parameter)["param"].start
            yield parameter, optimizer.optimizer.param_groups[group]["params"][index], first
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        copies = zip(chain(*optimizer.float16_groups), chain(*optimizer.fp32_from_float16_groups), strict=True)
        yield from ((parameter, copy, 0) for parameter, copy in copies)
        yield from ((parameter, parameter, 0) for parameter in chain(*optimizer.fp32_from_fp32_groups))
    elif isinstance(optimizer, FP32Optimizer):
        yield from ((parameter, parameter, 0) for parameter in optimizer.get_parameters())
    else:
        raise CheckpointError(f"the state of a {type(optimizer).__name__} cannot be saved")


def _tensors(shard: _Shard) -> Mapping[str, torch.Tensor]:
    """Return the saved tensors of a shard, without the number of steps, which all share."""
    state = shard.optimizer.state.get(shard.stepped, {})
    if shard.main_dtype is not None:  # state may have few bits, and a scale
        unscaled = {key: shard.optimizer.get_unscaled_state(shard.stepped, key) for key in state}
        return {_MAIN if key == _MAIN_OF_AWARE else key: tensor for key, tensor in unscaled.items()}
    tensors = {key: value for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor)}
    return {**tensors, **({_MAIN: shard.stepped} if shard.is_copy else {})}


def _blank(shard: _Shard, keys: Collection[str]) -> dict[str, torch.Tensor]:
    """Return tensors to read the result of `_tensors` into. Padding stays zero."""
    stepped = shard.stepped.detach()
    tensors = {key: torch.zeros_like(stepped, dtype=torch.float32) for key in keys if key != _MAIN}
    if shard.main_dtype is not None and keys:
        tensors[_MAIN] = torch.zeros_like(stepped, dtype=shard.main_dtype)
    return {**tensors, **({_MAIN: stepped} if shard.is_copy else {})}


def _keep(shard: _Shard, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make tensors that have been read the optimizer's state."""
    if shard.main_dtype is None:
        state = {key: tensor for key, tensor in tensors.items() if key != _MAIN}
        shard.optimizer.state[shard.stepped].update(state)
        return
    for key, tensor in tensors.items():
        shard.optimizer.set_scaled_state(shard.stepped, _MAIN_OF_AWARE if key == _MAIN else key, tensor)


def _is_written_here(weights: RankWeights, tensor: str, piece: LayoutPiece, is_split: bool) -> bool:
    """Tell whether this rank, or the replicas that split its state, are the first to hold a piece."""
    first = weights.first_holder(tensor, piece.box)
    if not is_split:
        return first == dist.get_rank()
    own_coordinates, first_coordinates = (weights.sizes.coordinates(rank) for rank in (dist.get_rank(), first))
    if ".mlp.experts." in tensor:
        return (own_coordinates.ep, own_coordinates.etp, own_coordinates.pp) == (
            first_coordinates.ep,
            first_coordinates.etp,
            first_coordinates.pp,
        )
    return (own_coordinates.tp, own_coordinates.pp) == (first_coordinates.tp, first_coordinates.pp)


def _boxes(piece: LayoutPiece, shard: _Shard, flat: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield a shard's part of a piece: boxes of the piece's tensor, with their elements in `flat`."""
    strides = tuple(stride // shard.item_size for stride in piece.strides)
    offset = piece.offset // shard.item_size - shard.first
    for box in boxes_of_range(piece.box.shape, strides, -offset, len(flat) - offset):
        at = offset + sum(index * stride for index, stride in zip(box.start, strides, strict=True))
        tensor_box = Box(tuple(map(int.__add__, piece.box.start, box.start)), box.shape)
        yield tensor_box, flat.as_strided(box.shape, strides, flat.storage_offset() + at)
