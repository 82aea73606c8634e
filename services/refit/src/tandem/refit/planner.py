"""The planner: from what trainers hold and engines want to a transfer program for each engine. Pure box algebra.

For every wanted box the planner walks the source boxes that meet it, those of the least loaded ranks first, takes from
each what is still missing, and goes on with the rest. What is left over at the end has no source: the plan is refused.
What was taken never overlaps, because it is cut out of what was missing, and wanted boxes share no memory, because the
layout was checked. So a plan that is returned writes each wanted element exactly once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from tandem.common.errors import CoverageError, RefitError
from tandem.refit.layout import ITEM_SIZES, Box, Layout, Piece, SharedMemory, TensorLayout
from tandem.refit.program import Alias, Copy, Region, Source, TransferProgram

CONVERTIBLE = frozenset({"float64", "float32", "bfloat16", "float16"})
"""Element types that a copy converts into one another, rounding to nearest."""


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
    holdings = _Holdings(sources)
    programs: dict[str, TransferProgram] = {}
    num_bytes: dict[str, int] = {}
    for engine, wanted in destinations.items():
        wanted.check_writable(engine)
        program = _EnginePlanner(engine, wanted, holdings, allow_alias).program()
        for copy in program.copies:
            link = f"{program.sources[copy.source].member}>{engine}"
            num_bytes[link] = num_bytes.get(link, 0) + copy.num_bytes
        programs[engine] = program
    return Plan(programs=programs, num_bytes=num_bytes)


class _Holder(msgspec.Struct, frozen=True):
    """A rank that holds a box."""

    member: str
    dtype: str
    piece: Piece


class _HeldTensor:
    """All that trainers hold of one tensor: its distinct boxes, sorted along the dimension that is cut most."""

    def __init__(self, member: str, shape: tuple[int, ...]) -> None:
        self.member = member
        """A member that holds it, for error messages."""
        self.shape = shape
        self._holders: dict[Box, list[_Holder]] = {}
        self._boxes: list[Box] = []
        self._starts: list[int] = []
        self._axis = 0
        self._longest = 0

    def add(self, holder: _Holder) -> None:
        """Note a holder; before the first `meeting`."""
        self._holders.setdefault(holder.piece.box, []).append(holder)

    def meeting(self, wanted: Box) -> Iterator[tuple[Box, list[_Holder]]]:
        """Yield every held box that may meet `wanted`, with its holders."""
        if not self._boxes:
            self._sort()
        if wanted.start:
            start, stop = wanted.start[self._axis], wanted.stop[self._axis]
            near = slice(bisect_right(self._starts, start - self._longest), bisect_left(self._starts, stop))
        else:
            near = slice(None)
        for box in self._boxes[near]:
            yield box, self._holders[box]

    def _sort(self) -> None:
        if self.shape:
            cuts = [len({box.start[axis] for box in self._holders}) for axis in range(len(self.shape))]
            self._axis = axis = cuts.index(max(cuts))
            self._boxes = sorted(self._holders, key=lambda box: box.start[axis])
            self._starts = [box.start[axis] for box in self._boxes]
            self._longest = max((box.shape[axis] for box in self._boxes), default=0)
        else:
            self._boxes = list(self._holders)


class _Holdings:
    """What all trainers hold, by tensor, and the bytes that each sends to all engines so far."""

    def __init__(self, layouts: Mapping[str, Layout]) -> None:
        self.layouts = layouts
        self.egress = dict.fromkeys(layouts, 0)
        self._tensors: dict[str, _HeldTensor] = {}
        for member, layout in layouts.items():
            for name, tensor in layout.tensors.items():
                held = self._tensors.setdefault(name, _HeldTensor(member, tensor.shape))
                if held.shape != tensor.shape:
                    raise CoverageError(
                        f"{held.member} holds {name} of shape {held.shape}, {member} holds it as {tensor.shape}"
                    )
                for piece in tensor.pieces:
                    if piece.box.num_elements:
                        held.add(_Holder(member, tensor.dtype, piece))

    def of(self, engine: str, name: str, shape: tuple[int, ...]) -> _HeldTensor:
        """Return what is held of a tensor that an engine wants. Raises `CoverageError`."""
        held = self._tensors.get(name)
        if held is None:
            raise CoverageError(f"{engine} wants {name}{Box((0,) * len(shape), shape)}, which no trainer holds")
        if held.shape != shape:
            raise CoverageError(f"{engine} wants {name} of shape {shape}, {held.member} holds it as {held.shape}")
        return held


class _EnginePlanner:
    """Plans one engine."""

    def __init__(self, engine: str, wanted: Layout, holdings: _Holdings, allow_alias: bool) -> None:
        self._engine = engine
        self._wanted = wanted
        self._holdings = holdings
        self._allow_alias = allow_alias

    def program(self) -> TransferProgram:
        """Return the engine's program."""
        pieces = [
            (name, tensor, piece)
            for name, tensor in self._wanted.tensors.items()
            for piece in tensor.pieces
            if piece.box.num_elements
        ]
        pieces.sort(key=lambda item: -item[2].box.num_elements)  # small pieces last: they even out what each rank sends
        found = [cut for name, tensor, piece in pieces for cut in self._copies(name, tensor, piece)]
        num_wanted = sum(piece.box.num_elements * ITEM_SIZES[tensor.dtype] for _, tensor, piece in pieces)
        assert sum(copy.num_bytes for _, copy in found) == num_wanted, "cutting boxes loses and repeats nothing"
        return self._assemble(found)

    def _copies(self, name: str, tensor: TensorLayout, wanted: Piece) -> Iterator[tuple[_Holder, Copy]]:
        """Cut a wanted piece into copies, each from one holder; their index of the source is filled in later."""
        held = self._holdings.of(self._engine, name, tensor.shape)
        choices = [(box, min(holders, key=self._reluctance)) for box, holders in held.meeting(wanted.box)]
        choices.sort(key=lambda choice: self._reluctance(choice[1]))
        missing = [wanted.box]
        for box, holder in choices:
            still_missing: list[Box] = []
            for part in missing:
                common = box.intersect(part)
                if common is None:
                    still_missing.append(part)
                    continue
                yield holder, self._copy(name, tensor, wanted, holder, common)
                still_missing.extend(part.without(common))
            missing = still_missing
            if not missing:
                return
        raise CoverageError(f"{self._engine} wants {name}{missing[0]}, which no trainer holds")

    def _reluctance(self, holder: _Holder) -> tuple[bool, int]:
        """Order holders: those within reach first, then those that have sent least."""
        return not self._is_reachable(holder), self._holdings.egress[holder.member]

    def _is_reachable(self, holder: _Holder) -> bool:
        layout = self._holdings.layouts[holder.member]
        address = layout.storages[holder.piece.parameter].address
        return layout.host == self._wanted.host and isinstance(address, SharedMemory)

    def _copy(self, name: str, tensor: TensorLayout, wanted: Piece, holder: _Holder, box: Box) -> Copy:
        if not self._is_reachable(holder):
            raise RefitError(
                f"{self._engine} on {self._wanted.host} cannot reach {name}{box} in the memory of {holder.member} on "
                f"{self._holdings.layouts[holder.member].host}: only processes of one host can share memory"
            )
        if holder.dtype != tensor.dtype and not {holder.dtype, tensor.dtype} <= CONVERTIBLE:
            raise RefitError(
                f"{self._engine} wants {name} as {tensor.dtype}, {holder.member} holds {holder.dtype}: "
                "there is no conversion"
            )
        num_bytes = box.num_elements * ITEM_SIZES[tensor.dtype]
        self._holdings.egress[holder.member] += num_bytes
        return _simplified(
            Copy(
                tensor=name,
                source=-1,
                source_region=Region(holder.piece.offset_of(box), holder.piece.strides, holder.dtype),
                destination=wanted.parameter,
                destination_region=Region(wanted.offset_of(box), wanted.strides, tensor.dtype),
                shape=box.shape,
                num_bytes=num_bytes,
            )
        )

    def _assemble(self, found: list[tuple[_Holder, Copy]]) -> TransferProgram:
        """Number the sources, merge what is adjacent, and turn whole parameters into aliases."""
        sources: dict[Source, int] = {}
        by_storage: dict[str, list[Copy]] = {storage: [] for storage in self._wanted.storages}
        for holder, copy in found:
            described = self._holdings.layouts[holder.member].storages[holder.piece.parameter]
            source = Source(holder.member, holder.piece.parameter, described.num_bytes, described.address)
            index = sources.setdefault(source, len(sources))
            by_storage[copy.destination].append(msgspec.structs.replace(copy, source=index))
        copies: list[Copy] = []
        aliases: list[Alias] = []
        for storage, there in by_storage.items():
            merged = list(_merged(sorted(there, key=lambda copy: copy.destination_region.offset)))
            alias = self._alias(storage, merged) if self._allow_alias else None
            if alias is None:
                copies.extend(merged)
            else:
                aliases.append(alias)
        return TransferProgram(
            engine=self._engine, sources=tuple(sources), copies=tuple(copies), aliases=tuple(aliases)
        )

    def _alias(self, storage: str, copies: list[Copy]) -> Alias | None:
        """Return the alias that replaces a storage, if one range of one source is all of it."""
        if len(copies) != 1:
            return None
        (copy,) = copies
        if not copy.is_run or copy.num_bytes != self._wanted.storages[storage].num_bytes:
            return None
        region = copy.source_region
        return Alias(copy.tensor, storage, copy.source, region.offset, copy.num_bytes, region.dtype)


