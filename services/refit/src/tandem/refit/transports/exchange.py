"""One round of streams over one mesh: all that a process sends and receives there.

Each transfer is a row of messages, and message b of every transfer belongs to wave b. A process starts a wave (first
what it receives, then, message by message, what it packs and sends), and finishes the wave before the last one, so two
are always under way: while one crosses the wire, the next is packed and the one before is unpacked.

This cannot deadlock, in whatever order peers run. Starting waits for no one. Of all waves that are not finished
everywhere take the lowest: whoever has a part in it has finished everything below, so has started it. Receives are
waited for before sends, so they all arrive, which finishes the sends. And then the next wave is the lowest. Where NCCL
runs on one queue of work, meshes take turns in an order that is the same everywhere (`run_all`), and the same argument
holds for pairs of wave and mesh.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.transfer import Mesh, Transfer
from tandem.refit.transports.buckets import divide
from tandem.refit.transports.copying import Copier
from tandem.refit.transports.memory import Memory, destination_side, source_side, torch_dtype
from tandem.refit.transports.process_group import Group, Message, poll
from tandem.refit.transports.sizes import DEPTH, bucket_bytes

_TAGS_A_ROUND = 1 << 20


class _BoundMessage(NamedTuple):
    """One message of a channel."""

    message: Message
    copier: Copier | None
    """Packs it, or unpacks it; None where it lies in place."""
    tensor: str
    """Its first, for errors."""


class _Flying(NamedTuple):
    """A message under way."""

    work: Any
    channel: Channel
    wave: int


class MeshEnd(NamedTuple):
    """One process's end of a mesh: what its messages are bound to."""

    member: str
    mesh: Mesh
    memory: Memory
    device: torch.device
    """Where messages lie: the parameters' own, unless the mesh goes over CPUs."""


class Channel:
    """One transfer at one of its ends, cut into messages that are bound to memory."""

    def __init__(self, transfer: Transfer, end: MeshEnd) -> None:
        """Prepare it. Raises `RefitError` if the memory is not what was planned for."""
        self.transfer = transfer
        self.is_send = transfer.source == end.member
        self.peer = transfer.destination if self.is_send else transfer.source
        self.link = transfer.link
        self.num_copies = len(transfer.copies)
        self.messages = list(self._messages(end))

    def _messages(self, end: MeshEnd) -> Iterator[_BoundMessage]:
        limit = bucket_bytes(len(end.mesh.members), self.transfer.num_bytes)
        buckets = divide(self.transfer.copies, limit)
        copies = buckets.copies
        side = (
            source_side(copies, [storage.name for storage in self.transfer.source_storages])
            if self.is_send
            else destination_side(copies, self.transfer.destination_storages)
        )
        views = end.memory.views(side, self.transfer.tensors, copies.tensor_C)
        types = [torch_dtype(code) for code in buckets.wire_dtype_K.tolist()]
        rows_B = [range(*ends) for ends in itertools.pairwise(buckets.first_B1)]
        in_place_B = [len(rows) == 1 and _is_in_place(views[rows[0]], types[rows[0]], end.device) for rows in rows_B]
        largest = max(
            (num for num, is_there in zip(buckets.num_bytes_B, in_place_B, strict=True) if not is_there), default=0
        )
        slots = [torch.empty(largest, dtype=torch.uint8, device=end.device) for _ in range(DEPTH if largest else 0)]
        places, rank = buckets.place_K.tolist(), end.mesh.members.index(self.peer)
        for wave, rows in enumerate(rows_B):
            own, copier = [views[row] for row in rows], None
            if in_place_B[wave]:
                bytes_ = own[0].reshape(-1).view(torch.uint8)
            else:
                bytes_ = slots[wave % DEPTH][: buckets.num_bytes_B[wave]]
                packed = [_packed(bytes_, places[row], types[row], views[row].shape) for row in rows]
                copier = Copier(packed, own) if self.is_send else Copier(own, packed)
            tag = self.transfer.round * _TAGS_A_ROUND + wave
            name = self.transfer.tensors[copies.tensor_C[rows[0]]]
            yield _BoundMessage(Message(bytes_, rank, tag, self.is_send), copier, name)


def _is_in_place(view: torch.Tensor, wire_type: torch.dtype, device: torch.device) -> bool:
    return view.dtype == wire_type and view.is_contiguous() and view.device == device


