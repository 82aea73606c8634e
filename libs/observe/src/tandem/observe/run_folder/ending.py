"""The end of a run: an event in its journal; a killed run has none.

Reports, diagnoses and the page read it there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

from tandem.observe.run_folder.journal_file import is_taken

Outcome: TypeAlias = Literal["finished", "interrupted", "failed"]
"""Ways in which a run can end."""
State: TypeAlias = Literal["running", "finished", "failed", "interrupted", "ended"]
"""State of a run: ``ended`` if the end is unknown, because the coordinator was killed."""
ENDED = re.compile(r"the run (?P<outcome>finished|was interrupted|failed)( \((?P<kind>\w+)\): (?P<why>.*))?", re.DOTALL)
"""Pattern of the event; a failure has the class and text of its error."""
SAID: dict[Outcome, str] = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}


def outcome_in(line: str) -> Outcome | None:
    """Return how the run ended according to an event; None if the event is about something else."""
    match = ENDED.fullmatch(line)
    return None if match is None else next(outcome for outcome, words in SAID.items() if words == match["outcome"])


def state_of(folder: Path, newest_event: str) -> State:
    """Return the state of the run in a folder, by its newest event since it was last started."""
    return outcome_in(newest_event) or ("running" if is_taken(folder) else "ended")
