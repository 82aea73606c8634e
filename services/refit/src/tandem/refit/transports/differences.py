"""Streams of what changed: the transport `stream`, wrapped, to engines with an older version.

The plan stays as it is, and so do its messages. Of each message the sender keeps the bytes that it sent last
(`MessageSnapshot`), and compares them with the new ones. It sends a `MessageDifference`
(`tandem.refit.transports.encoding`), or the whole message where that is smaller. The receiver's own weights are the
older version, and are changed in place.

    receiver ──▶ sender    hello: the number that it holds
    receiver ◀── sender    header of each message: kind, counts, the number before, the number after
    receiver ◀── sender    payload of each message: the change, if it has bytes

A number stands for everything that one transfer brought. It is random, and never used twice. A receiver has one only
between two transfers that succeeded, and so does a sender for each of its receivers. Where the two differ, all messages
are whole: to a receiver that is new, was left partial or missed a version, and from a sender that is new. The
coordinator names engines whose weights are not verified (`Refit.whole`), and senders forget their numbers. The weights
that result are verified by digests like any others.

A header is one message ahead, so a receiver knows the size of what it waits for. To start message b it waits for its
header, which the sender started before message b - 1. So the argument of `tandem.refit.transports.exchange` holds for
steps as it does for waves, and nothing can deadlock.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports import encoding, exchange, sizes, stream, transport
from tandem.refit.transports.encoding import EncodingKind, MessageDifference
from tandem.refit.transports.process_group import ConnectedGroup, GroupMessage

_NOTHING_HELD = 0
_NUM_FIELDS = 5
_INTEGER_BYTES = 8
_NO_HEADER = "what came in the place of its header is none"


class DifferenceHeader(NamedTuple):
    """A change as its receiver has to know it before it comes."""

    kind: int
    num_changed: int
    num_gaps: int
    before: int
    """Number that the receiver must hold; the change starts from it, unless it is whole."""
    after: int
    """Number that the receiver holds after the last message."""


class DifferenceStream(stream.StreamTransport):
    """The transport `stream`, by which a sender sends what changed since the receiver's last version."""

    def __init__(self, largest: float = 1.0) -> None:
        """Send whole messages if a larger share than this has changed."""
        self._largest = largest

    def bind(self, transfers: Sequence[LinkTransfer], end: transport.TransferEnd) -> DifferenceStreams:
        """Cut the transfers into messages, and keep none of them yet."""
        snapshots = MessageSnapshots(self._largest)
        by_mesh: dict[str, list[LinkTransfer]] = {}
        for transfer in transfers:
            by_mesh.setdefault(transfer.transfer_group, []).append(transfer)
        return DifferenceStreams(
            [
                DifferenceExchange(
                    of_mesh,
                    exchange.MeshEnd(end.member, end.transfer_groups[name], end.memory, end.device),
                    end.groups,
                    snapshots,
                )
                for name, of_mesh in by_mesh.items()
            ],
            snapshots,
        )


class DifferenceStreams(stream.RoundStreams):
    """The streams of one round at one process, which send what changed."""

    def __init__(self, exchanges: Sequence[DifferenceExchange], snapshots: MessageSnapshots) -> None:
        super().__init__(exchanges)
        self._differing = exchanges
        self._snapshots = snapshots

    def run(self, deadline: float, only: Collection[str] | None, counted: dict[str, int]) -> None:
        """Send and receive."""
        self._snapshots.num_runs += 1
        super().run(deadline, only, counted)

    def distrust(self, engines: Collection[str]) -> None:
        """Send these engines whole messages next time."""
        for end in self._differing:
            end.distrust(engines)


class MessageSnapshot:
    """The bytes of one message as they were last sent, and the change that led to them."""

    def __init__(self, bound: exchange.BoundMessage, lock: threading.Lock, largest: float) -> None:
        """Keep nothing yet; `lock` protects the memory in which the message is packed."""
        self._largest = largest
        self._bound = bound
        self._lock = lock
        self._kept: torch.Tensor | None = None
        self._change: MessageDifference | None = None
        self._run = 0
        self.number, self._before = _NOTHING_HELD, _NOTHING_HELD

    def refresh(self, run: int) -> None:
        """Take what the message is now, once in a run: weights do not change meanwhile."""
        with self._lock:
            if self._run == run:
                return
            if self._bound.copier is not None:
                self._bound.copier.run()
            new = _integers(self._bound)
            former, self.number = self.number, _NOTHING_HELD  # if what follows fails, nothing is kept
            if self._kept is None or former == _NOTHING_HELD:
                self._kept, self._change, self._before = _copy(new), None, _NOTHING_HELD
                former = _fresh_number()
            else:
                change = encoding.advance(self._kept, new, self._largest)
                if change.kind is not EncodingKind.NOTHING:
                    self._change, self._before, former = change, former, _fresh_number()
            self.number, self._run = former, run

    def change_from(self, number: int) -> MessageDifference:
        """Return how a receiver gets here that holds the bytes with this number."""
        assert self._kept is not None, "it is refreshed first"
        if number != _NOTHING_HELD:
            if number == self.number:
                return MessageDifference(EncodingKind.NOTHING, 0, 0, self._kept.new_empty(0, dtype=torch.uint8))
            if number == self._before and self._change is not None:
                return self._change
        return encoding.wrap(self._kept)


