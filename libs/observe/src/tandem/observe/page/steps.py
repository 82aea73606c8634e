"""The valid steps of a run as arrays, read incrementally.

The journal lists them, but fetching 100,000 of its rows takes half a second on a busy machine. So they are taken from
``curves.f64`` where possible, which a few rows can show. Its only writer appends nothing after a row that it could not
write, and rewrites the file if it was incomplete when the run was resumed. So contiguous rows equal the journal's if
the first and the last do.
"""

from __future__ import annotations

import sqlite3

import numpy as np

from tandem.observe.run_folder.curves_table import CurvesTable, Ids, Numbers

_MOST_COMPARED = 256
"""Steps of the file, from the first to the last, that are compared with the journal."""
_COUNTS = "superseded_at IS NULL"


class PageSteps:
    """All valid steps, in order."""

    def __init__(self) -> None:
        """Begin with none."""
        self._run_id = ""
        self._forget()

    def _forget(self) -> None:
        self.ids: Ids = np.zeros(0, np.int64)
        """Ids in the journal, ascending."""
        self.steps: Ids = np.zeros(0, np.int64)
        self.committed_at: Numbers = np.zeros(0)

    @property
    def newest(self) -> int:
        """Id of the newest step; 0 if there is none."""
        return int(self.ids[-1]) if len(self.ids) else 0

    def update(self, journal: sqlite3.Connection, table: CurvesTable | None) -> bool:
        """Read new steps; return whether they continue the known ones.

        They do not if the run was resumed from an earlier step, or is another; then everything was read again. `table`
        was read before, and helps if nothing is known yet.
        """
        (run_id,) = journal.execute("SELECT run_id FROM run").fetchone()
        goes_on = run_id == self._run_id and self._still_counts(journal)
        if not goes_on:
            self._run_id = run_id
            self._forget()
        if table is not None and not len(self.ids):
            self._take(journal, table)
        query = f"SELECT id, step, committed_at FROM steps WHERE id > ? AND {_COUNTS} ORDER BY id"
        rows = journal.execute(query, (self.newest,)).fetchall()
        if rows:
            ids, steps, committed_at = zip(*rows, strict=True)
            self.ids = np.concatenate([self.ids, np.array(ids, np.int64)])
            self.steps = np.concatenate([self.steps, np.array(steps, np.int64)])
            self.committed_at = np.concatenate([self.committed_at, np.array(committed_at, np.float64)])
        return goes_on

    def _still_counts(self, journal: sqlite3.Connection) -> bool:
        """Return whether the newest step is still valid: a resume that repeats steps invalidates the newest first."""
        query = f"SELECT count(*) FROM steps WHERE id = ? AND {_COUNTS}"
        return not len(self.ids) or bool(journal.execute(query, (self.newest,)).fetchone()[0])

    def _take(self, journal: sqlite3.Connection, table: CurvesTable) -> None:
        """Take the steps of the file, if they are the journal's up to the file's last one."""
        (last,) = journal.execute(f"SELECT max(step) FROM steps WHERE {_COUNTS}").fetchone()
        steps, committed_at = table.steps_up_to(last or 0)
        if not len(steps) or steps[-1] - steps[0] + 1 != len(steps):
            return
        places = np.unique(np.linspace(0, len(steps) - 1, _MOST_COMPARED).round().astype(np.int64))
        compared = dict(zip(steps[places].tolist(), committed_at[places].tolist(), strict=True))
        marks = ",".join("?" * len(compared))
        query = f"SELECT step, committed_at, id FROM steps WHERE {_COUNTS} AND step IN ({marks}) ORDER BY step"
        rows = journal.execute(query, [*compared]).fetchall()
        if {step: at for step, at, _ in rows} != compared:
            return
        newest = rows[-1][2]
        query = "SELECT id FROM steps WHERE superseded_at IS NOT NULL AND id <= ?"
        superseded = [row[0] for row in journal.execute(query, (newest,))]
        ids = np.setdiff1d(np.arange(1, newest + 1), superseded, assume_unique=True)
        if len(ids) == len(steps):
            self.ids, self.steps, self.committed_at = ids, steps, committed_at
