"""The parts of reply rules: requests as they are remembered, and comparisons that raise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tandem.common.errors import WireError
from tandem.common.messages import (
    Generated,
    SampleScored,
)
from tandem.coordinator.processes.sample_limits import Limits
from tandem.observe.exporters.nvml import MEASURED

SHOWN = 100
"""Most characters of a value that an error shows."""


class KnownState(msgspec.Struct):
    """The state of a process as its requests and replies tell it."""

    num_tensors: tuple[int, ...] = ()
    """Numbers of tensors in the layouts of its shards."""
    versions: list[int] = []
    """Versions that it was given, in ascending order."""
    version: int = 0
    """Version that it last reported."""


class Asked(msgspec.Struct, kw_only=True):
    """A request without a complete answer."""

    name: str
    command: Any
    """Request of the type that the reply's rule names."""
    state: KnownState
    limits: Limits
    oldest_version: int
    """Oldest version with which the process may generate for this request."""
    arrived: set[tuple[int, int]] = msgspec.field(default_factory=set)
    """Samples received so far, by group and index."""
    num_tokens: int = 0
    """Number of generated tokens in these samples."""


# --- comparisons -----------------------------------------------------------------------------------------------------


def check_digests(asked: Asked, digests: tuple[bytes, ...]) -> None:
    """Compare the sizes of digests with those of their layouts."""
    sizes = tuple(map(len, digests))
    wanted = tuple(8 * num for num in asked.state.num_tensors)
    if sizes != wanted:
        what = f"{some(wanted)}: 8 for each tensor of a part's layout"
        must(False, "digests", f"{some(sizes)} bytes", what)


def fits(holds: bool, row: int, field: str, sample: SampleScored, what: str, *values: int) -> None:
    """Raise `WireError` unless a condition on a sample's field holds; format the text only then."""
    if not holds:
        must(False, f"samples[{row}].{field}", getattr(sample, field), what.format(*values))


def must(holds: bool, field: str, value: object, what: str) -> None:
    """Raise `WireError` unless a condition on a field holds."""
    if not holds:
        shown = value if isinstance(value, str) else repr(value)
        raise WireError(f"{field}: {shown[:SHOWN]}, must be {what}")


def same(asked: Asked, reply: object, *fields: str) -> None:
    """Compare fields that a reply repeats from its request."""
    for field in fields:
        value, wanted = getattr(reply, field), getattr(asked.command, field)
        must(value == wanted, field, value, f"{wanted}, as in the command")


def finite(metrics: Mapping[str, float]) -> None:
    """Raise `WireError` unless all metrics are finite numbers."""
    for name, value in metrics.items():
        must(math.isfinite(value), f"metrics[{name!r}]", value, "a finite number")


def measured(gpus: Mapping[str, float]) -> None:
    """Raise `WireError` unless GPU readings have known names, since they become metrics, and are finite."""
    all_among("gpus", gpus, {*MEASURED}, f"one of {', '.join(MEASURED)}")
    for name, value in gpus.items():
        must(math.isfinite(value), f"gpus[{name!r}]", value, "a finite number")


def all_among(field: str, names: Iterable[str], among: set[str], what: str = "one of those in the command") -> None:
    """Raise `WireError` unless each name is among those that a field may hold."""
    for name in names:
        must(name in among, field, name, what)


def some(values: Iterable[object]) -> str:
    """Return values on one line of limited length."""
    return ", ".join(map(str, values))[-SHOWN:] or "none"


def check_whole(asked: Asked, reply: Generated, wanted: int) -> None:
    """Raise `WireError` unless all samples of a request were sent, and are counted."""
    must(len(asked.arrived) == wanted, "command_id", reply.command_id, f"of a command whose {wanted} samples were sent")
    must(reply.num_samples == wanted, "num_samples", reply.num_samples, f"{wanted}, as asked for")