class MessageSnapshots:
    """The snapshots of a process, one for all receivers of the same bytes."""

    def __init__(self, largest: float) -> None:
        self._largest = largest
        self.num_runs = 0
        """Number of the run in progress, from 1."""
        self._by_place: dict[object, MessageSnapshot] = {}

    def of(self, bound: exchange.BoundMessage, lock: threading.Lock) -> MessageSnapshot:
        """Return the snapshot of a message."""
        message_bytes = bound.message.bytes_
        place = (
            bound.copier.places() if bound.copier else message_bytes.data_ptr(),
            message_bytes.numel(),
            message_bytes.device,
        )
        if place not in self._by_place:
            self._by_place[place] = MessageSnapshot(bound, lock, self._largest)
        return self._by_place[place]


class _Difference(exchange.BoundChannel, ABC):
    """One end of a transfer of what changed."""

    def __init__(self, transfer: LinkTransfer, end: exchange.MeshEnd) -> None:
        super().__init__(transfer, end)
        self.number = _NOTHING_HELD
        """Number of what the receiver holds; none during a transfer and after one that failed."""
        self.hello = torch.zeros(_INTEGER_BYTES, dtype=torch.uint8, device=end.device)
        """Number that the receiver says it holds."""
        self._rank = end.transfer_group.members.index(self.peer)
        self._before = self._after = _NOTHING_HELD

    def message(self, number: int, bytes_: torch.Tensor, *, is_send: bool) -> GroupMessage:
        """Return a message to the other end, or from it; each of a transfer has a number of its own."""
        return GroupMessage(bytes_, self._rank, self.transfer.round * exchange.TAGS_A_ROUND + number, is_send)

    def begin(self) -> None:
        """Trust nothing until the whole transfer has succeeded."""
        self._before, self.number, self._after = self.number, _NOTHING_HELD, _NOTHING_HELD

    @abstractmethod
    def greet(self) -> None:
        """Take note of what the receiver holds."""

    @abstractmethod
    def header(self, wave: int) -> torch.Tensor:
        """Return the header of a message, or memory for it."""

    @abstractmethod
    def change(self, wave: int) -> MessageDifference:
        """Return the change of the message with the newest header, or memory for it. Raises `RefitError`."""

    @abstractmethod
    def take(self, wave: int, change: MessageDifference) -> None:
        """Take a change that has come. Raises `RefitError`."""

    def finish(self) -> None:
        """Trust the other end: the whole transfer has succeeded."""
        self.number = self._after


class _SendingEnd(_Difference):
    """The sender's end."""

    def __init__(self, transfer: LinkTransfer, end: exchange.MeshEnd, snapshots: MessageSnapshots) -> None:
        super().__init__(transfer, end)
        lock = threading.Lock()
        self._of_process = snapshots
        self._snapshots = [snapshots.of(bound, lock) for bound in self.messages]
        self._sent: list[int] = []
        """Number of each snapshot that the receiver holds."""
        self._change: MessageDifference | None = None

    def begin(self) -> None:
        super().begin()
        self._after = _fresh_number()

    def greet(self) -> None:
        held_number = int(self.hello.view(torch.int64).item())
        if held_number == _NOTHING_HELD or held_number != self._before:
            self._before, self._sent = _NOTHING_HELD, [_NOTHING_HELD] * len(self._snapshots)

    def header(self, wave: int) -> torch.Tensor:
        snapshot = self._snapshots[wave]
        snapshot.refresh(self._of_process.num_runs)
        change = self._change = snapshot.change_from(self._sent[wave])
        self._sent[wave] = snapshot.number
        fields = DifferenceHeader(int(change.kind), change.num_changed, change.num_gaps, self._before, self._after)
        return torch.tensor(fields, dtype=torch.int64).view(torch.uint8).to(self.hello.device)

    def change(self, wave: int) -> MessageDifference:
        assert self._change is not None, "its header was made"
        return self._change

    def take(self, wave: int, change: MessageDifference) -> None:
        raise AssertionError("a sender takes nothing")


