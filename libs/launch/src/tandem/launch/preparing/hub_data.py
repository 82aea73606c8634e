"""The commits of a run's datasets on the Hub, found before any of them is read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.common.errors import ConfigError, DataError, ModelError, nearest
from tandem.common.kept_inputs import path_of
from tandem.config import Config, config_from_json
from tandem.config.models import hub
from tandem.config.named import NAMED, find_place, holds_texts, is_local
from tandem.config.schema.data import DataConfig, DataSet
from tandem.config.schema.environments import PACKAGED
from tandem.launch.preparing.beginning import Mode, has_begun
from tandem.observe.run_folder.journal import read_journal

_MADE = ("reasoning_gym", "sliding_puzzle", "shapes", *PACKAGED)
"""Datasets that the run generates itself, or that environments bring."""
Section = TypeVar("Section", DataConfig, DataSet)
Asked = tuple[str, str | None]
"""A repository on the Hub and its revision."""


def find_data(config: Config, mode: Mode) -> tuple[Config, list[str]]:
    """Return a configuration with commits for its datasets on the Hub, and notices about them.

    A resumed run keeps its commits.

    Raises:
        DataError: a dataset is not available.
        ConfigError: several are not.
    """
    if config.replay is not None:
        return config, []  # it trains on recorded samples
    finding = _Finding(_read_recorded(config, mode))
    finding.problems += find_missing_files(config)
    data = config.data
    pinned_data = msgspec.structs.replace(
        finding.find("data", data) if not data.train else data,
        train=_find_all(finding, "train", data.train),
        validation=_find_all(finding, "validation", data.validation),
    )
    if data.train:  # the section itself has the keys of the first
        pinned_data = msgspec.structs.replace(pinned_data, commit=pinned_data.train[0].commit)
    if len(finding.problems) == 1:
        raise DataError(finding.problems[0])
    if finding.problems:
        raise ConfigError(*finding.problems)
    return msgspec.structs.replace(config, data=pinned_data), finding.notices


def find_missing_data(config: Config, mode: Mode, say: Callable[[str], None]) -> None:
    """Say which data sets do not exist, one line each, as soon as that is known."""
    if config.replay is not None:
        return
    for line in find_missing_files(config):
        say(line)
    finding = _Finding(_read_recorded(config, mode))
    finding.say = say
    data = config.data
    if not data.train:
        finding.find("data", data)
    _find_all(finding, "train", data.train)
    _find_all(finding, "validation", data.validation)


def find_missing_files(config: Config) -> Iterator[str]:
    """Yield a line for each file of the run's data that does not exist."""
    for key, path in list_data_files(config):
        if not Path(path_of(path)).exists():
            yield f"{key}: {path!r} does not exist{nearest(path, _list_beside(Path(path)))}"


def list_data_files(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the files that the run reads, with their keys."""
    data = config.data
    for side, sets in (("train", data.train), ("validation", data.validation)):
        for index, data_set in enumerate(sets):
            if data_set.data_path is not None and is_local(str(data_set.dataset_name)):
                key = "data_path" if data_set.data_files is None else "data_files"
                for path in _list_files_at(data_set.data_path, str(data_set.dataset_name)):
                    yield f"data.{side}[{index}].{key}", path
    if not is_local(data.dataset_name):
        return
    held_out = {"data.val_data_path": data.val_data_path} | {
        f"data.val_data_paths.{name}": path for name, path in (data.val_data_paths or {}).items()
    }
    named = [(key, path) for key, path in held_out.items() if path is not None]
    if data.train_data_path is not None and not data.train and not (config.evaluates and named):
        for path in _list_files_at(data.train_data_path, data.dataset_name):
            yield "data.train_data_path", path
    yield from named


def _list_files_at(path: str, dataset_name: str) -> Sequence[str]:
    """Return the local files of a path: those of raw text may have wildcards, or be on the Hub."""
    if not holds_texts(dataset_name):
        return (path,)
    from tandem.samples.data_sets.raw_texts import local_files

    return local_files(path) or ()


def list_prompt_files(config: Config) -> list[str]:
    """Return the files that prompts are made with."""
    sections: tuple[DataConfig | DataSet, ...] = (config.data, *config.data.train, *config.data.validation)
    return [path for each in sections for path in (each.prompt_file, each.system_prompt_file) if path is not None]


def _list_beside(path: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (str(path.with_name(each.name)) for each in path.parent.iterdir() if each.is_file())


def _find_all(finding: _Finding, side: str, sets: tuple[DataSet, ...]) -> tuple[DataSet, ...]:
    return tuple(finding.find(f"data.{side}[{index}]", each) for index, each in enumerate(sets))


class _Finding:
    """The search through one configuration."""

    def __init__(self, recorded: dict[Asked, str | None]) -> None:
        self._commits = dict(recorded)
        self.problems: list[str] = []
        self.say: Callable[[str], None] = self.problems.append
        self.notices: list[str] = []

    def find(self, key: str, section: Section) -> Section:
        """Return a section with the commit of its dataset."""
        reference = _find_reference(section)
        if reference is None or section.commit is not None:
            return section
        if reference not in self._commits:
            try:
                self._commits[reference] = self._commit(key, hub.HubReference(*reference))
            except ModelError as error:
                self._commits[reference] = None
                prefix = f"{key}.dataset_name: cannot load {reference[0]!r}, split {section.split!r}"
                near = nearest(reference[0], [*NAMED, *hub.list_cached_names("dataset")])
                self.say(f"{prefix}: {error}{near}")
        return msgspec.structs.replace(section, commit=self._commits[reference])

    def _commit(self, key: str, reference: hub.HubReference) -> str | None:
        try:
            snapshot = hub.resolve(reference, "dataset")
        except ModelError:
            if reference.revision is None and (hub.is_offline() or hub.explain_unreachable()):
                return None  # the library may have an earlier copy; if not, reading reports it
            raise
        if snapshot.note:
            self.notices.append(f"{key}.dataset_name: {snapshot.note}")
        return snapshot.commit


def _find_reference(section: DataConfig | DataSet) -> Asked | None:
    """Return a dataset's repository and revision; None for files, and for generated data."""
    name = section.dataset_name
    if name is None or name in _MADE or is_local(name):
        return None
    path, _ = find_place(
        name, section.split, section.train_data_path if isinstance(section, DataConfig) else section.data_path
    )
    if Path(path).exists() or hub.parse_reference(path) is None:
        return None
    return path, section.revision


def _read_recorded(config: Config, mode: Mode) -> dict[Asked, str | None]:
    """Return the commits that a resumed run began with."""
    if mode != "resume" or not has_begun(config):
        return {}
    with read_journal(Path(config.logger.log_dir)) as journal:
        data = config_from_json(journal.config_json).data
    return {reference: section.commit for section, reference in _list_sections(data) if reference is not None}


def _list_sections(data: DataConfig) -> Iterator[tuple[DataConfig | DataSet, Asked | None]]:
    sections: list[DataConfig | DataSet] = [*data.train, *data.validation]
    for section in sections if data.train else [data, *sections]:
        yield section, _find_reference(section)
