"""Messages between a program and the process of its run, as JSON: the request, and the reports."""

from __future__ import annotations

from typing import Literal

import msgspec

from tandem.common import errors, messages
from tandem.common.errors import ConfigError, DamagedCheckpoint, ServiceError, TandemError

Mode = Literal["new", "resume", "restart"]
_KINDS = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TandemError)}


class RunOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Request to carry out a run."""

    source: str
    """File or name that the configuration was read from."""
    config_json: bytes
    mode: Mode
    from_step: int | None
    reward_server: messages.RewardServer | None


class RunChecked(msgspec.Struct, frozen=True, tag=True):
    """Report that the run was checked, and nothing is wrong with it."""


class RunEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report that the run is over."""

    outcome: Literal["finished", "interrupted", "failed"]
    kind: str = ""
    """Class of the error, if it is one of Tandem's."""
    what: tuple[str, ...] = ()
    """Arguments of that class."""
    whole: int | None = None
    """`DamagedCheckpoint.whole_step` of the error."""


Report = RunChecked | RunEnded


def failure(error: BaseException) -> RunEnded:
    """Describe the error that ended a run."""
    kind = type(error).__name__
    match error:
        case ConfigError():
            return RunEnded(outcome="failed", kind=kind, what=error.problems)
        case ServiceError():
            return RunEnded(outcome="failed", kind=kind, what=(error.process, error.phase, error.what))
        case DamagedCheckpoint():
            return RunEnded(outcome="failed", kind=kind, what=(str(error),), whole=error.whole_step)
        case TandemError():
            return RunEnded(outcome="failed", kind=kind, what=(str(error),))
        case _:  # a bug: the log has the traceback
            return RunEnded(outcome="failed", what=(f"{kind}: {error}",))


def error_of(ended: RunEnded) -> TandemError | None:
    """Return the error that ended a run, None if it did not fail."""
    if ended.outcome != "failed":
        return None
    kind = _KINDS.get(ended.kind, TandemError)
    try:
        error = kind(*ended.what)
    except TypeError:  # a class that takes other arguments
        return TandemError(" ".join(ended.what))
    if isinstance(error, DamagedCheckpoint):
        error.whole_step = ended.whole
    return error
