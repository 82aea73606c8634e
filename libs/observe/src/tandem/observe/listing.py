"""The runs below a folder: where they are, what they have reached, and a user's notes of them.

No process of a run reads or writes ``notes.json``, so it may change while the run goes on.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.common.errors import ConfigError, RunFolderError, TandemError, nearest
from tandem.common.files import replace_file
from tandem.config import differing
from tandem.config.dump import flatten
from tandem.config.schema.declarations import ALGORITHMS
from tandem.observe.lines import clock
from tandem.observe.run_folder.journal import JournalReader, State, read_journal, state_of
from tandem.observe.run_folder.journal_file import JOURNAL_NAME, damage, require_journal
from tandem.observe.run_folder.live import read_live

OF_EVERY_RUN = ("logger.log_dir", "checkpointing.checkpoint_dir", "logger.tensorboard.log_dir")
"""Keys that differ between any two runs, and mean nothing."""
_NEVER_RUNS = ("checkpoints", "evaluation", "samples", "logs", "keys", "tensorboard")
"""Folders within a run's that hold no run, and may hold many files."""
_TRIALS, _TABLE_OF_TRIALS = "trials", "trials.jsonl"
"""Folder of the trials of a bisection, and the file that lies next to it."""
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


class RunScore(msgspec.Struct, frozen=True, kw_only=True):
    """The course of the metric that ranks a run's checkpoints (``checkpointing.metric_name``)."""

    metric: str
    last: float
    best: float
    best_step: int
    higher_is_better: bool


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    folder: str
    run_id: str = ""
    algorithm: str = ""
    model: str = ""
    state: State | None = None
    """None if the journal cannot be read; `problem` says why."""
    step: int = 0
    """Newest step that is done."""
    num_steps: int | None = None
    """Steps that the run is to make; None if they are not known."""
    score: RunScore | None = None
    reward: float | None = None
    """Mean reward of the newest step, of algorithms that generate."""
    loss: float | None = None
    seconds: float = 0.0
    """Seconds of all steps together."""
    created_at: float = 0.0
    """Unix time."""
    updated_at: float = 0.0
    """Unix time of the newest step."""
    tags: tuple[str, ...] = ()
    note: str = ""
    problem: str = ""


class RunEntry(msgspec.Struct, frozen=True):
    """A run, and its configuration as its journal has it, of whichever release."""

    row: ListedRun
    config: dict[str, Any]


def run_folders(roots: Sequence[Path]) -> list[Path]:
    """Return the folders with a journal at or below some folders, in the order of their names; links are not followed.

    Raises `RunFolderError` if one of the folders does not exist.
    """
    folders: dict[Path, None] = {}
    for root in roots:
        if not root.is_dir():
            near = [str(path) for path in root.absolute().parent.glob("*") if path.is_dir()]
            raise RunFolderError(f"there is no folder {root}{nearest(str(root.absolute()), near)}")
        folders |= dict.fromkeys(_below(root))
    return [*folders]


def _below(root: Path) -> Iterator[Path]:
    for place, names, files in os.walk(root):
        is_run = JOURNAL_NAME in files
        if is_run:
            yield Path(place)
        if _TABLE_OF_TRIALS in files and _TRIALS in names:
            names.remove(_TRIALS)
        names[:] = sorted(n for n in names if not n.startswith(".") and not (is_run and n in _NEVER_RUNS))


def read_run(folder: Path) -> RunEntry:
    """Read a run from its folder; one that cannot be read has a row that says so."""
    try:
        notes = read_notes(folder)
        with read_journal(folder, checks_pages=False) as journal:
            return _entry(folder, journal, notes.tags, notes.note)
    except TandemError as error:
        return RunEntry(ListedRun(folder=str(folder), problem=str(error)), {})


