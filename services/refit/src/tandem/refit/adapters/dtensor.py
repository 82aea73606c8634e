"""Transformers models sharded with DTensor: FSDP2, tensor and expert parallelism, replicas.

Whatever the mesh, a rank holds one slice of a parameter, contiguous in memory. Each mesh axis that shards a parameter
cuts the rest as `torch.chunk` does: the first ranks get ``ceil(n / size)`` elements, the last ones fewer or none. The
order of the cuts matters. FSDP2 wraps parameters that tensor parallelism has already cut, so FSDP2 cuts second although
its axis is the outer one (``_StridedShard`` in torch). So it is with experts that ranks have shared out among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType

from tandem.common.errors import RefitError
from tandem.config.models import lora
from tandem.refit.adapters import catalogue, deployment, geometry, huggingface, parameters
from tandem.refit.layout import Box, Layout

Cuts = Sequence[tuple[int, int]]
"""Pairs of mesh axis and parameter dimension, in the order of the cuts."""

TENSOR_PLAN: Mapping[str, int] = MappingProxyType(
    {
        "embed_tokens.weight": 0,
        "lm_head.weight": 0,
        "q_proj.weight": 0,
        "k_proj.weight": 0,
        "v_proj.weight": 0,
        "q_proj.bias": 0,
        "k_proj.bias": 0,
        "v_proj.bias": 0,
        "q_b_proj.weight": 0,
        "kv_b_proj.weight": 0,
        "o_proj.weight": 1,
        "gate_proj.weight": 0,
        "up_proj.weight": 0,
        "gate_proj.bias": 0,
        "up_proj.bias": 0,
        "down_proj.weight": 1,
        "qkv_proj.weight": 0,
        "gate_up_proj.weight": 0,
        "self_attn.sinks": 0,
    }
)
"""Dimension that tensor parallelism cuts, by the end of a parameter's name; other parameters stay whole."""


_EXPERTS = ".experts."
"""Part of the names of routed experts."""


def local_box(shape: Sequence[int], mesh: Sequence[int], coordinates: Sequence[int], cuts: Cuts) -> Box:
    """Return the slice of a parameter, possibly empty, held by the rank at the given mesh coordinates.

    Args:
        shape: of the whole parameter.
        mesh: number of ranks along each axis.
        coordinates: of the rank, along each axis.
        cuts: the cuts of this parameter.

    """
    start, stop = [0] * len(shape), list(shape)
    for axis, dim in cuts:
        step = -(-(stop[dim] - start[dim]) // mesh[axis])
        start[dim] = min(stop[dim], start[dim] + coordinates[axis] * step)
        stop[dim] = min(stop[dim], start[dim] + step)
    return Box(tuple(start), tuple(b - a for a, b in zip(start, stop, strict=True)))


def layout_on_mesh(
    model: catalogue.ModelShape,
    mesh: Sequence[int],
    coordinates: Sequence[int],
    cuts_of: Callable[[str, tuple[int, ...]], Cuts],
    fuses_experts: bool = True,
) -> Layout:
    """Return the layout of a rank of any mesh, without its host.

    Args:
        model: the model to shard.
        mesh: number of ranks along each axis.
        coordinates: of the rank, along each axis.
        cuts_of: returns the cuts of a parameter from its name pattern and shape.
        fuses_experts: whether the experts of a layer are one parameter, as in transformers 5.

    """
    builder = parameters.RankBuilder(model, range(model.geometry.num_layers if model.geometry else 0))
    for parameter in huggingface.parameters(model, fuses_experts):
        box = local_box(parameter.shape, mesh, coordinates, cuts_of(parameter.name, parameter.shape))
        window, experts = box, parameter.experts
        if experts and "{expert}" not in parameter.name:
            # The first dimension counts experts, so each remaining expert lies one further along it.
            experts = experts[box.start[0] : box.stop[0]]
            window = Box((0, *box.start[1:]), box.shape)
        clipped = [fill.clip(window) for fill in parameter.fills]
        builder.parameter(parameter.name, box.shape, [fill for fill in clipped if fill is not None], experts)
    return builder.build()


class DTensor(deployment.ParallelDeployment, frozen=True):
    """FSDP2 over `shard` ranks of models cut in `tensor` parts by tensor parallelism, `replicate` times (HSDP).

    The mesh is (replicate, shard, tensor). Context-parallel ranks count towards `shard`. So do those that share
    experts: each `expert` of them that follow each other.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    expert: int = 1
    plan: Mapping[str, int] = TENSOR_PLAN
    """Dimensions that tensor parallelism cuts, in the form of `TENSOR_PLAN`."""
    fuses_experts: bool = True

    @property
    def num_ranks(self) -> int:
        """Number of processes in the program."""
        return math.prod(self._mesh)

    @property
    def _mesh(self) -> tuple[int, int, int]:
        return self.replicate, self.shard, self.tensor

    def cuts(self, name: str, shape: Sequence[int]) -> Cuts:
        """Return the cuts of a parameter: tensor or expert parallelism's, then FSDP's along the first dimension.

        The axes are those of the mesh, then the two that `shard` is made of for experts. Every rank holds buffers
        whole. If tensor parallelism cuts a layer, it cuts the adapter matrix on the same side; the other matrix stays
        whole. It does not cut the tower of a vision model.
        """
        if name.endswith(geometry.BIAS):
            return ()
        if _EXPERTS in name:  # tensor parallelism does not cut them
            return ((4, 0), (3, 0)) if self.expert > 1 else ((1, 0),)
        is_adapter = lora.is_adapter(name)
        of = f"{lora.find_layer(name)}.weight" if is_adapter else name
        dim = None if huggingface.is_outside_language(name) else self.plan.get(".".join(of.rsplit(".", 2)[-2:]))
        if is_adapter and dim != (0 if name.endswith(lora.B) else 1):
            dim = None
        if dim is not None and dim >= len(shape):
            raise RefitError(f"{name} has no dimension {dim} to cut")
        first: Cuts = () if dim is None else ((2, dim),)
        return (*first, (1, 0)) if shape else first

    def place(self, rank: int) -> Hashable:
        """Return the coordinates of a rank along the axes that shard."""
        return _coordinates(rank, self._mesh)[1:]

    def parameters(self, model: catalogue.ModelShape, rank: int) -> Layout:
        """Return a rank's layout without its host."""
        if self.expert > 1 and not self.fuses_experts:
            raise RefitError("ranks share experts only where a layer has all of them in one parameter")
        at = _coordinates(rank, self._mesh)
        mesh = *self._mesh, self.shard // self.expert, self.expert
        return layout_on_mesh(model, mesh, (*at, *divmod(at[1], self.expert)), self.cuts, self.fuses_experts)


def _coordinates(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    coordinates = []
    for size in reversed(mesh):
        coordinates.append(rank % size)
        rank //= size
    return tuple(reversed(coordinates))
