"""The planner: from layouts of trainers and engines to a transfer program for each process.

0. `low_rank`: where trainers hold adapters, engines receive base and adapters in place of the weights they want.
   Frozen and changing tensors are then planned separately, by the same steps.
1. `names`, `source_shards`: number the tensors; find the distinct slices that trainers hold, and their replicas.
2. `destination_shards`: cut the slices that each class of engines wants along those, and check that none is missing.
3. `sharing`: find bytes that several engines of a node need, which are sent to the node once, and their replica sets.
4. `choose`: assign byte ranges so that trainers that could send the same bytes send about equally many.
5. `assemble`, `merge`: resolve all this to few strided copies, in an order that overloads no process.
6. `transfer_groups`, `verification`: group the processes that stream, and divide the digests among processes.

Held slices are disjoint, and their overlaps with a wanted slice add up to it. Byte ranges are cut without gaps. Wanted
elements share no memory. So every returned plan writes each wanted element exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.checks import check, check_writable
from tandem.refit.layout import Layout
from tandem.refit.planning import verification as verify
from tandem.refit.planning.assemble import TransferAssembler, Turn
from tandem.refit.planning.choose import choose
from tandem.refit.planning.destination_shards import DestinationShards, classes, resolve
from tandem.refit.planning.flows import FlowColumns, FlowLink, flows, links
from tandem.refit.planning.frozen import FrozenPart, parts
from tandem.refit.planning.low_rank import AdapterLayout, adapt
from tandem.refit.planning.names import PairedTensors, match
from tandem.refit.planning.sharing import ReplicaSets, SharingPattern, patterns
from tandem.refit.planning.source_shards import SourceShards, collect
from tandem.refit.program import Staging, TransferProgram
from tandem.refit.transfer import LinkTransfer, TransferGroup
from tandem.refit.transports import registry
from tandem.refit.transports.transport import Route

GRAIN = 1 << 16
"""Bytes: an overlap smaller than twice this comes from one replica."""


def transfer_groups(transfers: Sequence[LinkTransfer], layouts: Mapping[str, Layout]) -> tuple[TransferGroup, ...]:
    """Return a transfer group for each cluster of receivers that pass bytes on, with all their senders.

    The workers of a process are in one cluster, because they are connected, lost and restored together.

    Args:
        transfers: all of a plan.
        layouts: of all processes; ranks in a group follow their order, receivers first.

    """
    cluster: dict[str, set[str]] = {}
    senders: dict[str, set[str]] = {}
    first_shard: dict[str, str] = {}

    def join(first: str, second: str) -> None:
        mine, theirs = (cluster.setdefault(shard, {shard}) for shard in (first, second))
        if theirs is not mine:
            mine |= theirs
            cluster.update(dict.fromkeys(theirs, mine))

    for transfer in transfers:
        if not registry.find(transfer.transport).needs_mesh:
            continue
        receiver = transfer.destination
        join(receiver, first_shard.setdefault(process_of(receiver), receiver))
        if transfer.round == 0:
            senders.setdefault(receiver, set()).add(transfer.source)
        else:
            join(receiver, transfer.source)
    groups: list[TransferGroup] = []
    grouped: set[str] = set()
    for receiver in layouts:
        receivers = cluster.get(receiver, set()) - grouped
        if receivers:
            grouped |= receivers
            sending = set().union(*(senders.get(member, ()) for member in receivers)) - receivers
            ranks = [m for m in layouts if m in receivers] + [m for m in layouts if m in sending]
            is_on_cpu = any(layouts[member].device == "cpu" for member in ranks)
            groups.append(TransferGroup(f"to {process_of(receiver)}", tuple(ranks), "cpu" if is_on_cpu else "cuda"))
    return tuple(groups)


class TransferPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A program for each process, and the links of all programs."""

    programs: dict[str, TransferProgram]
    """Programs by process, for every trainer and engine."""
    links: tuple[FlowLink, ...]
    """Links of each version."""
    frozen_links: tuple[FlowLink, ...]
    """Links of frozen tensors, sent only to engines that do not have them yet."""
    transfer_groups: tuple[TransferGroup, ...]
    received: dict[str, Layout]
    """Layout that each engine receives: the one it wants, except for weights that it merges itself."""


class LinkSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """The links of a plan, without its programs."""

    links: tuple[FlowLink, ...]
    """Links of each version; zero-copy links are listed where they are allowed and possible."""
    frozen_links: tuple[FlowLink, ...]
    """Links of frozen tensors, as in `TransferPlan`."""
    staging: dict[str, int]
    """Bytes that each engine needs beside its parameters, except for memory that it reads in place."""

    @property
    def egress(self) -> dict[str, int]:
        """Bytes sent by or read from each process."""
        return _totals((link.source, link.num_bytes) for link in self.links)

    @property
    def ingress(self) -> dict[str, int]:
        """Bytes that each engine receives."""
        return _totals((link.destination, link.num_bytes) for link in self.links)


