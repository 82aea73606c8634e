"""How a run ended: a line among the events of its journal alone; one that was killed has none.

Reports and diagnoses read it there, and so does the page.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from tandem.common.errors import RunFolderError, TandemError
from tandem.coordinator.run.journal import Journal
from tandem.coordinator.scheduler.events import Finish, Outcome

ENDED = re.compile(r"the run (?P<outcome>finished|was interrupted|failed)( \((?P<kind>\w+)\): (?P<why>.*))?", re.DOTALL)
"""What the line looks like: a failure has the class of its error, and what that says."""
_SAID: dict[Outcome, str] = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}


def recorded(journal: Journal, carry_out: Callable[[], Finish]) -> Finish:
    """Carry out a run; write to its journal how that ended, also where it ends with a `TandemError`."""
    try:
        finish = carry_out()
    except TandemError as error:
        _record(journal, Finish(outcome="failed"), error)
        raise
    _record(journal, finish, finish.error)
    return finish


def outcome_in(line: str) -> Outcome | None:
    """Return how the run ended by a line of its journal; None if that is about something else."""
    found = ENDED.fullmatch(line)
    return None if found is None else next(outcome for outcome, said in _SAID.items() if said == found["outcome"])


def _record(journal: Journal, finish: Finish, error: TandemError | None) -> None:
    why = f" ({type(error).__name__}): {error}" if error is not None else ""
    with contextlib.suppress(RunFolderError):  # of a disk that is full: that is what the run failed of
        journal.record_event("coordinator", f"the run {_SAID[finish.outcome]}{why}")
