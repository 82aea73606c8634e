"""The planner: from what trainers hold and engines want to a transfer program for each engine. Pure box algebra.

For every wanted box the planner walks the source boxes of that tensor, the least loaded rank first, takes what each can
give of what is still missing, and goes on with the rest. What is left over at the end has no source: the plan is
refused. What was taken never overlaps, because it is cut out of what was missing. So a plan that is returned writes each
wanted element exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tandem.common.errors import CoverageError, RefitError
from tandem.refit.layout import (
    ITEM_SIZES,
    Box,
    Layout,
    Piece,
    SharedMemory,
    TensorLayout,
    contiguous_strides,
)
from tandem.refit.program import Alias, Copy, Region, Source, TransferProgram


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A program for each engine, and what they add up to."""

    programs: dict[str, TransferProgram]
    """By engine."""
    num_bytes: dict[str, int]
    """Bytes written at each refit over each link, named ``trainer-0>rollout-1``; aliases move none."""


def plan(sources: Mapping[str, Layout], destinations: Mapping[str, Layout], *, allow_alias: bool) -> Plan:
    """Plan how every wanted element reaches its engine.

    `allow_alias` lets an engine read a trainer's memory in place where a whole parameter lies there contiguously in
    the same element type.

    Raises:
        CoverageError: a wanted element has no source; names the tensor and the box.
        RefitError: a layout contradicts itself, or the two processes share no memory.

    """
    for member, layout in [*sources.items(), *destinations.items()]:
        layout.check(member)
    egress = dict.fromkeys(sources, 0)
    programs: dict[str, TransferProgram] = {}
    num_bytes: dict[str, int] = {}
    for engine, wanted in destinations.items():
        programs[engine] = _EnginePlanner(engine, wanted, sources, egress, allow_alias).program()
        for copy in programs[engine].copies:
            member = programs[engine].sources[copy.source].member
            link = f"{member}>{engine}"
            num_bytes[link] = num_bytes.get(link, 0) + copy.num_bytes
    return Plan(programs=programs, num_bytes=num_bytes)


class _EnginePlanner:
    """Plans one engine; `egress` counts the bytes each trainer rank sends to all engines so far."""

    def __init__(
        self, engine: str, wanted: Layout, sources: Mapping[str, Layout], egress: dict[str, int], allow_alias: bool
    ) -> None:
        self._engine = engine
        self._wanted = wanted
        self._layouts = sources
        self._egress = egress
        self._allow_alias = allow_alias
        self._sources: dict[Source, int] = {}

    def program(self) -> TransferProgram:
        """Return the engine's program."""
        aliases = self._aliases() if self._allow_alias else {}
        copies = [
            copy
            for name, tensor in self._wanted.tensors.items()
            for piece in tensor.pieces
            if piece.parameter not in aliases
            for copy in self._copies(name, tensor, piece)
        ]
        return TransferProgram(
            engine=self._engine,
            sources=tuple(self._sources),
            copies=tuple(_coalesced(copies)),
            aliases=tuple(aliases.values()),
        )

    def _aliases(self) -> dict[str, Alias]:
        """Find the engine storages that can be replaced whole by a trainer's memory."""
        pieces_of: dict[str, list[tuple[str, TensorLayout, Piece]]] = {}
        for name, tensor in self._wanted.tensors.items():
            for piece in tensor.pieces:
                pieces_of.setdefault(piece.parameter, []).append((name, tensor, piece))
        found = {storage: self._alias(storage, *pieces[0]) for storage, pieces in pieces_of.items() if len(pieces) == 1}
        return {storage: alias for storage, alias in found.items() if alias is not None}

    def _alias(self, storage: str, name: str, tensor: TensorLayout, wanted: Piece) -> Alias | None:
        item_size = ITEM_SIZES[tensor.dtype]
        strides = contiguous_strides(wanted.box.shape, item_size)
        fills_storage = wanted.box.num_elements * item_size == self._wanted.storages[storage].num_bytes
        if wanted.strides != strides or wanted.offset != 0 or not fills_storage:
            return None
        for member, held, piece in self._holders(name, tensor):
            contained = piece.box.intersect(wanted.box) == wanted.box
            if contained and held.dtype == tensor.dtype and piece.strides == strides:
                region = Region(piece.offset_of(wanted.box), strides, held.dtype)
                return Alias(storage, self._source(member, piece.parameter), region, wanted.box.shape)
        return None

    def _copies(self, name: str, tensor: TensorLayout, wanted: Piece) -> Iterator[Copy]:
        """Cut a wanted piece into copies."""
        missing = [wanted.box]
        for member, held, piece in self._holders(name, tensor):
            still_missing: list[Box] = []
            for box in missing:
                common = piece.box.intersect(box)
                if common is None:
                    still_missing.append(box)
                    continue
                yield self._copy(name, member, held, piece, tensor, wanted, common)
                still_missing.extend(box.without(common))
            missing = still_missing
            if not missing:
                return
        raise CoverageError(f"{self._engine} wants {name}{missing[0]}, which no trainer holds")

    def _holders(self, name: str, tensor: TensorLayout) -> Iterator[tuple[str, TensorLayout, Piece]]:
        """Yield every piece of the tensor that a trainer holds, the rank that has sent least first."""
        for member in sorted(self._layouts, key=lambda m: self._egress[m]):
            held = self._layouts[member].tensors.get(name)
            if held is None:
                continue
            if held.shape != tensor.shape:
                raise CoverageError(
                    f"{self._engine} wants {name} of shape {tensor.shape}, {member} holds it as {held.shape}"
                )
            yield from ((member, held, piece) for piece in held.pieces)

    def _copy(
        self,
        name: str,
        member: str,
        held: TensorLayout,
        piece: Piece,
        tensor: TensorLayout,
        wanted: Piece,
        box: Box,
    ) -> Copy:
        num_bytes = box.num_elements * ITEM_SIZES[tensor.dtype]
        self._egress[member] += num_bytes
        return Copy(
            tensor=name,
            source=self._source(member, piece.parameter),
            source_region=Region(piece.offset_of(box), piece.strides, held.dtype),
            destination=wanted.parameter,
            destination_region=Region(wanted.offset_of(box), wanted.strides, tensor.dtype),
            shape=box.shape,
            num_bytes=num_bytes,
        )

    def _source(self, member: str, storage: str) -> int:
        """Return the index of a source storage, noting it at its first use."""
        layout = self._layouts[member]
        described = layout.storages[storage]
        if not isinstance(described.address, SharedMemory) or layout.host != self._wanted.host:
            raise RefitError(
                f"{self._engine} on {self._wanted.host} cannot reach the memory of {member} on {layout.host}: "
                "only processes of one host can share memory"
            )
        source = Source(member, storage, described.num_bytes, described.address)
        return self._sources.setdefault(source, len(self._sources))


