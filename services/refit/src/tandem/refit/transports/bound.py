"""A transfer program tied to memory: chooses a transport for each transfer, and runs round after round."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from tandem.common.errors import RefitError
from tandem.common.parts import process_of
from tandem.refit.layout import Storage
from tandem.refit.program import Transfer, TransferProgram
from tandem.refit.transports import cuda_ipc, shm
from tandem.refit.transports.copying import Copier
from tandem.refit.transports.exchange import End, Exchange, run_all
from tandem.refit.transports.memory import Memory, destination_side, source_side, wire_bytes
from tandem.refit.transports.quantise import Quantiser
from tandem.refit.transports.stream import Group, poll


class _Pull(NamedTuple):
    """A transfer that this process does alone, out of memory that it has opened."""

    peer: str
    link: str
    num_bytes: int
    destinations: list[torch.Tensor]
    sources: list[torch.Tensor]


class _Round(NamedTuple):
    pulls: list[_Pull]
    copier: Copier
    """Of all pulls at once."""
    exchanges: list[Exchange]


def bind_memory(program: TransferProgram, storages: Mapping[str, torch.Tensor], meshes: Mapping[str, Group]) -> Bound:
    """See `tandem.refit.transports.bind`."""
    member = program.member
    device = next((tensor.device for tensor in storages.values()), torch.device("cpu"))
    staging = {each.name: torch.empty(each.num_bytes, dtype=torch.uint8, device=device) for each in program.staging}
    if taken := staging.keys() & storages.keys():
        raise RefitError(f"{member} has parameters named like staging memory: {', '.join(sorted(taken))}")
    memory = Memory(member, {**storages, **staging})
    sources = _Sources(member, device)
    aliased: list[tuple[torch.Tensor, torch.Tensor]] = []
    pulls: dict[int, list[_Pull]] = {}
    for transfer in program.receives:
        if transfer.transport == "alias":
            aliased += shm.aliases(transfer, sources.open(transfer), memory, member)
        if transfer.transport != "stream":
            pulls.setdefault(transfer.round, []).append(_pull(transfer, sources, memory))
    exchanges = _exchanges(program, memory, device, meshes)
    quantisers = [Quantiser(quantisation, memory) for quantisation in program.quantisations]
    rounds = [
        _Round(pulls.get(number, []), _copier(pulls.get(number, [])), exchanges.get(number, []))
        for number in sorted(pulls.keys() | exchanges.keys())
    ]
    for parameter, range_ in aliased:  # nothing above has touched a parameter, and nothing can fail from here on
        parameter.data = range_
    return Bound(member, rounds, quantisers, staging, device)


class Bound:
    """See `tandem.refit.transports.BoundProgram`."""

    def __init__(
        self,
        member: str,
        rounds: list[_Round],
        quantisers: list[Quantiser],
        staging: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._member = member
        self._rounds = rounds
        self._quantisers = quantisers
        self.staging = staging
        self._device = device
        self._is_closed = False
        channels = [c for round_ in rounds for exchange in round_.exchanges for c in exchange.channels]
        pulls = [pull for round_ in rounds for pull in round_.pulls]
        self.num_copies = sum(len(pull.destinations) for pull in pulls) + sum(c.num_copies for c in channels)
        self.num_bytes = sum(pull.num_bytes for pull in pulls) + sum(c.transfer.num_bytes for c in channels)

    def run(self, deadline_s: float, only: Collection[str] | None = None) -> dict[str, int]:
        """See `tandem.refit.transports.BoundProgram`."""
        assert not self._is_closed, "a program was run after it was closed"
        deadline = time.monotonic() + deadline_s
        counted: dict[str, int] = {}
        receives = only is None or process_of(self._member) in only
        for round_ in self._rounds:
            if receives and round_.pulls:
                self._check_time(deadline, f"copying from {round_.pulls[0].peer}")
                round_.copier.run()
                for pull in round_.pulls:
                    counted[pull.link] = counted.get(pull.link, 0) + pull.num_bytes
            run_all(round_.exchanges, deadline, only, counted)
        if receives:
            for quantiser in self._quantisers:
                self._check_time(deadline, "quantising")
                quantiser.run()
        if self._device.type == "cuda":
            self._synchronise(deadline, "installing")
        return counted

    def misquantised(self) -> tuple[str, ...]:
        """See `tandem.refit.transports.BoundProgram`."""
        return tuple(name for quantiser in self._quantisers for name in quantiser.wrong())

    def close(self) -> None:
        """See `tandem.refit.transports.BoundProgram`."""
        self._is_closed = True
        self._rounds = []
        self._quantisers = []
        self.staging = {}

    def _check_time(self, deadline: float, doing: str) -> None:
        if time.monotonic() > deadline:
            raise RefitError(f"{self._member} failed while {doing}: the deadline passed")

    def _synchronise(self, deadline: float, doing: str) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        if not poll(event.query, deadline):
            raise RefitError(f"{self._member} failed while {doing}: the deadline passed")


class _Sources:
    """Storages of other processes, each opened once."""

    def __init__(self, member: str, device: torch.device) -> None:
        self._member = member
        self._device = device
        self._opened: dict[tuple[str, str], torch.Tensor] = {}

    def open(self, transfer: Transfer) -> list[torch.Tensor]:
        """Return the bytes of each source storage of a transfer. Raises `RefitError`."""
        return [self._open(transfer, storage) for storage in transfer.source_storages]

    def _open(self, transfer: Transfer, storage: Storage) -> torch.Tensor:
        key = transfer.source, storage.name
        if key not in self._opened:
            self._opened[key] = (
                cuda_ipc.open_storage(storage, transfer.source, self._member, self._device)
                if transfer.transport == "cuda_ipc"
                else shm.open_storage(storage, transfer.source, self._member)
            )
        return self._opened[key]


def _pull(transfer: Transfer, sources: _Sources, memory: Memory) -> _Pull:
    """Bind a transfer that needs nothing of its source but memory; an alias has nothing to copy."""
    if transfer.transport == "alias":
        return _Pull(transfer.source, transfer.link, 0, [], [])
    at = transfer.copies
    names = [storage.name for storage in transfer.source_storages]
    there = Memory(f"{transfer.destination}: {transfer.source}", dict(zip(names, sources.open(transfer), strict=True)))
    return _Pull(
        transfer.source,
        transfer.link,
        int(wire_bytes(at).sum()),
        memory.views(destination_side(at, transfer.destination_storages), transfer.tensors, at.tensor_C),
        there.views(source_side(at, names), transfer.tensors, at.tensor_C),
    )


def _copier(pulls: Sequence[_Pull]) -> Copier:
    return Copier([view for pull in pulls for view in pull.destinations], [v for pull in pulls for v in pull.sources])


def _exchanges(
    program: TransferProgram, memory: Memory, device: torch.device, groups: Mapping[str, Group]
) -> dict[int, list[Exchange]]:
    """Bind the streams, by round."""
    carried: dict[tuple[int, str], list[Transfer]] = {}
    for transfer in (*program.receives, *program.sends):
        if transfer.transport == "stream":
            carried.setdefault((transfer.round, transfer.mesh), []).append(transfer)
    meshes = {mesh.name: mesh for mesh in program.meshes}
    found: dict[int, list[Exchange]] = {}
    for (number, name), transfers in carried.items():
        end = End(program.member, meshes[name], memory, device)
        found.setdefault(number, []).append(Exchange(transfers, end, groups))
    return found