def _packed(message: torch.Tensor, place: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return the bytes of a message that hold a row, as a tensor."""
    return message[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class Exchange:
    """All channels of one process over one mesh in one round."""

    def __init__(self, transfers: Sequence[Transfer], end: MeshEnd, groups: Mapping[str, Group]) -> None:
        """Bind the transfers that go over `end` in this round. Raises `RefitError`.

        Args:
            transfers: of one mesh and one round.
            end: of that mesh.
            groups: connected meshes by name, looked up at each run.

        """
        self._transfers = transfers
        self._end = end
        self._groups = groups
        self.channels = self._bind()
        links = [channel.link for channel in self.channels]
        assert len(set(links)) == len(links), f"two transfers over one link in one round: {links}"

    def _bind(self) -> list[Channel]:
        return [Channel(transfer, self._end) for transfer in self._transfers]

    def wanted(self, only: Collection[str] | None) -> list[Channel]:
        """Return the channels to these destinations; all if None."""
        return [c for c in self.channels if only is None or process_of(c.transfer.destination) in only]

    def group(self) -> Group:
        """Return what it goes over now. Raises `RefitError` if that is not connected."""
        end = self._end
        found = self._groups.get(end.mesh.name)
        if found is None or found.mesh.members != end.mesh.members:
            raise RefitError(
                f"{end.member} is not connected to mesh {end.mesh.name!r} of {', '.join(end.mesh.members)}"
            )
        if found.device != end.device:  # parameters on a GPU and a mesh over CPUs: messages lie with the mesh
            self._end = end._replace(device=found.device)
            self.channels = self._bind()
        return found

    def steps(
        self, group: Group, deadline: float, only: Collection[str] | None, counted: dict[str, int]
    ) -> Iterator[None]:
        """Run one round, yielding after each wave; add the bytes that have gone over each link to `counted`.

        Raises `RefitError`, after it has closed the group so that peers fail too.
        """
        channels = self.wanted(only)
        num_waves = max((len(channel.messages) for channel in channels), default=0)
        flying: list[_Flying] = []
        if group.queue is not None:
            group.queue.wait_stream(torch.cuda.current_stream(group.device))
        try:
            for wave in range(num_waves + DEPTH):
                with _on_queue(group):
                    while flying and flying[0].wave <= wave - DEPTH:
                        self._finish(group, flying, deadline, counted)
                    if wave < num_waves:
                        self._start(group, wave, channels, flying)
                yield
            _synchronise(group, deadline)
        except RefitError as error:
            flying.clear()
            group.close(str(error))
            raise

    def _start(self, group: Group, wave: int, channels: list[Channel], flying: list[_Flying]) -> None:
        # Receives first: what comes meanwhile has a place to go, and sends are finished by their receivers.
        ordered = sorted((c for c in channels if wave < len(c.messages)), key=lambda channel: channel.is_send)
        batches = [[channel] for channel in ordered] if group.queue is None else [ordered]
        for batch in batches:
            for channel in batch:
                copier = channel.messages[wave].copier
                if channel.is_send and copier is not None:
                    copier.run()
            works: list[Any] = []
            failure = group.start([channel.messages[wave].message for channel in batch], works)
            flying += [_Flying(work, channel, wave) for work, channel in zip(works, batch, strict=bool(not failure))]
            works.clear()
            if failure:
                raise RefitError(_told(group, batch[0], wave, failure))

    def _finish(self, group: Group, flying: list[_Flying], deadline: float, counted: dict[str, int]) -> None:
        work, channel, wave = flying.pop(0)
        failure = group.wait(work, deadline)
        del work  # an error keeps what is alive here, and this the sockets
        if failure:
            raise RefitError(_told(group, channel, wave, failure))
        bound = channel.messages[wave]
        if bound.copier is not None and not channel.is_send:
            bound.copier.run()
        counted[channel.link] = counted.get(channel.link, 0) + bound.message.bytes_.numel()


def _told(group: Group, channel: Channel, wave: int, why: str) -> str:
    tensor = channel.messages[wave].tensor
    doing = f"sending {tensor} to {channel.peer}" if channel.is_send else f"receiving {tensor} from {channel.peer}"
    where = f"(round {channel.transfer.round}, message {wave + 1} of {len(channel.messages)})"
    return f"{group.member} failed while {doing} {where}: {why}"


def _on_queue(group: Group) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if group.queue is None else torch.cuda.stream(group.queue)


def _synchronise(group: Group, deadline: float) -> None:
    """Wait until what was received is unpacked."""
    if group.queue is not None and not poll(group.queue.query, deadline):
        raise RefitError(f"{group.member} failed while unpacking: the deadline passed")


def run_all(
    exchanges: Sequence[Exchange], deadline: float, only: Collection[str] | None, counted: dict[str, int]
) -> None:
    """Run one round over several meshes at once.

    A mesh that fails is closed and the others are served to the end; then `RefitError` tells of every failure.
    """
    errors: list[Exception] = []
    found = []
    for exchange in exchanges:
        if exchange.wanted(only):
            try:
                found.append((exchange, exchange.group()))
            except RefitError as error:
                errors.append(error)
    on_cpu = [[pair] for pair in found if pair[1].queue is None]
    on_gpu = sorted((pair for pair in found if pair[1].queue is not None), key=lambda pair: pair[1].mesh.name)
    teams = [*on_cpu, on_gpu] if on_gpu else on_cpu
    # One thread a mesh: one that is slow or stuck does not hold up the others.
    threads = [threading.Thread(target=_run_team, args=(team, deadline, only, counted, errors)) for team in teams[1:]]
    for thread in threads:
        thread.start()
    for team in teams[:1]:
        _run_team(team, deadline, only, counted, errors)
    for thread in threads:
        thread.join()  # each wait in it has the deadline
    for bug in errors:
        if not isinstance(bug, RefitError):
            raise bug
    if errors:
        raise RefitError("; ".join(str(error) for error in errors))


def _run_team(
    team: Sequence[tuple[Exchange, Group]],
    deadline: float,
    only: Collection[str] | None,
    counted: dict[str, int],
    errors: list[Exception],
) -> None:
    """Run meshes in turns of a wave; append what failed to `errors`."""
    left = [exchange.steps(group, deadline, only, counted) for exchange, group in team]
    while left:
        for steps in list(left):
            try:
                next(steps)
            except StopIteration:
                left.remove(steps)
            except Exception as error:
                errors.append(error)
                left.remove(steps)
