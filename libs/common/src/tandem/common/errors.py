"""Every error that Tandem raises on purpose, shortages of the system, and the exit codes of commands.

The tree::

    TandemError
    |-- ConfigError            bad configuration: names the file, the key path, the value, the valid choices
    |   `-- NotSupportedYet    a NeMo-RL key that is known, and switched on, but not built
    |-- DataError              a dataset, problem or prompt that cannot be used
    |-- RunFolderError         a run folder that is taken, missing or from another configuration
    |   `-- DamagedJournal     its journal is not what was written
    |-- WireError              a frame or message that is malformed or violates the protocol
    |   `-- VersionMismatch    two processes speak different protocol versions
    |-- ServiceError           a process failed; names the process and the phase
    |   |-- ServiceLost        it died, or was silent for longer than the heartbeat timeout
    |   |-- CommandFailed      it answered a command with an error
    |   |-- DeadlineExceeded   it did not answer in time
    |   |-- Standstill         no request is pending, and the run is not over
    |   `-- SamplingExhausted  dynamic sampling found too few prompt groups to learn from
    |-- ModelError             a checkpoint folder that cannot be loaded
    |-- CheckpointError        a checkpoint that could not be written or read
    |   `-- DamagedCheckpoint  its files are not what was written; another one may be whole
    |-- TrainingError          an invalid loss, or an optimizer step that was not taken
    |   `-- NotFiniteError     an optimizer step with a loss or gradient that is not finite
    |-- SamplesError           samples that are missing, or that there is no room for
    |-- RewardError            an environment returned an invalid reward
    |-- HelperLost             a helper of a process was killed from outside, again and again
    `-- RefitError             weights could not be moved whole
        `-- CoverageError      a transfer plan that would not write each wanted element exactly once

The user sees the message of a `TandemError` on one line, without a traceback. Any other exception that escapes is a
bug and keeps its traceback. A broken internal invariant is an `assert`.
"""

from __future__ import annotations

import difflib
import errno
import re
import sqlite3
from collections.abc import Iterable

OK = 0
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
UNREAD = 141


class TandemError(Exception):
    """The base class of every error in the tree above."""

    is_final: bool = True
    """Whether a restarted run would fail the same way, so that the user has to change something."""


class ConfigError(TandemError):
    """The configuration cannot be run. The message is the first of its problems."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        """All problems of the configuration, one line each."""
        super().__init__(problems[0])


class NotSupportedYet(ConfigError):
    """A key is known to the schema, but the feature that it switches on is not built."""


class DataError(TandemError):
    """A dataset, a problem or a prompt cannot be used."""


class RunFolderError(TandemError):
    """The run folder is taken, missing, or belongs to another configuration."""


class DamagedJournal(RunFolderError):
    """The journal of a run is not what was written."""


class WireError(TandemError):
    """The message is malformed or violates the protocol; the text begins with the name of the message or field."""

    def __init__(self, text: str, command_id: int | None = None) -> None:
        self.command_id = command_id
        """Id of the command that the message is or answers, if it could be read."""
        super().__init__(text)


class VersionMismatch(WireError):
    """The two ends speak different versions of the protocol."""

    def __init__(self, theirs: int, ours: int, who: str) -> None:
        self.theirs = theirs
        self.ours = ours
        super().__init__(
            f"{who} speaks protocol version {theirs}, this coordinator speaks {ours}: install the same release on both"
        )


class NotAdmitted(TandemError):
    """The run has no place for the process, or no coordinator answers at its address."""


class ServiceError(TandemError):
    """A process of the run failed."""

    def __init__(self, process: str, phase: str, problem: str) -> None:
        self.process = process
        self.phase = phase
        self.what = problem
        super().__init__(f"{process} failed while {phase}: {problem}")


class ServiceLost(ServiceError):
    """A process died or fell silent."""

    is_final = False


class Standstill(ServiceError):
    """No request is pending, and the run is not over."""

    is_final = False


class CommandFailed(ServiceError):
    """A process answered a command with an error."""

    def __init__(self, process: str, phase: str, problem: str, *, is_its_own: bool = False) -> None:
        """Set `is_its_own` if the reason lies in the process, so that a replacement may succeed."""
        super().__init__(process, phase, problem)
        self.is_final = not is_its_own


class DeadlineExceeded(ServiceError):
    """A process did not answer a command before its deadline."""

    is_final = False


class SamplingExhausted(ServiceError):
    """Dynamic sampling has reached its limit with too few informative prompt groups."""


class ModelError(TandemError):
    """A model folder cannot be loaded."""


class CheckpointError(TandemError):
    """A checkpoint could not be written or read."""


class DamagedCheckpoint(CheckpointError):
    """The files of a checkpoint are not what was written, or belong to another checkpoint."""

    whole_step: int | None = None
    """Step of the newest whole checkpoint of the run, from which it can be resumed; None if there is none. Set by
    callers that know the run's other checkpoints."""
    config_file: str = ""
    """Configuration file of the checkpoint's run, if that is not the run asked for."""


class TrainingError(TandemError):
    """The loss is invalid, or an optimizer step was not taken."""


class NotFiniteError(TrainingError):
    """The loss or its gradient is not a finite number; the optimizer step was not taken."""


class OutlierError(TrainingError):
    """The loss or its gradient is out of all proportion to those before; the optimizer step was not taken."""


class SamplesError(TandemError):
    """Samples are missing, or there is no room for them."""


class RewardError(TandemError):
    """An environment returned something that is not a finite reward."""


class HelperLost(TandemError):
    """A helper of a process was killed from outside, again and again. Another process may have more luck."""

    is_final = False


class RefitError(TandemError):
    """Weights could not be moved whole from trainer to engine."""


class CoverageError(RefitError):
    """A transfer plan would leave a wanted element unwritten, or write it twice."""


def listed(things: Iterable[object]) -> str:
    """Return ``a, b and c`` for the items of a non-empty iterable."""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the choice nearest to `word`, or an empty string if none is close."""
    return suggest(match) if (match := find_nearest(word, choices)) else ""


def find_nearest(word: str, choices: Iterable[str]) -> str:
    """Return the choice nearest to `word`, or an empty string if none is close."""
    return next(iter(difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)), "")


def suggest(choice: str) -> str:
    """Return the end of an error that asks whether `choice` was meant."""
    return f"; did you mean {choice!r}?"


_LACKING = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
)
_LACKING_SQLITE = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM})
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""How libraries in Rust, such as safetensors, name an error of the system in the text of a bare exception."""


def is_shortage(error: BaseException | None) -> bool:
    """Tell whether an error, or one that it was raised from, is a shortage, which may be over later."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in _LACKING:
            return True
        if isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _LACKING_SQLITE:
            return True
        if (number := _OF_RUST.search(str(error)[:10_000])) is not None and int(number[1]) in _LACKING:
            return True
        error = error.__cause__ or error.__context__
    return False
