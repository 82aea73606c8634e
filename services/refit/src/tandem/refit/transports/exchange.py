"""One round of streams over one transfer group: a process's sends and receives, cut into messages.

Each transfer is a row of messages, and message b of every transfer belongs to wave b. To start a wave, a process posts
its receives, then packs and sends one message after another. It finishes each wave after starting the next, so two are
always in progress: while one crosses the wire, the next is packed and the previous one is unpacked.

This cannot deadlock, in whatever order peers run. Starting a wave waits for no peer. Take the lowest wave that is not
finished everywhere: every process in it has finished all lower waves, so it has started this one. Receives are waited
for before sends, so all receives arrive, which completes the sends, and the next wave becomes the lowest. Where NCCL
runs on one queue, transfer groups take turns in the same order everywhere (`run_all`), and the same argument holds for
pairs of wave and group.

Small copies are packed together. Large ones are cut, and are not packed at an end where they are contiguous.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.columns import Ints
from tandem.refit.transfer import CopyColumns, LinkTransfer, TransferGroup
from tandem.refit.transports.copying import BoundCopier
from tandem.refit.transports.memory import (
    NamedStorages,
    destination_side,
    item_sizes,
    source_side,
    torch_dtype,
    wire_bytes,
)
from tandem.refit.transports.process_group import ConnectedGroup, GroupMessage, poll
from tandem.refit.transports.sizes import DEPTH, bucket_bytes

TAGS_A_ROUND = 1 << 20
ALONE_BYTES = 1 << 20
"""A contiguous copy of at least this size is a message of its own."""


class MessageBuckets(NamedTuple):
    """Messages in the order of sending."""

    copies: CopyColumns
    """K rows: those of the transfer, with large ones cut."""
    wire_dtype_K: Ints
    """Element type on the wire: the smaller of the two ends' types; the source's if they are equally large."""
    place_K: Ints
    """Byte offset of each row in its message, aligned for its type; its elements are row-major."""
    first_B1: list[int]
    """Message b contains rows ``first_B1[b] : first_B1[b + 1]``."""
    num_bytes_B: list[int]


def divide(copies: CopyColumns, limit: int) -> MessageBuckets:
    """Return messages of at most `limit` bytes for these copies."""
    size_C = np.minimum(item_sizes(copies.source_dtype_C), item_sizes(copies.destination_dtype_C))
    # Order by element size, largest first, so that rows are aligned in their message without gaps.
    cut = _cut_large(copies.rows(np.argsort(-size_C, kind="stable")), limit)
    source_size_K, destination_size_K = item_sizes(cut.source_dtype_C), item_sizes(cut.destination_dtype_C)
    wire_dtype_K = np.where(destination_size_K < source_size_K, cut.destination_dtype_C, cut.source_dtype_C)
    num_bytes_K = wire_bytes(cut)
    is_direct_K = _is_contiguous(cut.shape_CD, cut.source_strides_CD, source_size_K) & (
        wire_dtype_K == cut.source_dtype_C
    ) | _is_contiguous(cut.shape_CD, cut.destination_strides_CD, destination_size_K) & (
        wire_dtype_K == cut.destination_dtype_C
    )
    is_alone_K = is_direct_K & (num_bytes_K >= min(ALONE_BYTES, limit))
    place_K, first_B1, num_bytes_B = _fill(num_bytes_K.tolist(), is_alone_K.tolist(), limit)
    return MessageBuckets(cut, wire_dtype_K, np.array(place_K, np.int64), first_B1, num_bytes_B)


def _fill(num_bytes_K: list[int], is_alone_K: list[bool], limit: int) -> tuple[list[int], list[int], list[int]]:
    """Return each row's place in its message, each message's first row followed by an end, and the messages' sizes."""
    places: list[int] = []
    first: list[int] = []
    filled: list[int] = []
    is_open = False
    for row, (num_bytes, is_alone) in enumerate(zip(num_bytes_K, is_alone_K, strict=True)):
        if not is_open or is_alone or filled[-1] + num_bytes > limit:
            first.append(row)
            filled.append(0)
        places.append(filled[-1])
        filled[-1] += num_bytes
        is_open = not is_alone
    return places, [*first, len(num_bytes_K)], filled


