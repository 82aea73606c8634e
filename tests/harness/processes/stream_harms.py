"""What happens to a process that streams differences, and to what it sends or receives: by name, once each."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tandem.refit.transports import differences, encoding
from tandem.refit.transports.process_group import ConnectedGroup, GroupMessage


def damage() -> None:
    """Flip a bit in the next difference that this process receives, where it lies before it is applied."""
    real = encoding.apply

    def apply(change: encoding.MessageDifference, target: torch.Tensor) -> None:
        if change.bytes_.numel():
            encoding.apply = real
            change.bytes_[0] ^= 1  # of a value
        real(change, target)

    encoding.apply = apply


def die_after(num_messages: int) -> None:
    """Kill this process when it is to start another message after so many."""
    real, started = ConnectedGroup.start, itertools.count()

    def start(self: ConnectedGroup, messages: Sequence[GroupMessage], works: list[Any]) -> str:
        if next(started) == num_messages:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, messages, works)

    ConnectedGroup.start = start  # type: ignore[method-assign]


def lose_message(number: int) -> None:
    """Never start the message with this number, counted from 0, nor wait for another one: nobody hears of it."""
    real, started = ConnectedGroup.start, itertools.count()

    def start(self: ConnectedGroup, messages: Sequence[GroupMessage], works: list[Any]) -> str:
        if next(started) == number:
            ConnectedGroup.start = real  # type: ignore[method-assign]
            (message,) = messages
            messages = [message._replace(tag=message.tag + (1 << 19))]  # which is nobody's
        return real(self, messages, works)

    ConnectedGroup.start = start  # type: ignore[method-assign]


def forge_header(**fields: int) -> None:
    """Have the first header of what this process sends next say something else."""
    real = differences.DifferenceHeader

    def made(*values: int) -> differences.DifferenceHeader:
        differences.DifferenceHeader = real  # type: ignore[misc]
        return real(*values)._replace(**fields)

    differences.DifferenceHeader = made  # type: ignore[assignment, misc]


HARMS: dict[str, Callable[..., None]] = {
    harm.__name__: harm for harm in (damage, die_after, lose_message, forge_header)
}
