"""Connections of transfer groups, over gloo on CPUs and NCCL on GPUs.

A `ConnectedGroup` is one process's end of a connected transfer group. It is built directly on a store and does not use
``torch.distributed``'s default group, which belongs to the trainer. `tandem.refit.transports.exchange` decides what
goes through it, and when.

A process that dies, or leaves after a failure, closes its sockets, which gloo reports to its peers at once. NCCL
reports nothing: a lost peer is noticed when the deadline passes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from tandem.common.errors import RefitError
from tandem.common.keys import KeyPair
from tandem.common.network import defer_silent, keep_to_interface, list_listening
from tandem.refit.transfer import TransferGroup

_POLL_S = 0.0002
"""Interval between checks of a GPU's progress."""

_PAIR_TIMEOUT = timedelta(seconds=1)
"""Time limit of each attempt to connect a pair. Gloo makes a few attempts, so a peer lost while others connect costs
them some seconds, whatever the deadline."""

_NEVER = timedelta(days=365)

_OWN_ERROR_HANDLING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Settings that keep NCCL's watchdog, and its monitor, from ending the process when a peer is lost: the refit reports
the loss instead. Each of them alone would end the process."""


class GroupMessage(NamedTuple):
    """Bytes to send, or to receive in place."""

    bytes_: torch.Tensor
    """Contiguous uint8 tensor on the group's device."""
    peer: int
    """Rank in the transfer group."""
    tag: int
    is_send: bool


class GroupKeys(NamedTuple):
    """The keys with which the processes of a transfer group authenticate each other."""

    key_pair: KeyPair
    public: Mapping[str, str]
    """Public key of each process, by its name."""


class _Guarded(NamedTuple):
    """A message between CPUs in transit."""

    message: GroupMessage
    data: Any
    guard: Any
    """A byte that arrives once the message has."""
    behind: Any
    """The byte that the sender sends after it."""


class ConnectedGroup:
    """One process's end of a connected transfer group. Not thread-safe."""

    def __init__(self, transfer_group: TransferGroup, member: str, device: torch.device, backend: Any) -> None:
        self.transfer_group = transfer_group
        self.member = member
        self.device = device
        self.closed_because = ""
        self._backend = backend
        self._byte = torch.zeros(1, dtype=torch.uint8)  # its value does not matter
        self.queue = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Stream for copies into and out of messages, so that they do not wait for a training step."""

    def start(self, messages: Sequence[GroupMessage], works: list[Any]) -> str:
        """Start messages and append the work to wait for, one per message; return why it failed, or an empty string.

        Nothing here waits for a peer's messages, so peers may start theirs in any order. With NCCL, the k-th call must
        meet the k-th call of each of its peers.
        """
        if self._backend is None:
            return f"transfer group {self.transfer_group.name!r} was closed before: {self.closed_because}"
        try:
            if self.device.type == "cpu":
                for message in messages:
                    works.append(self._start_guarded(message))
            else:
                self._backend._start_coalescing()
                for message in messages:
                    self._post(message.bytes_, message.peer, message.tag, is_send=message.is_send)
                works += [self._backend._end_coalescing()] * len(messages)
        except RuntimeError as error:
            return _reason(str(error))
        return ""

    def wait(self, work: Any, deadline: float) -> str:
        """Wait for started work, until `deadline` on the monotonic clock; return why it failed, or an empty string.

        Here and in `start` the reason is returned, not raised: an exception would keep the work alive, and so the
        sockets.
        """
        try:
            if self.device.type == "cpu":
                self._wait_guarded(work, deadline)
            elif not poll(work.is_completed, deadline):
                return "the deadline passed"
            else:
                work.wait()  # the queue's next copies come after it
        except RuntimeError as error:
            return _reason(str(error))
        return ""

    def close(self, because: str = "it was closed") -> None:
        """Leave the transfer group, so that peers that wait for this process fail. May be called twice.

        The sockets close when the last started work is released, so callers release theirs first.
        """
        backend, self._backend = self._backend, None
        if backend is None:
            return
        self.closed_because = because
        if self.device.type == "cuda":
            backend.abort()

    def _start_guarded(self, message: GroupMessage) -> _Guarded:
        """Start a message between CPUs, followed by a byte, and a byte that comes back.

        When a peer is lost, gloo fails all waits for it except that for the message in transit, which never ends. So we
        wait for a byte first, which crosses at once or not at all.
        """
        peer, tag = message.peer, message.tag * 3
        if message.is_send:
            back = self._post(self._byte, peer, tag + 2, is_send=False)
            data = self._post(message.bytes_, peer, tag, is_send=True)
            return _Guarded(message, data, back, self._post(self._byte, peer, tag + 1, is_send=True))
        data = self._post(message.bytes_, peer, tag, is_send=False)
        return _Guarded(message, data, self._post(self._byte, peer, tag + 1, is_send=False), None)

    def _wait_guarded(self, work: _Guarded, deadline: float) -> None:
        for part in (work.guard, work.data, work.behind):
            if part is not None:
                part.wait(limit_wait(deadline))
        if not work.message.is_send:
            back = self._post(self._byte, work.message.peer, work.message.tag * 3 + 2, is_send=True)
            back.wait(limit_wait(deadline))  # takes only as long as the write: the peer is ready for it

    def _post(self, bytes_: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> Any:
        return (self._backend.send if is_send else self._backend.recv)([bytes_], peer, tag)


def announce(transfer_group: TransferGroup, member: str, store: Store) -> None:
    """Announce `member` to the others, as `connect` does too; the arguments are the same. Raises `RefitError`.

    A process that announces itself, and does other work until none is `absent`, waits for no other in `connect`.
    """
    if member not in transfer_group.members:
        raise RefitError(f"{member} is not in transfer group {transfer_group.name!r}")
    PrefixStore(transfer_group.name, store).set(f"{transfer_group.members.index(member)} is there", "")


def absent(transfer_group: TransferGroup, store: Store) -> list[str]:
    """Return the processes of a transfer group that have not announced themselves."""
    prefixed = PrefixStore(transfer_group.name, store)
    return [name for rank, name in enumerate(transfer_group.members) if not prefixed.check([f"{rank} is there"])]


def connect(
    transfer_group: TransferGroup, member: str, store: Store, device: torch.device, timeout_s: float
) -> ConnectedGroup:
    """Join a transfer group, and return when every process has.

    Args:
        transfer_group: the group.
        member: this process.
        store: the same for all, prefixed by the caller with a string that is new for each attempt.
        device: where this process has its memory. NCCL connects groups on GPUs. In a group on CPUs, connected by gloo,
            data on a GPU goes through host memory.
        timeout_s: seconds until it fails.

    Raises:
        RefitError: names the missing processes.

    """
    deadline = time.monotonic() + timeout_s
    announce(transfer_group, member, store)
    group_device, rank = (
        device if transfer_group.device_type == "cuda" else torch.device("cpu"),
        transfer_group.members.index(member),
    )
    prefixed = PrefixStore(transfer_group.name, store)
    try:
        await_members(transfer_group, member, prefixed, timeout_s)
        backend: Any
        if group_device.type == "cpu":
            backend = _gloo(prefixed, rank, transfer_group, limit_wait(deadline))
        else:
            backend = _nccl(prefixed, rank, transfer_group, limit_wait(deadline), group_device)
    except RuntimeError as error:
        failure = f"could not connect transfer group {transfer_group.name!r}"
        raise RefitError(f"{member} {failure}: {_reason(str(error))}") from error
    return ConnectedGroup(transfer_group, member, group_device, backend)


def poll(is_done: Any, deadline: float) -> bool:
    """Return whether work on a GPU completed before the deadline."""
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def limit_wait(deadline: float) -> timedelta:
    """Return the time until a deadline; never 0, which would mean an endless wait."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def await_members(transfer_group: TransferGroup, member: str, store: Store, timeout_s: float) -> None:
    """Wait until every process has announced itself, in a store prefixed by the group's name. Raises `RefitError`."""
    keys = [f"{rank} is there" for rank in range(len(transfer_group.members))]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if not (
            missing := [name for name, key in zip(transfer_group.members, keys, strict=True) if not store.check([key])]
        ):
            raise
        raise RefitError(
            f"{member} waited {timeout_s:g} s for {', '.join(missing)} to connect transfer group "
            f"{transfer_group.name!r}"
        ) from error


