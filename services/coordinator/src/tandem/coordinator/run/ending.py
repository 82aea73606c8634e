"""How a run ended: a line among the events of its journal, which those who look back read again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from tandem.common.errors import RunFolderError, TandemError
from tandem.coordinator.run.journal import Journal
from tandem.coordinator.scheduler.events import Finish

ENDED = re.compile(r"the run (?P<outcome>finished|was interrupted|failed)( \((?P<kind>\w+)\): (?P<why>.*))?", re.DOTALL)
"""What the line looks like: a failure has the class of its error, and what that says."""
_SAID = {"finished": "the run finished", "interrupted": "the run was interrupted", "failed": "the run failed"}


def recorded(journal: Journal, carry_out: Callable[[], Finish]) -> Finish:
    """Carry out a run; write to its journal how that ended, also where it ends with a `TandemError`."""
    try:
        finish = carry_out()
    except TandemError as error:
        _record(journal, Finish(outcome="failed"), error)
        raise
    _record(journal, finish, finish.error)
    return finish


def _record(journal: Journal, finish: Finish, error: TandemError | None) -> None:
    why = f" ({type(error).__name__}): {error}" if error is not None else ""
    with contextlib.suppress(RunFolderError):  # of a disk that is full: that is what the run failed of
        journal.record_event("coordinator", f"{_SAID[finish.outcome]}{why}")
