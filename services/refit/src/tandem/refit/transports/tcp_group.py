"""Transfer groups over TCP, between processes that prove their keys to each other, encrypted.

A drop-in for the groups of `tandem.refit.transports.process_group`, in host memory: weights on a GPU go through it.
Messages travel in pieces, so that a slow link carries heartbeats between them. A piece is sent from where it lies, and
copied once, to where it belongs. The receiver acknowledges each whole message; until then its sender waits.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from tandem.common.errors import RefitError, WireError
from tandem.common.wire.peers import PeerConnections
from tandem.common.worker_shards import process_of
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports import process_group
from tandem.refit.transports.sizes import BUCKET_BYTES

_PIECE_BYTES = 1 << 20
_OVERHEAD_BYTES = 1 << 10
"""Most bytes that encryption adds to a frame, and more."""
_MOST_EARLY_BYTES = 4 * BUCKET_BYTES
"""Most bytes from one process that this one has not asked for yet; a sender has two messages a transfer in transit."""
_POLL_S = 0.2
_LINGER_S = 1.0
_HEADER = struct.Struct("<BQQQ")
"""Kind, tag, bytes of the whole message, and offset of the piece in it."""
_PIECE, _TAKEN = 1, 2


class _Work:
    """A message in transit."""

    def __init__(self, message: process_group.GroupMessage) -> None:
        self.message = message
        self.memory: NDArray[Any] = message.bytes_.numpy()
        self.num_taken = 0
        self.is_done = False


class TcpGroup(process_group.ConnectedGroup):
    """One process's end of a transfer group over TCP. Not thread-safe."""

    def __init__(self, transfer_group: TransferGroup, member: str, peers: PeerConnections) -> None:
        super().__init__(transfer_group, member, torch.device("cpu"), peers)
        self._peers = peers
        self._sent: dict[tuple[int, int], deque[_Work]] = {}
        """Messages without an acknowledgement, by peer and tag."""
        self._wanted: dict[tuple[int, int], deque[_Work]] = {}
        """Messages to receive, by peer and tag."""
        self._early: dict[tuple[int, int], deque[list[memoryview]]] = {}
        """Pieces of messages that were not asked for yet."""
        self._early_bytes: dict[int, int] = {}
        self._refused = ""

    def close(self, because: str = "it was closed") -> None:
        """Leave the transfer group and free its port."""
        is_open = self._backend is not None
        super().close(because)
        if is_open:
            is_idle = not any(self._sent.values()) and not self._refused and not self._peers.lost
            self._peers.close(_LINGER_S if is_idle else 0.0)
            for queues in (self._sent, self._wanted, self._early):
                queues.clear()

    def _start_guarded(self, message: process_group.GroupMessage) -> Any:
        """Send a message, or prepare to receive it; raise `RuntimeError` if the peer is lost."""
        work, key = _Work(message), (message.peer, message.tag)
        if message.is_send:
            self._sent.setdefault(key, deque()).append(work)
            for offset in range(0, max(1, work.memory.size), _PIECE_BYTES):
                header = _HEADER.pack(_PIECE, message.tag, work.memory.size, offset)
                piece = work.memory[offset : offset + _PIECE_BYTES].data
                self._peers.send(message.peer, [header, piece])
            return work
        self._wanted.setdefault(key, deque()).append(work)
        early = self._early.get(key)
        while early and not work.is_done and not self._refused:
            frames = early.popleft()
            self._early_bytes[message.peer] -= len(frames[1])
            self._place(work, frames)
        return work

    def _wait_guarded(self, work: Any, deadline: float) -> None:
        """Take what comes until a message has arrived, here or at its receiver."""
        peer = work.message.peer
        while not work.is_done:
            if self._refused:
                raise RuntimeError(self._refused)
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            lost = self._peers.lost.get(peer)  # what it sent before is still to be read
            for rank, frames in self._peers.receive(0.0 if lost else _POLL_S):
                self._take(rank, frames)
            if lost and not work.is_done:
                raise RuntimeError(lost)

    def _take(self, peer: int, frames: list[memoryview]) -> None:
        """Take what a peer has sent: a piece of a message, or word that it has one."""
        if len(frames[0]) != _HEADER.size:
            return self._refuse(peer, f"a header of {len(frames[0])} bytes")
        kind, tag, _, _ = _HEADER.unpack(frames[0])
        key = (peer, tag)
        if kind == _TAKEN and len(frames) == 1 and self._sent.get(key):
            self._sent[key].popleft().is_done = True
        elif kind != _PIECE or len(frames) != 2:
            self._refuse(peer, f"what is no message of a stream (kind {kind}, {len(frames)} frames)")
        elif expected := self._wanted.get(key):
            self._place(expected[0], frames)
        else:
            self._early.setdefault(key, deque()).append(frames)
            self._early_bytes[peer] = self._early_bytes.get(peer, 0) + len(frames[1])
            if self._early_bytes[peer] > _MOST_EARLY_BYTES:
                self._refuse(peer, f"more than {_MOST_EARLY_BYTES >> 20} MiB that were not asked for")
        return None

    def _place(self, work: _Work, frames: list[memoryview]) -> None:
        """Copy a piece to where it belongs, and acknowledge the message if that was its last."""
        _, tag, size, offset = _HEADER.unpack(frames[0])
        peer, total = work.message.peer, work.memory.size
        length = min(_PIECE_BYTES, total - work.num_taken)
        if (size, offset, len(frames[1])) != (total, work.num_taken, length):
            description = f"{len(frames[1])} bytes at {offset} of a message of {size}"
            return self._refuse(peer, f"{description}, where {length} at {work.num_taken} of {total} were to come")
        work.memory[offset : offset + length] = np.frombuffer(frames[1], np.uint8)
        work.num_taken += length
        if work.num_taken == total:
            work.is_done = True
            self._wanted[peer, tag].popleft()
            self._peers.send(peer, [_HEADER.pack(_TAKEN, tag, total, 0)])
        return None

    def _refuse(self, peer: int, description: str) -> None:
        self._refused = f"{self.transfer_group.members[peer]} sent {description}"


