"""``coordinator runs`` and ``note``: a table of all runs below a folder, and the notes that it shows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import OK, RunFolderError
from tandem.coordinator.commands.arguments import Commands

if TYPE_CHECKING:
    from tandem.observe.listing import RunEntry

_ORDERS = ("begun", "name", "score", "time")
_MOST_VIEWED = 8
"""Runs that the last line offers to look at: more curves on one chart cannot be told apart."""


def add_runs(commands: Commands) -> None:
    """Declare ``runs``."""
    runs = commands.add_parser("runs", help="list all runs below a folder: results, notes, tags, differences")
    runs.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="where to look for runs (default: results, or else .)"
    )
    runs.add_argument("--tag", action="append", default=[], metavar="TAG", help="only runs with this tag")
    runs.add_argument(
        "--search",
        action="append",
        default=[],
        metavar="TEXT",
        help="only runs with this text in their folder, model, state, note or tags; or KEY=VALUE, with this setting",
    )
    runs.add_argument("--differences", action="store_true", help="also the keys in which configurations differ")
    runs.add_argument(
        "--sort", choices=_ORDERS, default="begun", help="order of the rows, the best last (default: begun)"
    )
    runs.add_argument("--json", action="store_true", help="print the runs and their differences as JSON")
    runs.set_defaults(carry_out=_runs)


def _runs(arguments: argparse.Namespace) -> int:
    import shlex

    import msgspec
    from rich.console import Console

    from tandem.observe.listing import differences, format_differences, matching, print_runs, read_run, run_folders

    roots = arguments.folders or [Path("results") if Path("results").is_dir() else Path()]
    entries = matching([*map(read_run, run_folders(roots))], arguments.tag, arguments.search)
    entries.sort(key=lambda entry: _place(entry, arguments.sort))
    rows = [entry.row for entry in entries]
    if arguments.json:
        content = {"runs": rows, "differences": differences(entries)}
        print(msgspec.json.format(msgspec.json.encode(content)).decode())
        return OK
    folders = " ".join(map(str, roots))
    if not rows:
        print(f"no run below {folders}" if not arguments.tag + arguments.search else f"no such run below {folders}")
        return OK
    print_runs(rows, Console(highlight=False))
    if arguments.differences:
        keys = differences(entries)
        print(
            "\n".join(
                ["", "configurations differ in:" if keys else "configurations are equal", *format_differences(keys)]
            )
        )
    readable = [row.folder for row in rows if row.state is not None]
    if 0 < len(readable) <= _MOST_VIEWED:
        print(f"curves: {shlex.join(['coordinator', 'view', *readable])}")
    return OK


def _place(entry: RunEntry, order: str) -> tuple[float, str]:
    """Return a run's place in an order."""
    row = entry.row
    if order == "score":
        score = row.score
        value = float("-inf") if score is None else score.best if score.higher_is_better else -score.best
        return value, row.folder
    return {"name": 0.0, "begun": row.created_at, "time": row.seconds}[order], row.folder


def add_note(commands: Commands) -> None:
    """Declare ``note``."""
    note = commands.add_parser("note", help="write a note and tags to runs, by which `runs` finds them")
    note.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders: logger.log_dir of their configurations"
    )
    note.add_argument("--text", metavar="TEXT", help="note that replaces the one before; '' for none")
    note.add_argument(
        "--tag", action="append", default=[], metavar="TAG", help="tag to add; may be given several times"
    )
    note.add_argument("--untag", action="append", default=[], metavar="TAG", help="tag to remove")
    note.set_defaults(carry_out=_note)


def _note(arguments: argparse.Namespace) -> int:
    from tandem.observe.listing import change_notes

    try:
        changed = change_notes(arguments.runs, arguments.text, arguments.tag, arguments.untag)
    except RunFolderError as error:
        if arguments.text is None and not all(run.exists() for run in arguments.runs[1:]):
            raise RunFolderError(f"{error}; a note is the text after --text") from error
        raise
    for run, notes in zip(arguments.runs, changed, strict=True):
        tags = f"[{' '.join(notes.tags)}] " if notes.tags else ""
        print(f"{run}: {tags}{notes.note}".rstrip())
    return OK
