"""The planner: from what trainers hold and engines want to a program for each process. Pure box algebra, in columns.

1. `names`, `holdings`: number the tensors; find the distinct boxes that trainers hold, and the replicas of each.
2. `wants`: cut what each class of engines wants along those boxes, and prove that nothing is missing.
3. `sharing`: find what several engines of a node need, which is sent there once.
4. `choose`: deal the bytes out so that no trainer sends more than another that could send the same.
5. `assemble`, `merge`: resolve it to as few strided copies as possible, in an order that floods nobody.

Held boxes are disjoint, and their parts of a wanted box add up to it; lines are cut without gap or overlap; wanted
elements share no memory. So a plan that is returned writes each wanted element exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tandem.common.errors import RefitError
from tandem.refit.checks import check, check_writable
from tandem.refit.layout import Layout
from tandem.refit.planning import attestation as attest
from tandem.refit.planning.assemble import Assembler, Turn
from tandem.refit.planning.choose import choose
from tandem.refit.planning.flows import Flows, Link, flows, links
from tandem.refit.planning.holdings import Holdings, collect
from tandem.refit.planning.meshes import meshes
from tandem.refit.planning.names import Tensors, match
from tandem.refit.planning.sharing import Pattern, Supplies, patterns
from tandem.refit.planning.wants import Wants, classes, resolve
from tandem.refit.program import TransferProgram
from tandem.refit.transfer import Mesh, Transfer
from tandem.refit.transports import registry
from tandem.refit.transports.transport import Route

GRAIN = 1 << 16
"""Bytes: a region of fewer than twice as many comes from one replica."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A program for each process, and what they add up to."""

    programs: dict[str, TransferProgram]
    """By member: every trainer and every engine."""
    links: tuple[Link, ...]
    meshes: tuple[Mesh, ...]


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan would move, without the programs."""

    links: tuple[Link, ...]
    """Where aliases are allowed and possible they are counted as such."""
    staging: dict[str, int]
    """Bytes that each engine needs beside its parameters."""

    @property
    def egress(self) -> dict[str, int]:
        """Bytes that each process sends, or that are read from it, by member."""
        return _totals((link.source, link.num_bytes) for link in self.links)

    @property
    def ingress(self) -> dict[str, int]:
        """Bytes that each engine gets."""
        return _totals((link.destination, link.num_bytes) for link in self.links)


class _Outline(msgspec.Struct, frozen=True, eq=False):
    """All decisions: what moves between whom."""

    tensors: Tensors
    holdings: Holdings
    class_of: dict[str, int]
    wants: list[Wants]
    patterns: list[Pattern]
    moved: Flows


def plan(
    sources: Mapping[str, Layout], destinations: Mapping[str, Layout], *, allow_alias: bool, grain: int = GRAIN
) -> Plan:
    """Plan how every wanted element reaches its engine.

    Args:
        sources: what each trainer holds.
        destinations: what each engine wants.
        allow_alias: let an engine read a trainer's memory in place where a whole storage of the engine lies there
            contiguously in the same element type.
        grain: bytes; a region of fewer than twice as many is not split among replicas.

    Raises:
        CoverageError: a wanted element has no source; names the tensor and the box.
        RefitError: a layout contradicts itself or another one, or there is no conversion.

    """
    outline = _outline(sources, destinations, allow_alias=allow_alias, grain=grain)
    assembler = Assembler(
        outline.tensors,
        outline.holdings,
        destinations,
        outline.class_of,
        outline.wants,
        outline.patterns,
        outline.moved,
    )
    turns = [
        (turn, transfer)
        for engine in range(len(destinations))
        for turn, transfer in assembler.transfers(engine, allow_alias=allow_alias)
    ]
    made = meshes([transfer for _, transfer in turns], [*destinations, *sources])
    mesh_of = {member: mesh for mesh in made for member in mesh.members if member in destinations}
    turns = [(turn, _over(transfer, mesh_of)) for turn, transfer in turns]
    attested = attest.attestations(sources, destinations, outline.tensors, outline.holdings)
    receives: dict[str, list[Transfer]] = {}
    sends: dict[str, list[tuple[Turn, Transfer]]] = {}
    for turn, transfer in turns:
        receives.setdefault(transfer.destination, []).append(transfer)
        if registry.find(transfer.transport).is_sent:
            sends.setdefault(transfer.source, []).append((turn, transfer))
    programs: dict[str, TransferProgram] = {}
    for member in (*sources, *destinations):
        wants = outline.wants[outline.class_of[member]] if member in destinations else None
        programs[member] = TransferProgram(
            member=member,
            receives=tuple(receives.get(member, ())),
            sends=tuple(transfer for _, transfer in sorted(sends.get(member, ()), key=lambda item: item[0])),
            quantisations=wants.quantisations if wants else (),
            staging=wants.staging if wants else (),
            meshes=tuple(mesh for mesh in made if member in mesh.members),
            attestation=attested[member],
        )
    return Plan(programs=programs, links=_with_aliases(outline, sources, destinations, turns), meshes=made)


def survey(
    sources: Mapping[str, Layout], destinations: Mapping[str, Layout], *, allow_alias: bool, grain: int = GRAIN
) -> Survey:
    """Return what `plan` would move over each link. Arguments and errors are those of `plan`.

    Makes no tables of copies, so it needs little more memory than the layouts; only where storages of an engine may
    become aliases are programs made, to see which do.
    """
    outline = _outline(sources, destinations, allow_alias=allow_alias, grain=grain)
    staging = {
        engine: sum(staging.num_bytes for staging in outline.wants[number].staging)
        for engine, number in outline.class_of.items()
    }
    found = _links(outline, destinations)
    if allow_alias and any(registry.in_place_of(link.transport) for link in found):
        found = plan(sources, destinations, allow_alias=True, grain=grain).links
    return Survey(links=found, staging=staging)


def _outline(
    sources: Mapping[str, Layout], destinations: Mapping[str, Layout], *, allow_alias: bool, grain: int
) -> _Outline:
    twice = sources.keys() & destinations.keys()
    if twice:
        raise RefitError(f"{min(twice)} is both a source and a destination")
    for member in classes(sources)[1]:
        check(sources[member], member)
    class_of, examples = classes(destinations)
    for member in examples:
        check(destinations[member], member)
        check_writable(destinations[member], member)
    tensors = match(sources, destinations)
    holdings = collect(sources, tensors)
    wants = [resolve(member, destinations[member], tensors, holdings) for member in examples]
    supplies = Supplies(holdings)
    found = patterns(
        destinations, class_of, wants, supplies, holdings.set_B, allow_alias=allow_alias, grain=max(grain, 1)
    )
    segments = choose(found, supplies.all, len(sources))
    return _Outline(tensors, holdings, class_of, wants, found, flows(found, segments, destinations))


def _links(outline: _Outline, destinations: Mapping[str, Layout]) -> tuple[Link, ...]:
    return links(outline.moved, outline.patterns, outline.wants, outline.holdings, destinations)


def _with_aliases(
    outline: _Outline,
    sources: Mapping[str, Layout],
    destinations: Mapping[str, Layout],
    turns: Iterable[tuple[Turn, Transfer]],
) -> tuple[Link, ...]:
    """Return all links, those parted in two of which a part turned out to be aliases."""
    made = {(t.round, t.source, t.destination, t.transport): t for _, t in turns}
    found: list[Link] = []
    for link in _links(outline, destinations):
        ends = link.round, link.source, link.destination
        in_place = [
            (each, made[*ends, each.name])
            for each in registry.in_place_of(link.transport)
            if (*ends, each.name) in made
        ]
        for transport, alias in in_place:
            of_alias = {
                "num_bytes": 0,
                "num_read": 0,
                "num_copies": len(alias.copies),
                "num_tensors": len(alias.tensors),
            }
            why = transport.why(Route.between(sources[link.source], destinations[link.destination]))
            found.append(msgspec.structs.replace(link, transport=transport.name, why=why, **of_alias))
        rest = made.get((*ends, link.transport))
        if rest is not None:
            num_tensors = len(rest.tensors) if in_place else link.num_tensors
            num_read = link.num_read - (link.num_bytes - rest.num_bytes)  # an alias is of one type
            of_rest = {"num_bytes": rest.num_bytes, "num_read": num_read, "num_tensors": num_tensors}
            found.append(msgspec.structs.replace(link, **of_rest))
    return tuple(found)


def _over(transfer: Transfer, mesh_of: Mapping[str, Mesh]) -> Transfer:
    """Return a transfer that knows its mesh."""
    if not registry.find(transfer.transport).needs_mesh:
        return transfer
    return msgspec.structs.replace(transfer, mesh=mesh_of[transfer.destination].name)


def _totals(amounts: Iterable[tuple[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for member, num_bytes in amounts:
        totals[member] = totals.get(member, 0) + num_bytes
    return totals