def _gloo(store: Store, rank: int, transfer_group: TransferGroup, timeout: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Connect pairs at once. A group that connects them at their first message waits, when it is closed, for its sockets
    # to fall silent; after a peer died in the middle of a message they never do.
    known_addresses = {each.getsockname() for each in list_listening()}
    options._devices = [ProcessGroupGloo.create_device(hostname=address_towards(store), lazy_init=False)]
    defer_silent(each for each in list_listening() if each.getsockname() not in known_addresses)
    options._timeout = min(timeout, _PAIR_TIMEOUT)
    return ProcessGroupGloo(store, rank, len(transfer_group.members), options)


def _nccl(store: Store, rank: int, transfer_group: TransferGroup, timeout: timedelta, device: torch.device) -> Any:
    from torch.distributed import ProcessGroupNCCL  # not in builds for the CPU

    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER  # each wait has its own deadline, and later ones differ from this
    options.config.blocking = 0  # else it would wait forever for a process that dies while it connects
    keep_to_interface(address_towards(store), "NCCL_SOCKET_IFNAME")
    settings = {**_OWN_ERROR_HANDLING, "TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(timeout.total_seconds()))}
    with _environment(settings):
        backend: Any = ProcessGroupNCCL(store, rank, len(transfer_group.members), options)
        # The first collective creates the communicator of all processes; later messages may involve only some.
        with torch.cuda.device(device):
            met = backend.allreduce([torch.ones(1, device=device)])
    if not poll(met.is_completed, time.monotonic() + timeout.total_seconds()):
        backend.abort()
        raise RefitError(
            f"{transfer_group.members[rank]}: transfer group {transfer_group.name!r} was not connected by NCCL before "
            "the deadline"
        )
    return backend


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set these variables for the block; torch reads its NCCL settings from them when a group is made."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def address_towards(store: Store) -> str:
    """Return this host's address on the route to the store, since peers on other hosts reach the store too."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host, port = (store.host, store.port) if isinstance(store, TCPStore) else ("127.0.0.1", 1)
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _reason(error: str) -> str:
    """Return the relevant part of a message from gloo or NCCL."""
    if re.search("[Tt]imed out|NCCL timeout", error):
        return "the deadline passed"
    message = re.sub(r"^\[[^\]]*\] *", "", error).splitlines()[0].partition(". This is typically")[0]
    return f"the connection was lost ({message})"