class _Decisions(msgspec.Struct, frozen=True, eq=False):
    """All decisions of a plan: what moves between which processes."""

    part: FrozenPart
    allow_alias: bool
    tensors: PairedTensors
    source_shards: SourceShards
    class_of: dict[str, int]
    destination_shards: list[DestinationShards]
    patterns: list[SharingPattern]
    moved: FlowColumns


def plan(
    sources: Mapping[str, Layout],
    destinations: Mapping[str, Layout],
    *,
    allow_alias: bool,
    alias_frozen: bool = False,
    grain: int = GRAIN,
) -> TransferPlan:
    """Plan how every wanted element reaches its engine.

    Args:
        sources: layouts of the trainers.
        destinations: layouts that the engines want.
        allow_alias: let engines read a trainer's memory in place if it contains a whole storage of the engine,
            contiguously, in the same element type.
        alias_frozen: allow it at least for frozen tensors.
        grain: bytes; an overlap smaller than twice this is not split among replicas.

    Raises:
        CoverageError: a wanted element has no source; names the tensor and the slice.
        RefitError: a layout contradicts itself or another one, or a conversion is missing.

    """
    adapted = _adapt(sources, destinations)
    received = {engine: each.layout for engine, each in adapted.items()}
    decisions = [
        _decide(part, allow_alias=allow_alias or (alias_frozen and part.is_frozen), grain=grain)
        for part in parts(sources, received)
    ]
    turns = [turn for decided in decisions for turn in _turns(decided)]
    groups = transfer_groups([transfer for _, transfer in turns], {**destinations, **sources})
    transfer_group_of = {
        member: transfer_group
        for transfer_group in groups
        for member in transfer_group.members
        if member in destinations
    }
    turns = [(turn, _over(transfer, transfer_group_of)) for turn, transfer in turns]
    receives: dict[str, list[LinkTransfer]] = {}
    sends: dict[str, list[tuple[Turn, LinkTransfer]]] = {}
    for turn, transfer in turns:
        receives.setdefault(transfer.destination, []).append(transfer)
        if registry.find(transfer.transport).is_sent:
            sends.setdefault(transfer.source, []).append((turn, transfer))
    verified = verify.join(
        [(each.part, verify.verifications(*each.part.sides, each.tensors, each.source_shards)) for each in decisions]
    )
    programs: dict[str, TransferProgram] = {}
    for member in (*sources, *destinations):
        shards = [each.destination_shards[each.class_of[member]] for each in decisions if member in each.class_of]
        engine_layout = adapted.get(member)
        programs[member] = TransferProgram(
            member=member,
            receives=tuple(receives.get(member, ())),
            sends=tuple(transfer for _, transfer in sorted(sends.get(member, ()), key=lambda item: item[0])),
            quantisations=tuple(each for of in shards for each in of.quantisations),
            staging=(
                *(engine_layout.staging if engine_layout else ()),
                *(each for of in shards for each in of.staging),
            ),
            transfer_groups=tuple(transfer_group for transfer_group in groups if member in transfer_group.members),
            verification=verified[member],
            merging=engine_layout.merging if engine_layout else None,
            received=engine_layout.layout if engine_layout and engine_layout.merging else None,
        )
    links = {
        is_frozen: tuple(
            link
            for each in decisions
            if each.part.is_frozen == is_frozen
            for link in _split_aliases(each, [turn for turn in turns if turn[1].is_frozen == is_frozen])
        )
        for is_frozen in (False, True)
    }
    return TransferPlan(
        programs=programs, links=links[False], frozen_links=links[True], transfer_groups=groups, received=received
    )


def survey(
    sources: Mapping[str, Layout],
    destinations: Mapping[str, Layout],
    *,
    allow_alias: bool,
    alias_frozen: bool = False,
    grain: int = GRAIN,
) -> LinkSurvey:
    """Return the links of `plan` without its programs. Takes the arguments of `plan`, and raises the same errors.

    Makes no tables of copies, so it needs little more memory than the layouts. Only where engine storages may be read
    in place does it make programs, to see which are.
    """
    adapted = _adapt(sources, destinations)
    links_of_part: dict[bool, tuple[FlowLink, ...]] = {False: (), True: ()}
    staging = {engine: sum(staging.num_bytes for staging in each.staging) for engine, each in adapted.items()}
    for part in parts(sources, {engine: each.layout for engine, each in adapted.items()}):
        may_alias = allow_alias or (alias_frozen and part.is_frozen)
        decided = _decide(part, allow_alias=may_alias, grain=grain)
        for engine, number in decided.class_of.items():
            staging[engine] += sum(each.num_bytes for each in decided.destination_shards[number].staging)
        links = _links(decided)
        if may_alias and any(registry.find_in_place(link.transport) for link in links):
            turns = _turns(decided)
            links = _split_aliases(decided, turns)
            for _, transfer in turns:
                staging[transfer.destination] -= _read_in_place(transfer, adapted[transfer.destination].staging)
        links_of_part[part.is_frozen] = links
    return LinkSurvey(links=links_of_part[False], frozen_links=links_of_part[True], staging=staging)