def connect(
    transfer_group: TransferGroup, member: str, store: Store, keys: process_group.GroupKeys, timeout_s: float
) -> TcpGroup:
    """Join a transfer group over TCP, and return when every process has; see `process_group.connect`.

    Only addresses go through the store. A stranger that changes them there can prevent a connection, and prove no key.
    """
    deadline, members = time.monotonic() + timeout_s, transfer_group.members
    process_group.announce(transfer_group, member, store)
    rank, prefixed = members.index(member), PrefixStore(transfer_group.name, store)
    failure = f"{member} could not connect transfer group {transfer_group.name!r} over TCP"
    if unknown := [name for name in members if process_of(name) not in keys.public]:
        raise RefitError(f"{failure}: the coordinator knows no key of {', '.join(unknown)}")
    publics = [keys.public[process_of(name)] for name in members]
    peers: PeerConnections | None = None
    try:
        process_group.await_members(transfer_group, member, prefixed, timeout_s)
        peers = PeerConnections(
            rank,
            members,
            publics,
            keys.key_pair,
            process_group.address_towards(store),
            max_bytes=_PIECE_BYTES + _OVERHEAD_BYTES,
        )
        prefixed.set(f"{rank} listens at", peers.at)
        peers.join(_places(prefixed, range(rank + 1, len(members)), deadline), deadline)
    except (RuntimeError, WireError, UnicodeDecodeError) as error:
        if peers is not None:
            peers.close()
        raise RefitError(f"{failure}: {str(error).splitlines()[0]}") from error
    return TcpGroup(transfer_group, member, peers)


def _places(store: Store, ranks: Sequence[int], deadline: float) -> dict[int, str]:
    """Return where processes listen."""
    addresses: dict[int, str] = {}
    for rank in ranks:
        store.wait([f"{rank} listens at"], process_group.limit_wait(deadline))
        addresses[rank] = store.get(f"{rank} listens at").decode()
    return addresses