class _ReceivingEnd(_Difference):
    """The receiver's end."""

    def __init__(self, transfer: LinkTransfer, end: exchange.MeshEnd) -> None:
        super().__init__(transfer, end)
        self._backwards = [bound.copier.backwards() if bound.copier else None for bound in self.messages]
        self._header = torch.zeros(_NUM_FIELDS * _INTEGER_BYTES, dtype=torch.uint8, device=end.device)

    def begin(self) -> None:
        super().begin()
        self.hello.copy_(torch.tensor([self._before], dtype=torch.int64).view(torch.uint8))

    def greet(self) -> None:
        pass

    def header(self, wave: int) -> torch.Tensor:
        return self._header

    def change(self, wave: int) -> MessageDifference:
        bound, header = self.messages[wave], DifferenceHeader(*self._header.view(torch.int64).tolist())
        size = bound.item_size
        length = bound.message.bytes_.numel() // size
        is_new = header.after not in (_NOTHING_HELD, self._before) and self._after in (_NOTHING_HELD, header.after)
        if not is_new or header.kind not in list(EncodingKind) or not 0 <= header.num_changed <= length:
            raise RefitError(_NO_HEADER)
        kind, self._after = EncodingKind(header.kind), header.after
        if kind is EncodingKind.WHOLE:
            return encoding.wrap(bound.message.bytes_)
        if self._before == _NOTHING_HELD or header.before != self._before:
            raise RefitError("it is a difference from weights that are not here")
        num_bytes = encoding.num_bytes(kind, header.num_changed, header.num_gaps, size, length)
        if not 0 <= num_bytes <= length * size:
            raise RefitError(_NO_HEADER)
        written = torch.empty(num_bytes, dtype=torch.uint8, device=self._header.device)
        return MessageDifference(kind, header.num_changed, header.num_gaps, written)

    def take(self, wave: int, change: MessageDifference) -> None:
        bound, backwards = self.messages[wave], self._backwards[wave]
        if change.kind is not EncodingKind.WHOLE:  # else it has come to where it belongs
            if backwards is not None:
                backwards.run()
            encoding.apply(change, _integers(bound))
        if bound.copier is not None:
            bound.copier.run()


class _Post(NamedTuple):
    """A message to start, or in transit."""

    channel: _Difference
    message: GroupMessage
    wave: int
    change: MessageDifference | None
    """The change, if this is the payload of a message."""


class _Flying(NamedTuple):
    """A message in transit."""

    work: Any
    post: _Post


class DifferenceExchange(exchange.ChannelExchange):
    """All channels of one process in one transfer group and round, which send what changed."""

    def __init__(
        self,
        transfers: Sequence[LinkTransfer],
        end: exchange.MeshEnd,
        groups: Mapping[str, ConnectedGroup],
        snapshots: MessageSnapshots,
    ) -> None:
        """Bind the transfers; `snapshots` are those of the process. Raises `RefitError`."""
        self._snapshots = snapshots
        self._differing: list[_Difference] = []
        super().__init__(transfers, end, groups)

    def distrust(self, engines: Collection[str]) -> None:
        """Send these engines whole messages next time."""
        for channel in self._differing:
            if process_of(channel.transfer.destination) in engines:
                channel.number = _NOTHING_HELD

    def _bind(self) -> list[exchange.BoundChannel]:
        self._differing = [
            _SendingEnd(transfer, self._end, self._snapshots)
            if transfer.source == self._end.member
            else _ReceivingEnd(transfer, self._end)
            for transfer in self._transfers
        ]
        return [*self._differing]

    def steps(
        self, group: ConnectedGroup, deadline: float, only: Collection[str] | None, counted: dict[str, int]
    ) -> Iterator[None]:
        """Run one round, yielding after each step; add the bytes of payloads on each link to `counted`.

        Raises `RefitError`, after closing the group so that peers fail too.
        """
        wanted_channels = self.select_channels(only)
        channels = [channel for channel in self._differing if channel in wanted_channels]
        num_waves = max((len(channel.messages) for channel in channels), default=0)
        flying: list[_Flying] = []
        if group.queue is not None:
            group.queue.wait_stream(torch.cuda.current_stream(group.device))
        try:
            with exchange.use_queue(group):
                _greet(group, channels, flying, deadline)
            yield
            for step in range(num_waves + 1 + sizes.DEPTH):
                with exchange.use_queue(group):
                    _land(group, flying, step - 1 - sizes.DEPTH, deadline, counted)
                    _start_payloads(group, step - 1, channels, flying, deadline)
                    _start_headers(group, step, channels, flying)
                yield
            exchange.synchronise(group, deadline)
        except RefitError as error:
            flying.clear()
            group.close(str(error))
            raise
        for channel in channels:
            counted.setdefault(channel.link, 0)
            channel.finish()