def _coalesced(copies: list[Copy]) -> Iterator[Copy]:
    """Flatten copies that are contiguous on both sides, and join those that follow each other on both sides."""
    last: Copy | None = None
    for copy in (_flattened(copy) for copy in copies):
        joined = None if last is None else _joined(last, copy)
        if last is not None and joined is None:
            yield last
        last = joined or copy
    if last is not None:
        yield last


def _flattened(copy: Copy) -> Copy:
    """Return the copy as a single run of elements if both sides allow it."""
    source_size = ITEM_SIZES[copy.source_region.dtype]
    destination_size = ITEM_SIZES[copy.destination_region.dtype]
    if not (
        _is_run(copy.shape, copy.source_region.strides, source_size)
        and _is_run(copy.shape, copy.destination_region.strides, destination_size)
    ):
        return copy
    return msgspec.structs.replace(
        copy,
        shape=(copy.num_bytes // destination_size,),
        source_region=msgspec.structs.replace(copy.source_region, strides=(source_size,)),
        destination_region=msgspec.structs.replace(copy.destination_region, strides=(destination_size,)),
    )


def _is_run(shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> bool:
    """Say whether the elements lie one after the other; the stride of a dimension of one element does not matter."""
    expected = contiguous_strides(shape, item_size)
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))


def _joined(first: Copy, second: Copy) -> Copy | None:
    """Return both as one run if the second begins where the first ends, on both sides."""
    same = (
        len(first.shape) == len(second.shape) == 1
        and first.source == second.source
        and first.destination == second.destination
        and first.source_region.strides == second.source_region.strides
        and first.source_region.dtype == second.source_region.dtype
        and first.destination_region.dtype == second.destination_region.dtype
    )
    (source_step,), (destination_step,) = (
        first.source_region.strides[:1] or (0,),
        first.destination_region.strides[:1] or (0,),
    )
    if not same or (
        first.source_region.offset + first.shape[0] * source_step != second.source_region.offset
        or first.destination_region.offset + first.shape[0] * destination_step != second.destination_region.offset
    ):
        return None
    return msgspec.structs.replace(
        first, shape=(first.shape[0] + second.shape[0],), num_bytes=first.num_bytes + second.num_bytes
    )