def _adapt(sources: Mapping[str, Layout], destinations: Mapping[str, Layout]) -> dict[str, AdapterLayout]:
    twice = sources.keys() & destinations.keys()
    if twice:
        raise RefitError(f"{min(twice)} is both a source and a destination")
    for member in classes(destinations)[1]:  # check layouts before anything is derived from them
        check(destinations[member], member)
        check_writable(destinations[member], member)
    return adapt(sources, destinations)


def _decide(part: FrozenPart, *, allow_alias: bool, grain: int) -> _Decisions:
    sources, destinations = part.sides
    for member in classes(sources)[1]:
        check(sources[member], member)
    class_of, examples = classes(destinations)
    tensors = match(sources, destinations)
    source_shards = collect(sources, tensors)
    shards = [resolve(member, destinations[member], tensors, source_shards) for member in examples]
    replica_sets = ReplicaSets(source_shards)
    sharing = patterns(
        destinations, class_of, shards, replica_sets, source_shards.set_B, allow_alias=allow_alias, grain=max(grain, 1)
    )
    segments = choose(sharing, replica_sets.all, len(sources))
    moved = flows(sharing, segments, destinations)
    return _Decisions(part, allow_alias, tensors, source_shards, class_of, shards, sharing, moved)


def _turns(decided: _Decisions) -> list[tuple[Turn, LinkTransfer]]:
    """Return all transfers in the order in which links are served."""
    assembler = TransferAssembler(
        decided.tensors,
        decided.source_shards,
        decided.part.destinations,
        decided.class_of,
        decided.destination_shards,
        decided.patterns,
        decided.moved,
    )
    return [
        (turn, msgspec.structs.replace(transfer, is_frozen=decided.part.is_frozen))
        for engine in range(len(decided.part.destinations))
        for turn, transfer in assembler.transfers(engine, allow_alias=decided.allow_alias)
    ]


def _read_in_place(transfer: LinkTransfer, staging: Iterable[Staging]) -> int:
    """Return the bytes of staging memory that the transfer saves its receiver."""
    if not registry.find(transfer.transport).in_place_of:
        return 0
    return sum(each.num_bytes for each in staging if each.name in transfer.destination_storages)


def _links(decided: _Decisions) -> tuple[FlowLink, ...]:
    shards, engines = decided.destination_shards, decided.part.destinations
    return links(decided.moved, decided.patterns, shards, decided.source_shards, engines)


def _split_aliases(decided: _Decisions, turns: Iterable[tuple[Turn, LinkTransfer]]) -> tuple[FlowLink, ...]:
    """Return all links; one of which a part is read in place is split in two."""
    sources, destinations = decided.part.sides
    transfer_of = {(t.round, t.source, t.destination, t.transport): t for _, t in turns}
    links: list[FlowLink] = []
    for link in _links(decided):
        ends = link.round, link.source, link.destination
        in_place = [
            (each, transfer_of[*ends, each.name])
            for each in registry.find_in_place(link.transport)
            if (*ends, each.name) in transfer_of
        ]
        for transport, alias in in_place:
            of_alias = {
                "num_bytes": 0,
                "num_read": 0,
                "num_copies": len(alias.copies),
                "num_tensors": len(alias.tensors),
            }
            reason = transport.explain(Route.between(sources[link.source], destinations[link.destination]))
            links.append(msgspec.structs.replace(link, transport=transport.name, reason=reason, **of_alias))
        sent = transfer_of.get((*ends, link.transport))
        if sent is not None:
            num_tensors = len(sent.tensors) if in_place else link.num_tensors
            num_read = link.num_read - (link.num_bytes - sent.num_bytes)  # memory read in place has one element type
            of_rest = {"num_bytes": sent.num_bytes, "num_read": num_read, "num_tensors": num_tensors}
            links.append(msgspec.structs.replace(link, **of_rest))
    return tuple(links)


def _over(transfer: LinkTransfer, transfer_group_of: Mapping[str, TransferGroup]) -> LinkTransfer:
    """Return a transfer with the name of its transfer group."""
    if not registry.find(transfer.transport).needs_mesh:
        return transfer
    return msgspec.structs.replace(transfer, transfer_group=transfer_group_of[transfer.destination].name)


def _totals(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for member, num_bytes in amounts:
        totals[member] = totals.get(member, 0) + num_bytes
    return totals