def _greet(group: ConnectedGroup, channels: Sequence[_Difference], flying: list[_Flying], deadline: float) -> None:
    """Tell each sender what its receiver holds."""
    posts = []
    for channel in channels:
        channel.begin()
        posts.append(_Post(channel, channel.message(0, channel.hello, is_send=not channel.is_send), 0, None))
    _start(group, posts, flying)
    _land(group, flying, 0, deadline, {})
    for channel in channels:
        channel.greet()


def _start_headers(group: ConnectedGroup, wave: int, channels: Sequence[_Difference], flying: list[_Flying]) -> None:
    """Compare the messages of a wave and send their headers, and ask for those of others."""
    posts = []
    for channel in channels:
        if wave < len(channel.messages):
            header = channel.header(wave)
            message = channel.message(2 * wave + 1, header, is_send=channel.is_send)
            posts.append(_Post(channel, message, wave, None))
    _start(group, posts, flying)


def _start_payloads(
    group: ConnectedGroup, wave: int, channels: Sequence[_Difference], flying: list[_Flying], deadline: float
) -> None:
    """Send the payloads of a wave, and ask for those that the headers of others announce."""
    posts = []
    for channel in channels:
        if not 0 <= wave < len(channel.messages):
            continue
        if not channel.is_send:  # the header has to be there
            (which,) = (i for i, each in enumerate(flying) if each.post.channel is channel and each.post.change is None)
            _finish(group, flying, which, deadline)
        with _locate_errors(group, channel, wave):
            change = channel.change(wave)
        if change.bytes_.numel():  # NCCL has no empty messages
            message = channel.message(2 * wave + 2, change.bytes_, is_send=channel.is_send)
            posts.append(_Post(channel, message, wave, change))
    _start(group, posts, flying)


def _start(group: ConnectedGroup, posts: Sequence[_Post], flying: list[_Flying]) -> None:
    """Start messages: those that come first, so that they have a place."""
    ordered = sorted(posts, key=lambda post: post.message.is_send)
    for batch in [[post] for post in ordered] if group.queue is None else [ordered] if ordered else []:
        works: list[Any] = []
        failure = group.start([post.message for post in batch], works)
        flying += [_Flying(work, post) for work, post in zip(works, batch, strict=bool(not failure))]
        works.clear()
        if failure:
            raise RefitError(exchange.describe_failure(group, batch[0].channel, batch[0].wave, failure))


def _land(group: ConnectedGroup, flying: list[_Flying], wave: int, deadline: float, counted: dict[str, int]) -> None:
    """Finish everything up to a wave."""
    while (which := next((i for i, each in enumerate(flying) if each.post.wave <= wave), None)) is not None:
        post = _finish(group, flying, which, deadline)
        if post.change is None:
            continue
        if not post.channel.is_send:
            with _locate_errors(group, post.channel, post.wave):
                post.channel.take(post.wave, post.change)
        link = post.channel.link
        counted[link] = counted.get(link, 0) + post.message.bytes_.numel()


def _finish(group: ConnectedGroup, flying: list[_Flying], which: int, deadline: float) -> _Post:
    """Wait for a message, and return what it was."""
    work, post = flying.pop(which)
    failure = group.wait(work, deadline)
    del work  # a caught error keeps locals alive, and `work` keeps the sockets open
    if failure:
        raise RefitError(exchange.describe_failure(group, post.channel, post.wave, failure))
    return post


@contextlib.contextmanager
def _locate_errors(group: ConnectedGroup, channel: exchange.BoundChannel, wave: int) -> Iterator[None]:
    """Say of an error where it was."""
    try:
        yield
    except RefitError as error:
        raise RefitError(exchange.describe_failure(group, channel, wave, str(error))) from error


def _integers(bound: exchange.BoundMessage) -> torch.Tensor:
    """Return a message as a vector of integers of the size of its smallest elements."""
    return bound.message.bytes_.view(encoding.INTEGERS[bound.item_size])


def _copy(message: torch.Tensor) -> torch.Tensor:
    """Return a copy; in a host's memory numpy asks for large pages, in which comparing is a tenth faster."""
    return message.clone() if message.device.type != "cpu" else torch.from_numpy(message.numpy().copy())


def _fresh_number() -> int:
    """Return a number that stands for nothing yet."""
    return secrets.randbelow(2**63 - 1) + 1
