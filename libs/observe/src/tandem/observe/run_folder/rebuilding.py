"""The rebuilding of a damaged journal from what a run's folder has beside it: checkpoints and curves.

The newest checkpoint has the run's name and configuration, and the curves are a copy of the steps' metrics. What is
lost are events, refits, and what an earlier resume superseded.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np

from tandem.common.errors import DamagedCheckpoint, DamagedJournal, RunFolderError
from tandem.config import Config, config_from_json, config_to_json
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.observe.run_folder.curves import CURVES_NAME, SECONDS, read_curves
from tandem.observe.run_folder.journal import StepRecord, read_journal
from tandem.observe.run_folder.journal_file import JOURNAL_NAME, new_run_id
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples import manifest

_ASIDE = f"{JOURNAL_NAME}.damaged"
_COORDINATORS = 1000
"""Coordinators that the damaged journal is taken to have had: numbers of their commands are not used again."""


def damage_of(run: Path) -> DamagedJournal | None:
    """Return why the journal in a run's folder cannot be used, if it is damaged."""
    try:
        with read_journal(run) as journal:
            _ = journal.config_json, journal.steps(), journal.refits()
    except DamagedJournal as error:
        return error
    except RunFolderError:  # there is none, or it is of another release
        if (run / CURVES_NAME).exists() and not (run / JOURNAL_NAME).exists():
            return DamagedJournal(f"{run / JOURNAL_NAME} is gone")
    return None


def rebuild_journal(run: Path, config: Config) -> str:
    """Set a run's damaged journal aside and write it again; return a line about where the run goes on.

    `config` names the folder of checkpoints. Without a checkpoint it is the configuration, and the run begins anew.
    Raises `RunFolderError` if the journal cannot be written.
    """
    checkpoints = CheckpointFolder(Path(config.checkpointing.checkpoint_dir), keep_top_k=None, higher_is_better=True)
    records = _records(checkpoints)
    newest, run_id = (records[-1], "") if records else (None, new_run_id())
    if newest is not None:
        checkpoint_manifest = manifest.read(checkpoints.folder_of(newest.step))
        run_id = new_run_id() if checkpoint_manifest is None else checkpoint_manifest.run_id
        config = config_from_json(newest.config_json.encode())
    is_there = (run / JOURNAL_NAME).exists()
    aside = _set_aside(run)
    about_old = f"it is kept as {aside.name}, and " if is_there else ""
    with contextlib.closing(Journal.create(run, config_to_json(config), config.algorithm, run_id)) as journal:
        journal.skip_coordinators(_COORDINATORS * len([*run.glob(f"{_ASIDE}*")]))
        if newest is None:
            return f"{about_old}as there is no checkpoint, the run begins with its first step"
        steps = {record.step: record for record in _of_curves(run, newest.step)}
        for record in records:
            metrics = {} if record.metric is None else {record.metric_name: record.metric}
            step = StepRecord(step=record.step, version=record.version, metrics=metrics, seconds={})
            steps.setdefault(record.step, step)
        for _, step in sorted(steps.items()):
            journal.commit_step(step, committed_at=step.committed_at or None)
        for record in records:
            journal.record_checkpoint(record.step, str(checkpoints.folder_of(record.step)))
    return f"{about_old}the run goes on from the checkpoint of step {newest.step}"


def _records(checkpoints: CheckpointFolder) -> list[CheckpointRecord]:
    """Return the records of the checkpoints that have one, in the order of their steps."""
    records = []
    for step in checkpoints.steps():
        with contextlib.suppress(DamagedCheckpoint):
            records.append(checkpoints.read_record(step))
    return records


def _set_aside(run: Path) -> Path:
    """Rename the damaged journal, and the file that SQLite may have left beside it.

    One that is gone leaves an empty file, so that it counts.
    """
    number = next(n for n in range(1, 10_000) if not (run / f"{_ASIDE}.{n}").exists())
    aside = run / f"{_ASIDE}.{number}"
    try:
        if (run / JOURNAL_NAME).exists():
            (run / JOURNAL_NAME).rename(aside)
        else:
            aside.touch()
        with contextlib.suppress(FileNotFoundError):
            (run / f"{JOURNAL_NAME}-journal").rename(f"{aside}-journal")
    except OSError as error:
        raise RunFolderError(f"cannot set {run / JOURNAL_NAME} aside: {error.strerror}") from error
    return aside


def _of_curves(run: Path, last: int) -> list[StepRecord]:
    """Return the steps that the curves have, up to one of them."""
    table = read_curves(run)
    if table is None:
        return []
    steps, committed_at = table.steps_up_to(last)
    rows = table.rows_of(steps, committed_at)
    columns = table.columns(table.names, rows)
    records = []
    for place, (step, at) in enumerate(zip(steps.tolist(), committed_at.tolist(), strict=True)):
        values = {name: float(numbers[place]) for name, (numbers, is_there) in columns.items() if is_there[place]}
        records.append(
            StepRecord(
                step=step,
                version=step,
                metrics={name: value for name, value in values.items() if not name.startswith(SECONDS)},
                seconds={
                    name.removeprefix(SECONDS): value
                    for name, value in values.items()
                    if name.startswith(SECONDS) and np.isfinite(value)
                },
                committed_at=at,
            )
        )
    return records
