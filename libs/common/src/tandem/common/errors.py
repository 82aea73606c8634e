"""Every error that Tandem raises on purpose.

The tree::

    TandemError
    |-- ConfigError            bad configuration: names the file, the key path, the value, the valid choices
    |   `-- NotSupportedYet    a NeMo-RL key that is known, and switched on, but not built
    |-- DataError              a dataset, problem or prompt that cannot be used
    |-- RunFolderError         a run folder that is taken, missing or from another configuration
    |-- WireError              a frame or message that breaks the protocol, or says what cannot be
    |   `-- VersionMismatch    two processes speak different protocol versions
    |-- ServiceError           a process failed; names the process and the phase
    |   |-- ServiceLost        it died, or was silent for longer than the heartbeat timeout
    |   |-- CommandFailed      it answered a command with an error
    |   |-- DeadlineExceeded   it did not answer in time
    |   |-- Standstill         nothing is asked of any process, and the run is not over
    |   `-- SamplingExhausted  dynamic sampling found too few prompt groups to learn from
    |-- ModelError             a checkpoint folder that cannot be loaded
    |-- CheckpointError        a checkpoint that could not be written or read
    |   `-- DamagedCheckpoint  its files are not what was written; another one may be whole
    |-- TrainingError          a loss that is none
    |   `-- NotFiniteError     an optimizer step whose loss or gradient is not a finite number
    |-- SamplesError           samples that are no longer where they should be, or have no room
    |-- RewardError            an environment returned something that is no reward
    |-- HelperLost             what a process has started to help it was killed from outside, again and again
    `-- RefitError             weights could not be moved whole
        `-- CoverageError      a transfer plan that would not write each wanted element exactly once

A user sees the message of a `TandemError` on one line and no traceback. Anything else that escapes is a bug and
keeps its traceback; a broken invariant of ours is an `assert`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TandemError(Exception):
    """The root of the tree above."""

    is_final: bool = True
    """Whether a run that it has ended would meet it again: the user is to change something."""


class ConfigError(TandemError):
    """The configuration cannot be run as it stands. Its message is the first of its problems."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        """Everything that is wrong with it, a line each."""
        super().__init__(problems[0])


class NotSupportedYet(ConfigError):
    """A key is known to the schema but what it switches on is not built."""


class DataError(TandemError):
    """A dataset, a problem or a prompt cannot be used."""


class RunFolderError(TandemError):
    """The run folder is taken, missing, or belongs to another configuration."""


class WireError(TandemError):
    """What arrived is no message of the protocol, or says what cannot be; the text begins with the message or field."""

    def __init__(self, what: str, command_id: int | None = None) -> None:
        self.command_id = command_id
        """The order that it is, or answers, where that could still be read."""
        super().__init__(what)


class VersionMismatch(WireError):
    """The two ends speak different versions of the protocol."""

    def __init__(self, theirs: int, ours: int, who: str) -> None:
        self.theirs = theirs
        self.ours = ours
        super().__init__(
            f"{who} speaks protocol version {theirs}, this coordinator speaks {ours}: install the same release on both"
        )


class NotAdmitted(TandemError):
    """The run that a process would join has no place for it, or nobody answers there."""


class ServiceError(TandemError):
    """A process of the run failed."""

    def __init__(self, process: str, phase: str, what: str) -> None:
        self.process = process
        self.phase = phase
        self.what = what
        super().__init__(f"{process} failed while {phase}: {what}")


class ServiceLost(ServiceError):
    """A process died or fell silent."""

    is_final = False


class Standstill(ServiceError):
    """Nothing is asked of any process, and the run is not over."""

    is_final = False


class CommandFailed(ServiceError):
    """A process answered a command with an error."""

    def __init__(self, process: str, phase: str, what: str, *, is_its_own: bool = False) -> None:
        """`is_its_own`: the reason lies in the process, and another in its place may do better."""
        super().__init__(process, phase, what)
        self.is_final = not is_its_own


class DeadlineExceeded(ServiceError):
    """A process did not answer a command before its deadline."""

    is_final = False


class SamplingExhausted(ServiceError):
    """Dynamic sampling has generated all that it may, and too few prompt groups teach something."""


class ModelError(TandemError):
    """A model folder cannot be loaded."""


class CheckpointError(TandemError):
    """A checkpoint could not be written or read."""


class DamagedCheckpoint(CheckpointError):
    """The files of a checkpoint are not what was written, or are those of another one."""

    whole: int | None = None
    """The step of the newest checkpoint of the run that is whole, from which it can be resumed; None if there is none.
    Whoever knows the other checkpoints says so."""
    config_file: str = ""
    """Of the run that it is a checkpoint of, where that is not the one that was asked for."""


class TrainingError(TandemError):
    """A loss is none, or an optimizer step was not taken."""


class NotFiniteError(TrainingError):
    """The loss or its gradient is not a finite number; the optimizer step was not taken."""


class SamplesError(TandemError):
    """Samples cannot be kept, or are not there any more."""


class RewardError(TandemError):
    """An environment returned something that is not a finite reward."""


class HelperLost(TandemError):
    """What a process has started to help it was killed from outside, again and again: another may have more luck."""

    is_final = False


class RefitError(TandemError):
    """Weights could not be moved whole from trainer to engine."""


class CoverageError(RefitError):
    """A transfer plan would leave a wanted element unwritten, or write it twice."""


def listed(things: Iterable[object]) -> str:
    """Return ``a, b and c`` for several things, of which there is at least one."""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the choice nearest to `word`, or an empty string if none is near."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
