"""Find the models that an evaluation names: folders, checkpoints, runs with their checkpoints."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from tandem.common.config import Config, config_from_json
from tandem.common.errors import ModelError, nearest
from tandem.common.model_fields import model_types
from tandem.coordinator.run.checkpoints import CheckpointFolder
from tandem.coordinator.run.journal import read_journal
from tandem.coordinator.run.journal_file import JOURNAL_NAME

Which: TypeAlias = Literal["newest", "best", "all"]
"""The checkpoints of a run that count."""
_POLICY = "policy"
_CONFIG = "config.json"


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model to evaluate."""

    label: str
    """As it was named."""
    name: str
    """Of its files among the results."""
    folder: Path


def find_models(words: Sequence[str], which: Which) -> list[Model]:
    """Return the models that words on the command line name, each once. Raises `ModelError`."""
    found = [folder for word in words for path in _expanded(word) for folder in _folders_of(path, which)]
    models: dict[Path, Model] = {}
    for label, folder in found:
        _check_kind(folder)
        if folder.resolve() not in models:
            name = _file_name(label, {model.name for model in models.values()})
            models[folder.resolve()] = Model(label=str(label), name=name, folder=folder)
    return [*models.values()]


def _expanded(word: str) -> list[Path]:
    """Return the paths that a word stands for: several, if it is a pattern."""
    path = Path(word)
    if path.exists():
        return [path]
    if glob.has_magic(word) and (paths := sorted(glob.glob(word), key=_by_number)):
        return [Path(each) for each in paths]
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ModelError(f"--model {word}: there is no such folder{nearest(path.name, beside)}")


def _folders_of(path: Path, which: Which) -> Iterator[tuple[Path, Path]]:
    """Yield the models in a folder: each as people call it, and where its files are."""
    if (path / _CONFIG).is_file():
        yield path, path
    elif (path / _POLICY / _CONFIG).is_file():
        yield path, path / _POLICY
    elif (path / JOURNAL_NAME).is_file():
        yield from _of_run(path, which)
    elif steps := CheckpointFolder(path, keep_top_k=None, higher_is_better=True).steps():
        yield from _of_checkpoints(path, path, steps, which, None)
    else:
        inside = [each.name for each in path.iterdir() if each.is_dir()] if path.is_dir() else []
        models = [
            name
            for name in sorted(inside)
            if any((path / name / part).is_file() for part in (_CONFIG, f"{_POLICY}/{_CONFIG}"))
        ]
        hint = f"; did you mean {str(path / models[-1])!r}?" if models else ""
        kind = (
            "a file"
            if path.is_file()
            else f"no model: there is neither a {_CONFIG} in it nor a {JOURNAL_NAME} nor a checkpoint"
        )
        raise ModelError(f"--model {path}: it is {kind}{hint}")


def _of_run(run: Path, which: Which) -> Iterator[tuple[Path, Path]]:
    from tandem.coordinator.run.replay import checkpoints_of, config_of

    with read_journal(run) as journal:
        config = config_of(journal)
    checkpoints = checkpoints_of(run, config)
    steps = checkpoints.steps()
    if not steps:
        raise ModelError(f"--model {run}: the run has no checkpoint (checkpointing.checkpoint_dir)")
    yield from _of_checkpoints(run, checkpoints.folder_of(steps[0]).parent, steps, which, config)


def _of_checkpoints(
    path: Path, root: Path, steps: Sequence[int], which: Which, config: Config | None
) -> Iterator[tuple[Path, Path]]:
    """Yield the newest checkpoint, all of them, or the best by what they are ranked by."""
    checkpoints = CheckpointFolder(root, keep_top_k=None, higher_is_better=True)
    chosen = [*steps] if which == "all" else [steps[-1]]
    if which == "best":
        records = {step: checkpoints.read_record(step) for step in steps}
        ranked = {step: record.metric for step, record in records.items() if record.metric is not None}
        if not ranked:
            raise ModelError(
                f"--checkpoints best: no checkpoint in {root} has the metric that ranks them; choose newest"
            )
        config = config or config_from_json(records[steps[-1]].config_json.encode())
        sign = 1 if config.checkpointing.higher_is_better else -1
        chosen = [max(ranked, key=lambda step: (sign * ranked[step], step))]
    for step in chosen:
        folder = checkpoints.folder_of(step)
        yield (folder if folder.is_relative_to(path) else Path(f"{path}/step_{step}")), folder / _POLICY


def _check_kind(folder: Path) -> None:
    """Refuse a model of a type that transformers does not know. Raises `ModelError`."""
    try:
        content: Any = msgspec.json.decode((folder / _CONFIG).read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"--model {folder}: its {_CONFIG} cannot be read: {error}") from error
    kind = content.get("model_type") if isinstance(content, dict) else None
    if model_types() and kind not in model_types():
        raise ModelError(
            f"--model {folder}: transformers has no model type {kind!r} ({_CONFIG}: model_type)"
            f"{nearest(str(kind), model_types())}"
        )


def _file_name(label: Path, taken: set[str]) -> str:
    """Return a name for files, which no other model has."""
    name = re.sub(r"[^\w.-]+", "-", str(label)).strip("-.") or "model"
    return next(each for each in (name, *(f"{name}.{i}" for i in range(2, len(taken) + 3))) if each not in taken)


def _by_number(path: str) -> list[int | str]:
    """Order ``step_9`` before ``step_10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]
