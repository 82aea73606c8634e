"""The models in a folder: a Hugging Face model, one or several checkpoints, or a run that has some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from tandem.common.errors import CheckpointError, ModelError, RunFolderError, nearest
from tandem.config import Config, config_from_json
from tandem.config.models import hub, lora
from tandem.observe.run_folder.checkpoints import CheckpointFolder, checkpoints_of, config_of
from tandem.observe.run_folder.journal import read_journal
from tandem.observe.run_folder.journal_file import JOURNAL_NAME

Which: TypeAlias = Literal["newest", "best", "all"]
"""Choice among several checkpoints."""
_POLICY = "policy"
_CONFIG = "config.json"
_MAX_LISTED = 5


class FoundModel(msgspec.Struct, frozen=True):
    """A model that was found."""

    folder: Path
    """Folder of its files."""
    name: str
    """Short name."""
    label: Path
    """Folder as the user would name it."""


def models_in(folder: Path, which: Which = "newest") -> list[FoundModel]:
    """Return the models in a folder, in order; of checkpoints the newest, the best, or all.

    A name that is not a folder is one on the Hub; its model is fetched. Raise `TandemError` if there is none.
    """
    if folder.exists() or hub.parse_reference(str(folder)) is None:
        return _recognise_models(folder, which, _CONFIG)
    try:
        fetched = hub.fetch_whole(str(folder), partial(print, flush=True))
    except ModelError as error:
        hint = _hint(folder)  # a mistyped folder gets a hint instead
        raise ModelError(f"{folder}: there is no such folder{hint or f'; {error}'}") from error
    return [FoundModel(fetched, folder.name.replace("@", "-"), folder)]


def adapters_in(folder: Path) -> list[FoundModel]:
    """Return the adapters in a folder as `models_in` does models; of checkpoints the newest."""
    return _recognise_models(folder, "newest", lora.CONFIG)


def _recognise_models(folder: Path, which: Which, mark: str) -> list[FoundModel]:
    """Return the models or adapters of a folder, recognised by a file named `mark`."""
    if (folder / mark).is_file():
        path = folder.resolve()
        is_policy = path.name == _POLICY and path.parent.name.startswith("step_")
        return [FoundModel(folder, path.parent.name if is_policy else path.name, folder)]
    if (folder / _POLICY / mark).is_file():
        return [FoundModel(folder / _POLICY, folder.resolve().name, folder)]
    if (folder / JOURNAL_NAME).is_file():
        return _of_run(folder, which, mark)
    _refuse_other(folder, mark)
    _refuse_other(folder / _POLICY, mark)
    if (checkpoints := CheckpointFolder(folder, keep_top_k=None, higher_is_better=True)).steps():
        return _of_checkpoints(folder, checkpoints, which, None, mark)
    if folder.is_file():
        raise ModelError(f"{folder}: it is a file, not a folder with a model")
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such folder{_hint(folder)}")
    raise ModelError(
        f"{folder} holds no {'model' if mark == _CONFIG else 'adapters'}: no {mark}, no checkpoint's {_POLICY}/, no "
        f"checkpoint step_N and no {JOURNAL_NAME} of a run{_hint(folder)}"
    )


def _of_run(run: Path, which: Which, mark: str) -> list[FoundModel]:
    with read_journal(run) as journal:
        config = config_of(journal)
        late_metrics = journal.values_of(config.checkpointing.metric_name) if config.eval.during_training else {}
    checkpoints = checkpoints_of(run, config)
    if not checkpoints.steps():
        when = f"every {config.checkpointing.save_period} steps" if config.checkpointing.enabled else "never"
        raise RunFolderError(
            f"{run} has no checkpoint: the run saves {when} (checkpointing.enabled, checkpointing.save_period)"
        )
    name = run.resolve().name
    models = _of_checkpoints(run, checkpoints, which, config, mark, late_metrics)
    return [msgspec.structs.replace(each, name=f"{name}-{each.name}") for each in models]


def _of_checkpoints(
    path: Path,
    checkpoints: CheckpointFolder,
    which: Which,
    config: Config | None,
    mark: str,
    late_metrics: Mapping[int, float] = {},
) -> list[FoundModel]:
    steps, models = checkpoints.steps(), []
    chosen_steps = {"newest": steps[-1:], "all": steps}.get(which) or [_best(checkpoints, steps, config, late_metrics)]
    for folder in map(checkpoints.folder_of, chosen_steps):
        if not (folder / _POLICY / mark).is_file():
            _refuse_other(folder / _POLICY, mark)
            raise CheckpointError(f"{folder} is not whole: it has no {_POLICY}/{mark}; name another checkpoint")
        label = folder if folder.is_relative_to(path) else path / folder.name
        models.append(FoundModel(folder / _POLICY, folder.name, label))
    return models


def _refuse_other(folder: Path, mark: str) -> None:
    """Raise `ModelError` if a folder has adapters instead of a model, or the other way round."""
    if mark == _CONFIG and (reason := lora.explain_no_model(folder)) is not None:
        raise ModelError(reason)
    if mark == lora.CONFIG and (folder / _CONFIG).is_file():
        raise ModelError(f"{folder} holds a model and no adapters")


def _best(
    checkpoints: CheckpointFolder, steps: Sequence[int], config: Config | None, late_metrics: Mapping[int, float]
) -> int:
    """Return the step of the best checkpoint, by their ranking metric."""
    records = {step: checkpoints.read_record(step) for step in steps}
    metrics = {step: late_metrics.get(step, record.metric) for step, record in records.items()}
    ranked = {step: metric for step, metric in metrics.items() if metric is not None}
    if not ranked:
        folder = checkpoints.folder_of(steps[0]).parent
        raise ModelError(f"no checkpoint in {folder} has the metric that ranks them; choose newest (--checkpoints)")
    config = config or config_from_json(records[steps[-1]].config_json.encode())
    sign = 1 if config.checkpointing.higher_is_better else -1
    return max(ranked, key=lambda step: (sign * ranked[step], step))


def _hint(folder: Path) -> str:
    """Return a hint at folders with a model, and at the one that may be meant."""
    inside = sorted(map(str, _list_model_folders(folder)))
    if inside:
        return f"; in it {', '.join(inside[:_MAX_LISTED])} {'does' if len(inside) == 1 else 'do'}"
    return nearest(str(folder), map(str, _list_model_folders(folder.parent)))


def _list_model_folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for path in folder.iterdir():
            marks = (path / _CONFIG, path / _POLICY / _CONFIG, path / JOURNAL_NAME)
            if any(mark.is_file() for mark in marks):
                yield path