def _is_contiguous(shape_CD: Ints, strides_CD: Ints, size_C: Ints) -> Ints:
    """Return which rows are row-major without gaps."""
    num_dims = shape_CD.shape[1]
    contiguous_C = np.ones(len(shape_CD), bool)
    step_C = size_C.copy()
    for dim in reversed(range(num_dims)):
        contiguous_C &= (shape_CD[:, dim] == 1) | (strides_CD[:, dim] == step_C)
        step_C = step_C * shape_CD[:, dim]
    return contiguous_C


def _cut_large(copies: CopyColumns, limit: int) -> CopyColumns:
    """Return the copies, with those above `limit` cut into slices of even size."""
    num_bytes_C = wire_bytes(copies)
    large = np.flatnonzero(num_bytes_C > limit)
    if not len(large):
        return copies
    row_K: list[Ints] = []
    start_K: list[Ints] = []
    shape_K: list[Ints] = []
    num_dims, next_row = copies.shape_CD.shape[1], 0
    for row in large.tolist():
        shape = copies.shape_CD[row].tolist()
        boxes = list(_boxes(shape, int(num_bytes_C[row]) // math.prod(shape), limit))
        row_K += [np.arange(next_row, row), np.full(len(boxes), row)]
        start_K += [np.zeros((row - next_row, num_dims), np.int64), np.array([start for start, _ in boxes])]
        shape_K += [copies.shape_CD[next_row:row], np.array([shape for _, shape in boxes])]
        next_row = row + 1
    row_K.append(np.arange(next_row, len(copies)))
    start_K.append(np.zeros((len(copies) - next_row, num_dims), np.int64))
    shape_K.append(copies.shape_CD[next_row:])
    cut, start_KD = copies.rows(np.concatenate(row_K)), np.concatenate(start_K)
    return CopyColumns(
        cut.tensor_C,
        cut.source_C,
        cut.destination_C,
        cut.source_offset_C + (start_KD * cut.source_strides_CD).sum(axis=1),
        cut.destination_offset_C + (start_KD * cut.destination_strides_CD).sum(axis=1),
        np.concatenate(shape_K),
        cut.source_strides_CD,
        cut.destination_strides_CD,
        cut.source_dtype_C,
        cut.destination_dtype_C,
    )


def _boxes(shape: Sequence[int], item_size: int, limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield start and shape of slices of at most `limit` bytes, in row-major order."""
    inner, dim = item_size, len(shape) - 1
    while inner * shape[dim] <= limit:  # ends before dimension 0, because the whole is larger than the limit
        inner *= shape[dim]
        dim -= 1
    num_pieces = -(-shape[dim] // (limit // inner))
    step = -(-shape[dim] // num_pieces)
    for *start, first in itertools.product(*(range(n) for n in shape[:dim]), range(0, shape[dim], step)):
        yield (
            (*start, first, *(0 for _ in shape[dim + 1 :])),
            (*(1 for _ in start), min(step, shape[dim] - first), *shape[dim + 1 :]),
        )


class BoundMessage(NamedTuple):
    """One message of a channel."""

    message: GroupMessage
    copier: BoundCopier | None
    """Packs or unpacks the message; None if it is sent or received in place."""
    tensor: str
    """First tensor in the message, for errors."""
    item_size: int
    """Bytes of the smallest element in the message, of which all others have a multiple."""


class _Flying(NamedTuple):
    """A message in transit."""

    work: Any
    channel: BoundChannel
    wave: int


class MeshEnd(NamedTuple):
    """One process's end of a transfer group, to which its messages are bound."""

    member: str
    transfer_group: TransferGroup
    memory: NamedStorages
    device: torch.device
    """Device of the messages: the parameters' own, unless the group connects CPUs."""


class BoundChannel:
    """One end of a transfer, cut into messages that are bound to memory."""

    def __init__(self, transfer: LinkTransfer, end: MeshEnd) -> None:
        """Prepare it. Raises `RefitError` if the memory differs from the plan."""
        self.transfer = transfer
        self.is_send = transfer.source == end.member
        self.peer = transfer.destination if self.is_send else transfer.source
        self.link = transfer.link
        self.num_copies = len(transfer.copies)
        self.messages = list(self._messages(end))

    def _messages(self, end: MeshEnd) -> Iterator[BoundMessage]:
        limit = bucket_bytes(len(end.transfer_group.members), self.transfer.num_bytes)
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
        places, rank = buckets.place_K.tolist(), end.transfer_group.members.index(self.peer)
        for wave, rows in enumerate(rows_B):
            wave_views, copier = [views[row] for row in rows], None
            if in_place_B[wave]:
                bytes_ = wave_views[0].reshape(-1).view(torch.uint8)
            else:
                bytes_ = slots[wave % DEPTH][: buckets.num_bytes_B[wave]]
                packed = [_pack(bytes_, places[row], types[row], views[row].shape) for row in rows]
                copier = BoundCopier(packed, wave_views) if self.is_send else BoundCopier(wave_views, packed)
            tag = self.transfer.round * TAGS_A_ROUND + wave
            name = self.transfer.tensors[copies.tensor_C[rows[0]]]
            item_size = min(types[row].itemsize for row in rows)
            yield BoundMessage(GroupMessage(bytes_, rank, tag, self.is_send), copier, name, item_size)


def _is_in_place(view: torch.Tensor, wire_type: torch.dtype, device: torch.device) -> bool:
    return view.dtype == wire_type and view.is_contiguous() and view.device == device


def _pack(message: torch.Tensor, place: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Return the bytes of a row in a message, as a tensor."""
    return message[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class ChannelExchange:
    """All channels of one process in one transfer group and round."""

    def __init__(self, transfers: Sequence[LinkTransfer], end: MeshEnd, groups: Mapping[str, ConnectedGroup]) -> None:
        """Bind the transfers that use `end` in this round. Raises `RefitError`.

        Args:
            transfers: of one transfer group and one round.
            end: of that group.
            groups: connected transfer groups by name, looked up at each run.

        """
        self._transfers = transfers
        self._end = end
        self._groups = groups
        self.channels = self._bind()
        links = [channel.link for channel in self.channels]
        assert len(set(links)) == len(links), f"two transfers over one link in one round: {links}"

    def _bind(self) -> list[BoundChannel]:
        return [BoundChannel(transfer, self._end) for transfer in self._transfers]

    def select_channels(self, only: Collection[str] | None) -> list[BoundChannel]:
        """Return the channels to these destinations; all if None."""
        return [c for c in self.channels if only is None or process_of(c.transfer.destination) in only]

    def group(self) -> ConnectedGroup:
        """Return the group in use now. Raises `RefitError` if it is not connected."""
        end = self._end
        connected = self._groups.get(end.transfer_group.name)
        if connected is None or connected.transfer_group.members != end.transfer_group.members:
            raise RefitError(
                f"{end.member} is not connected to transfer group {end.transfer_group.name!r} of "
                f"{', '.join(end.transfer_group.members)}"
            )
        if connected.device != end.device:  # parameters on a GPU, group on CPUs: messages go where the group is
            self._end = end._replace(device=connected.device)
            self.channels = self._bind()
        return connected

    def steps(
        self, group: ConnectedGroup, deadline: float, only: Collection[str] | None, counted: dict[str, int]
    ) -> Iterator[None]:
        """Run one round, yielding after each wave; add the bytes moved over each link to `counted`.

        Raises `RefitError`, after closing the group so that peers fail too.
        """
        channels = self.select_channels(only)
        num_waves = max((len(channel.messages) for channel in channels), default=0)
        flying: list[_Flying] = []
        if group.queue is not None:
            group.queue.wait_stream(torch.cuda.current_stream(group.device))
        try:
            for wave in range(num_waves + DEPTH):
                with use_queue(group):
                    while flying and flying[0].wave <= wave - DEPTH:
                        self._finish(group, flying, deadline, counted)
                    if wave < num_waves:
                        self._start(group, wave, channels, flying)
                yield
            synchronise(group, deadline)
        except RefitError as error:
            flying.clear()
            group.close(str(error))
            raise

    def _start(self, group: ConnectedGroup, wave: int, channels: list[BoundChannel], flying: list[_Flying]) -> None:
        # Receives first: incoming messages then have a place, and sends complete when they are received.
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
                raise RefitError(describe_failure(group, batch[0], wave, failure))

    def _finish(self, group: ConnectedGroup, flying: list[_Flying], deadline: float, counted: dict[str, int]) -> None:
        work, channel, wave = flying.pop(0)
        failure = group.wait(work, deadline)
        del work  # a caught error keeps locals alive, and `work` keeps the sockets open
        if failure:
            raise RefitError(describe_failure(group, channel, wave, failure))
        bound = channel.messages[wave]
        if bound.copier is not None and not channel.is_send:
            bound.copier.run()
        counted[channel.link] = counted.get(channel.link, 0) + bound.message.bytes_.numel()


def describe_failure(group: ConnectedGroup, channel: BoundChannel, wave: int, reason: str) -> str:
    """Return an error message: which process failed at which message, and why."""
    tensor = channel.messages[wave].tensor
    doing = f"sending {tensor} to {channel.peer}" if channel.is_send else f"receiving {tensor} from {channel.peer}"
    place = f"(round {channel.transfer.round}, message {wave + 1} of {len(channel.messages)})"
    return f"{group.member} failed while {doing} {place}: {reason}"


def use_queue(group: ConnectedGroup) -> AbstractContextManager[object]:
    """Return a context in which a group's copies are queued on its own stream."""
    return contextlib.nullcontext() if group.queue is None else torch.cuda.stream(group.queue)


def synchronise(group: ConnectedGroup, deadline: float) -> None:
    """Wait until all received data is unpacked."""
    if group.queue is not None and not poll(group.queue.query, deadline):
        raise RefitError(f"{group.member} failed while unpacking: the deadline passed")


def run_all(
    exchanges: Sequence[ChannelExchange], deadline: float, only: Collection[str] | None, counted: dict[str, int]
) -> None:
    """Run one round over several transfer groups at once.

    A group that fails is closed, and the others are served to the end; then `RefitError` reports every failure.
    """
    errors: list[Exception] = []
    pairs = []
    for exchange in exchanges:
        if exchange.select_channels(only):
            try:
                pairs.append((exchange, exchange.group()))
            except RefitError as error:
                errors.append(error)
    on_cpu = [[pair] for pair in pairs if pair[1].queue is None]
    on_gpu = sorted((pair for pair in pairs if pair[1].queue is not None), key=lambda pair: pair[1].transfer_group.name)
    teams = [*on_cpu, on_gpu] if on_gpu else on_cpu
    # One thread per group, so that a slow or stuck one does not delay the others.
    threads = [threading.Thread(target=_run_team, args=(team, deadline, only, counted, errors)) for team in teams[1:]]
    for thread in threads:
        thread.start()
    for team in teams[:1]:
        _run_team(team, deadline, only, counted, errors)
    for thread in threads:
        thread.join()  # every wait in the thread has the deadline
    for bug in errors:
        if not isinstance(bug, RefitError):
            raise bug
    if errors:
        raise RefitError("; ".join(str(error) for error in errors))


def _run_team(
    team: Sequence[tuple[ChannelExchange, ConnectedGroup]],
    deadline: float,
    only: Collection[str] | None,
    counted: dict[str, int],
    errors: list[Exception],
) -> None:
    """Run transfer groups in turns of one wave; append failures to `errors`."""
    running = [exchange.steps(group, deadline, only, counted) for exchange, group in team]
    while running:
        for steps in list(running):
            try:
                next(steps)
            except StopIteration:
                running.remove(steps)
            except Exception as error:
                errors.append(error)
                running.remove(steps)
