"""``notes.json``: a user's note and tags of a run, in its folder.

No process of a run reads or writes it, so it may change while the run goes on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import ConfigError, RunFolderError, nearest
from tandem.common.files import replace_file
from tandem.observe.run_folder.journal_file import require_journal

NOTES_NAME = "notes.json"
_TAG = re.compile(r"[^\s,=]{1,60}")
_MOST_CHARACTERS = 10_000
"""Length of a note."""


class RunNotes(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file."""

    note: str = ""
    tags: tuple[str, ...] = ()
    """In the order in which they were added."""


def read_notes(folder: Path) -> RunNotes:
    """Return the notes of a run; empty ones if there is no file. Raises `RunFolderError` if it is unreadable."""
    path = folder / NOTES_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunNotes)
    except FileNotFoundError:
        return RunNotes()
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error


def change_notes(
    folders: Sequence[Path], note: str | None, tags: Collection[str], untags: Collection[str]
) -> list[RunNotes]:
    """Change the notes of runs, and return them; a `note` of None stays as it is. Nothing is written in case of errors.

    Raises:
        ConfigError: a tag is not one word, a note is too long, or no run has a tag that is to be removed.
        RunFolderError: there is no run in a folder, or it cannot be written.

    """
    for folder in folders:
        require_journal(folder)
    earlier = [read_notes(folder) for folder in folders]
    known_tags = {tag for notes in earlier for tag in notes.tags}
    problems = [f"--tag: {tag!r} is not a word of at most 60 characters" for tag in tags if not _TAG.fullmatch(tag)]
    for tag in untags:
        if tag not in known_tags:
            has = f"; there is {', '.join(sorted(known_tags))}" if known_tags else ""
            problems.append(f"--untag: no such run has the tag {tag!r}{nearest(tag, known_tags) or has}")
    if note is not None and len(note) > _MOST_CHARACTERS:
        problems.append(f"--text: a note of {len(note):,} characters is longer than {_MOST_CHARACTERS:,}")
    if problems:
        raise ConfigError(*problems)
    return [
        _write(
            folder,
            RunNotes(
                note=notes.note if note is None else note,
                tags=tuple(tag for tag in dict.fromkeys([*notes.tags, *tags]) if tag not in untags),
            ),
        )
        for folder, notes in zip(folders, earlier, strict=True)
    ]


def _write(folder: Path, notes: RunNotes) -> RunNotes:
    path = folder / NOTES_NAME
    try:
        replace_file(path, msgspec.json.format(msgspec.json.encode(notes)))
    except OSError as error:
        raise RunFolderError(f"cannot write {path}: {error.strerror}") from error
    return notes
