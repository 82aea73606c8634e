"""The models that an evaluation names: folders, checkpoints, runs with their checkpoints."""

from __future__ import annotations

import glob
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tandem.common.errors import CheckpointError, ModelError, RunFolderError, nearest
from tandem.config.models import hub
from tandem.coordinator.model_folders.checking import read_json, refuse_unknown_type
from tandem.observe.run_folder.found_models import Which, models_in

_CONFIG = "config.json"


class EvaluatedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model to evaluate."""

    label: str
    """Name as the user gave it."""
    name: str
    """Name of its files among the results."""
    folder: Path


def find_models(words: Sequence[str], which: Which) -> list[EvaluatedModel]:
    """Return the models that words of the command line name, each once. Raise `ModelError` if one is not found."""
    models: dict[Path, EvaluatedModel] = {}
    for label, folder in _locate_models(words, which):
        _check_kind(folder)
        if folder.resolve() not in models:
            name = _file_name(label, {model.name for model in models.values()})
            models[folder.resolve()] = EvaluatedModel(label=str(label), name=name, folder=folder)
    return [*models.values()]


def _expand(word: str) -> list[Path]:
    """Return the paths that a word stands for; a pattern may match several."""
    path = Path(word)
    if path.exists():
        return [path]
    if glob.has_magic(word) and (paths := sorted(glob.glob(word), key=_split_numbers)):
        return [Path(each) for each in paths]
    if hub.parse_reference(word) is not None:
        return [path]  # a name on the Hub
    beside = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ModelError(f"--model {word}: there is no such folder{nearest(path.name, beside)}")


def _locate_models(words: Sequence[str], which: Which) -> Iterator[tuple[Path, Path]]:
    """Yield the named models: each with its label and the folder of its files."""
    for path in itertools.chain.from_iterable(map(_expand, words)):
        try:
            yield from ((model.label, model.folder) for model in models_in(path, which))
        except (ModelError, RunFolderError, CheckpointError) as error:
            raise ModelError(f"--model {error}") from error


def _check_kind(folder: Path) -> None:
    """Raise `ModelError` for a model of a type that Transformers does not know."""
    try:
        refuse_unknown_type(folder, read_json(folder / _CONFIG))
    except ModelError as error:
        raise ModelError(f"--model {error}") from error


def _file_name(label: Path, used_names: set[str]) -> str:
    """Return a name for files that no other model has."""
    name = re.sub(r"[^\w.-]+", "-", str(label)).strip("-.") or "model"
    return next(
        each for each in (name, *(f"{name}.{i}" for i in range(2, len(used_names) + 3))) if each not in used_names
    )


def _split_numbers(path: str) -> list[int | str]:
    """Return a sort key that puts ``step_9`` before ``step_10``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", path)]
