"""How a run ended: a line among the events of its journal alone; one that was killed has none.

Reports and diagnoses read it there, and so does the page.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["finished", "interrupted", "failed"]
"""How a run ended."""
ENDED = re.compile(r"the run (?P<outcome>finished|was interrupted|failed)( \((?P<kind>\w+)\): (?P<why>.*))?", re.DOTALL)
"""What the line looks like: a failure has the class of its error, and what that says."""
SAID: dict[Outcome, str] = {"finished": "finished", "interrupted": "was interrupted", "failed": "failed"}


def outcome_in(line: str) -> Outcome | None:
    """Return how the run ended by a line of its journal; None if that is about something else."""
    found = ENDED.fullmatch(line)
    return None if found is None else next(outcome for outcome, said in SAID.items() if said == found["outcome"])
