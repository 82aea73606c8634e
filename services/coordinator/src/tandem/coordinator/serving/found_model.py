"""Find the model in a folder: one of Hugging Face's, a checkpoint, or a run with checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tandem.common.errors import CheckpointError, ModelError, RunFolderError, nearest
from tandem.coordinator.run.checkpoints import CheckpointFolder
from tandem.coordinator.run.journal import read_journal
from tandem.coordinator.run.journal_file import JOURNAL_NAME
from tandem.coordinator.run.replay import checkpoints_of, config_of

_POLICY = "policy"
_ANY_STEP = 2**62
_MAX_LISTED = 5


class FoundModel(msgspec.Struct, frozen=True):
    """A model, and what to call it."""

    folder: Path
    name: str


def find_model(folder: Path) -> FoundModel:
    """Return the model in a folder, of several the newest. Raises `TandemError` if there is none."""
    if (folder / "config.json").is_file():
        path = folder.resolve()
        is_policy = path.name == _POLICY and path.parent.name.startswith("step_")
        return FoundModel(folder, path.parent.name if is_policy else path.name)
    if (folder / _POLICY / "config.json").is_file():
        return FoundModel(folder / _POLICY, folder.resolve().name)
    if (folder / JOURNAL_NAME).is_file():
        return _of_run(folder)
    if (newest := _newest(_checkpoints(folder))) is not None:
        return newest
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such folder{_hint(folder)}")
    raise ModelError(
        f"{folder} holds no model: no config.json, no checkpoint's policy/, no checkpoint step_N and no "
        f"{JOURNAL_NAME} of a run{_hint(folder)}"
    )


def _of_run(run: Path) -> FoundModel:
    with read_journal(run) as journal:
        config = config_of(journal)
    found = _newest(checkpoints_of(run, config))
    if found is None:
        when = f"every {config.checkpointing.save_period} steps" if config.checkpointing.enabled else "never"
        raise RunFolderError(
            f"{run} has no checkpoint: the run saves {when} (checkpointing.enabled, checkpointing.save_period)"
        )
    return msgspec.structs.replace(found, name=f"{run.resolve().name}-{found.name}")


def _newest(checkpoints: CheckpointFolder) -> FoundModel | None:
    newest = checkpoints.newest(up_to=_ANY_STEP)
    if newest is None:
        return None
    _, folder = newest
    if not (folder / _POLICY / "config.json").is_file():
        raise CheckpointError(f"{folder} is not whole: it has no {_POLICY}/config.json; name another checkpoint")
    return FoundModel(folder / _POLICY, folder.name)


def _checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder, keep_top_k=None, higher_is_better=True)


def _hint(folder: Path) -> str:
    """Say which folders there are that have a model, and which of them is meant."""
    inside = sorted(map(str, _models_in(folder)))
    if inside:
        return f"; in it {', '.join(inside[:_MAX_LISTED])} {'does' if len(inside) == 1 else 'do'}"
    return nearest(str(folder), map(str, _models_in(folder.parent)))


def _models_in(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in folder.iterdir():
            marks = (path / "config.json", path / _POLICY / "config.json", path / JOURNAL_NAME)
            if any(mark.is_file() for mark in marks):
                yield path
