"""The end of a run: an event in its journal; a killed run has none.

Reports, diagnoses and the page read it there.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["finished", "interrupted", "failed"]
"""Ways in which a run can end."""
ENDED = re.compile(r"the run (?P<outcome>finished|was interrupted|failed)( \((?P<kind>\w+)\): (?P<why>.*))?", re.DOTALL)
"""Pattern of the event; a failure has the class and text of its error."""
SAID: dict[Outcome, str] = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}


def outcome_in(line: str) -> Outcome | None:
    """Return how the run ended according to an event; None if the event is about something else."""
    found = ENDED.fullmatch(line)
    return None if found is None else next(outcome for outcome, said in SAID.items() if said == found["outcome"])