def _entry(folder: Path, journal: JournalReader, tags: tuple[str, ...], note: str) -> RunEntry:
    with damage(folder):
        config = msgspec.json.decode(journal.config_json, type=dict[str, Any])
    algorithm, live = journal.run.algorithm, read_live(folder)
    planned = (config.get(algorithm) or {}).get("max_num_steps") if live is None else live.num_steps
    seconds, updated_at = journal.rows(
        "SELECT coalesce(sum(seconds), 0), coalesce(max(committed_at), 0) FROM steps JOIN seconds ON step_id = id "
        "WHERE superseded_at IS NULL AND phase = 'total'"
    )[0]
    row = ListedRun(
        folder=str(folder),
        run_id=journal.run_id,
        algorithm=algorithm,
        model=str(config.get("policy", {}).get("model_name", "")),
        state=state_of(folder, journal.last_event()),
        step=journal.last_step() or 0,
        num_steps=planned,
        score=_score(journal, config.get("checkpointing", {})),
        reward=_last(curve_of(journal, "reward")),
        loss=_last(curve_of(journal, "loss")),
        seconds=float(seconds),
        created_at=journal.run.created_at,
        updated_at=float(updated_at),
        tags=tags,
        note=note,
    )
    other_sections = ALGORITHMS.keys() - {algorithm}
    return RunEntry(row, {section: value for section, value in config.items() if section not in other_sections})


def curve_of(journal: JournalReader, metric: str) -> list[tuple[int, float]]:
    """Return the values of a metric by step; those that are no finite number are left out."""
    rows = journal.rows(
        "SELECT step, value FROM steps JOIN metrics ON step_id = id "
        "WHERE superseded_at IS NULL AND name = ? AND value IS NOT NULL ORDER BY step",
        (metric,),
    )
    return [(int(step), float(value)) for step, value in rows if math.isfinite(value)]


def _score(journal: JournalReader, checkpointing: dict[str, Any]) -> RunScore | None:
    metric, higher = str(checkpointing.get("metric_name", "")), bool(checkpointing.get("higher_is_better", True))
    points = curve_of(journal, metric)
    if not points:
        return None
    sign = 1 if higher else -1
    step, best = max(points, key=lambda point: (sign * point[1], -point[0]))
    return RunScore(metric=metric, last=points[-1][1], best=best, best_step=step, higher_is_better=higher)


def _last(points: Sequence[tuple[int, float]]) -> float | None:
    return points[-1][1] if points else None


def matching(entries: Sequence[RunEntry], tags: Iterable[str], terms: Iterable[str]) -> list[RunEntry]:
    """Return the runs that have all of the tags, and match all search terms.

    A term ``key=value`` is a setting; any other one is looked for in folder, name, algorithm, model, state, note and
    tags, whatever its case. Raises `ConfigError` for a tag or a key that no run has.
    """
    problems: list[str] = []
    known_tags = {tag for entry in entries for tag in entry.row.tags}
    leaves = [_settings(entry.config) for entry in entries]
    keys = {key for settings in leaves for key in settings}
    for tag in tags:
        if tag not in known_tags:
            problems.append(f"--tag: no run has the tag {tag!r}{nearest(tag, known_tags)}")
    for term in terms:
        key, is_setting, _ = term.partition("=")
        if is_setting and key not in keys:
            problems.append(f"--search: {key}: no run has this key{nearest(key, keys)}")
    if problems:
        raise ConfigError(*problems)
    selected = []
    for entry, settings in zip(entries, leaves, strict=True):
        if {*tags} <= {*entry.row.tags} and all(_matches(entry.row, settings, term) for term in terms):
            selected.append(entry)
    return selected


def _matches(row: ListedRun, settings: dict[str, str], term: str) -> bool:
    key, is_setting, value = term.partition("=")
    if is_setting:
        return settings.get(key) == value
    texts = (row.folder, row.run_id, row.algorithm, row.model, row.state or row.problem, row.note, *row.tags)
    return any(term.lower() in text.lower() for text in texts)


def differences(entries: Sequence[RunEntry]) -> dict[str, dict[str, list[str]]]:
    """Return the keys in which configurations differ: for each value, as in YAML, the folders of the runs."""
    readable = [entry for entry in entries if entry.config]
    keys = dict.fromkeys(key for entry in readable[1:] for key in differing(readable[0].config, entry.config))
    tables: dict[str, dict[str, list[str]]] = {key: {} for key in keys if key not in OF_EVERY_RUN}
    for entry in readable:
        settings = _settings(entry.config)
        for key, runs in tables.items():
            runs.setdefault(settings.get(key, "-"), []).append(entry.row.folder)
    return tables


def _settings(config: dict[str, Any]) -> dict[str, str]:
    """Return the settings of a configuration as texts, by key."""
    return {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in flatten(config).items()
    }


