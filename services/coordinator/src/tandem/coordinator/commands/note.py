"""``coordinator note``: write a note and tags to runs, for ``coordinator runs``."""

from __future__ import annotations

import argparse
from pathlib import Path

from tandem.common.errors import OK, RunFolderError
from tandem.coordinator.commands.arguments import Commands


def add(commands: Commands) -> None:
    """Declare the command."""
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
    from tandem.observe.listing.runs import change_notes

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