def _simplified(copy: Copy) -> Copy:
    """Return the same copy with as few dimensions as possible; a range on both sides becomes one dimension."""
    source_size = ITEM_SIZES[copy.source_region.dtype]
    destination_size = ITEM_SIZES[copy.destination_region.dtype]
    steps = zip(copy.destination_region.strides, copy.source_region.strides, copy.shape, strict=True)
    # Outermost first, as the destination lies: an element's index does not matter, only that both sides agree on it.
    ordered = sorted((step for step in steps if step[2] > 1), reverse=True)
    dims: list[tuple[int, int, int]] = []
    for destination, source, n in ordered:
        if dims and dims[-1][:2] == (destination * n, source * n):
            n *= dims.pop()[2]
        dims.append((destination, source, n))
    dims = dims or [(destination_size, source_size, 1)]
    return _reshaped(copy, tuple(n for _, _, n in dims), tuple(s for _, s, _ in dims), tuple(d for d, _, _ in dims))


def _merged(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Join copies of one storage, ordered by where they write, that continue each other on both sides."""
    last: Copy | None = None
    for copy in copies:
        if last is not None and _continues(last, copy):
            shape = (last.shape[0] + copy.shape[0], *last.shape[1:])
            joined = msgspec.structs.replace(last, shape=shape, num_bytes=last.num_bytes + copy.num_bytes)
            last = _simplified(joined)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _continues(last: Copy, copy: Copy) -> bool:
    """Say whether `copy` goes on, along the outermost dimension, where `last` ends."""
    for before, after in (
        (last.source_region, copy.source_region),
        (last.destination_region, copy.destination_region),
    ):
        if before.strides != after.strides or before.dtype != after.dtype:
            return False
        if before.offset + last.shape[0] * before.strides[0] != after.offset:
            return False
    return last.source == copy.source and last.shape[1:] == copy.shape[1:]


def _reshaped(
    copy: Copy, shape: tuple[int, ...], source_strides: tuple[int, ...], destination_strides: tuple[int, ...]
) -> Copy:
    return msgspec.structs.replace(
        copy,
        shape=shape,
        source_region=msgspec.structs.replace(copy.source_region, strides=source_strides),
        destination_region=msgspec.structs.replace(copy.destination_region, strides=destination_strides),
    )