_WIDTH = 200
"""Width of a table, in columns, where the output is not a terminal."""
_NONE = "-"


def print_runs(rows: Sequence[ListedRun], console: Console) -> None:
    """Print a table with a row for each run, and the problem of each that cannot be read."""
    readable = [row for row in rows if row.state is not None]
    table = new_table(console)
    table.add_column("run", overflow="fold")
    for name in ("state", "algorithm"):
        table.add_column(name, no_wrap=True)
    add_results(table, readable)
    table.add_column("begun", no_wrap=True)
    has_tags, has_notes = any(row.tags for row in readable), any(row.note for row in readable)
    for name in ["tags"] * has_tags + ["note"] * has_notes:
        table.add_column(name, overflow="fold")
    for row in readable:
        begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created_at))
        cells = [row.folder, row.state or "", row.algorithm, *results_of(row, readable), begun]
        cells += [" ".join(row.tags)] * has_tags + [row.note] * has_notes
        table.add_row(*map(Text, cells))
    if readable:
        console.print(table)
    for row in rows:
        if row.state is None:
            console.print(Text(f"{row.folder}: {row.problem}"), soft_wrap=True)


def print_combinations(keys: Sequence[str], rows: Mapping[tuple[str, ...], ListedRun], console: Console) -> None:
    """Print the table of a sweep: a row for each combination of the values of some keys."""
    runs = [*rows.values()]
    table = new_table(console)
    for key in keys:
        table.add_column(key, no_wrap=True)
    table.add_column("state", no_wrap=True)
    add_results(table, runs)
    table.add_column("run", overflow="fold")
    for values, row in rows.items():
        table.add_row(*map(Text, [*values, row.state or "not begun", *results_of(row, runs), row.folder]))
    console.print(table)


def describe_progress(row: ListedRun) -> str:
    """Return how far a run is, on one line."""
    steps = f"step {row.step}" if row.num_steps is None else f"step {row.step}/{row.num_steps}"
    score = [] if row.score is None else [f"{row.score.metric} {row.score.last:.4g} (best {format_best(row.score)})"]
    measures = [f"{name} {value:.4g}" for name in _choose_measure([row]) if (value := getattr(row, name)) is not None]
    return ", ".join([steps, *score, *measures, clock(row.seconds)])


def new_table(console: Console) -> Table:
    """Return an empty table, and give the console room for one where it is no terminal."""
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    return Table(box=None, header_style="bold", padding=(0, 2, 0, 0))


def add_results(table: Table, rows: Sequence[ListedRun]) -> None:
    """Add the columns of what runs have reached."""
    table.add_column("steps", justify="right", no_wrap=True)
    metrics = dict.fromkeys(row.score.metric for row in rows if row.score is not None)
    for metric in metrics:
        table.add_column(metric, justify="right", no_wrap=True)
        table.add_column("best", justify="right", no_wrap=True)
    for name in _choose_measure(rows):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)


def results_of(row: ListedRun, rows: Sequence[ListedRun]) -> list[str]:
    """Return the cells of `add_results` for one of the rows."""
    cells = [str(row.step) if row.num_steps is None else f"{row.step}/{row.num_steps}"]
    for metric in dict.fromkeys(each.score.metric for each in rows if each.score is not None):
        score = row.score if row.score is not None and row.score.metric == metric else None
        cells += [_NONE, _NONE] if score is None else [f"{score.last:.4g}", format_best(score)]
    cells += [_number(getattr(row, name)) for name in _choose_measure(rows)]
    return [*cells, clock(row.seconds) if row.seconds else _NONE]


def format_best(score: RunScore) -> str:
    """Return the best value of a metric, with its step."""
    return f"{score.best:.4g} @{score.best_step}"


def format_differences(tables: Mapping[str, Mapping[str, Iterable[str]]]) -> list[str]:
    """Return lines about the keys in which configurations differ."""
    lines = []
    for key, runs in tables.items():
        lines.append(key)
        width = max(map(len, runs))
        lines += [f"  {value:<{width}}  {', '.join(folders)}" for value, folders in runs.items()]
    return lines


def _choose_measure(rows: Sequence[ListedRun]) -> list[str]:
    """Return what the table shows beside the score: the reward, or the loss where there are no rewards."""
    return [name for name in ("reward", "loss") if any(getattr(row, name) is not None for row in rows)][:1]


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"
