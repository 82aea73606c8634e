"""The commits of a run's datasets on the Hub, found before any of them is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.common.errors import ConfigError, DataError, ModelError
from tandem.config import Config, config_from_json
from tandem.config.models import hub
from tandem.config.named import NAMED, is_local
from tandem.config.schema.data import Data, DataSet
from tandem.coordinator.preparing.prerequisite import Mode, has_begun
from tandem.observe.run_folder.journal import read_journal

_MADE = ("reasoning_gym", "sliding_puzzle")
"""Datasets that the run generates itself."""
Section = TypeVar("Section", Data, DataSet)
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
    finding = _Finding(_recorded(config, mode))
    data = config.data
    found = msgspec.structs.replace(
        finding.find("data", data) if not data.train else data,
        train=_all(finding, "train", data.train),
        validation=_all(finding, "validation", data.validation),
    )
    if data.train:  # the section itself has the keys of the first
        found = msgspec.structs.replace(found, commit=found.train[0].commit)
    if len(finding.problems) == 1:
        raise DataError(finding.problems[0])
    if finding.problems:
        raise ConfigError(*finding.problems)
    return msgspec.structs.replace(config, data=found), finding.notices


def _all(finding: _Finding, side: str, sets: tuple[DataSet, ...]) -> tuple[DataSet, ...]:
    return tuple(finding.find(f"data.{side}[{index}]", each) for index, each in enumerate(sets))


class _Finding:
    """The search through one configuration."""

    def __init__(self, recorded: dict[Asked, str | None]) -> None:
        self._commits = dict(recorded)
        self.problems: list[str] = []
        self.notices: list[str] = []

    def find(self, key: str, section: Section) -> Section:
        """Return a section with the commit of its dataset."""
        asked = _asked(section)
        if asked is None or section.commit is not None:
            return section
        if asked not in self._commits:
            try:
                self._commits[asked] = self._commit(key, hub.Reference(*asked))
            except ModelError as error:
                self._commits[asked] = None
                where = f"{key}.dataset_name: cannot load {asked[0]!r}, split {section.split!r}"
                self.problems.append(f"{where}: {error}")
        return msgspec.structs.replace(section, commit=self._commits[asked])

    def _commit(self, key: str, reference: hub.Reference) -> str | None:
        try:
            snapshot = hub.resolve(reference, "dataset")
        except ModelError:
            if reference.revision is None and (hub.is_offline() or hub.why_unreachable()):
                return None  # the library may have an earlier copy; if not, reading reports it
            raise
        if snapshot.note:
            self.notices.append(f"{key}.dataset_name: {snapshot.note}")
        return snapshot.commit


def _asked(section: Data | DataSet) -> Asked | None:
    """Return a dataset's repository and revision; None for files, and for generated data."""
    name = section.dataset_name
    if name is None or name in _MADE or is_local(name):
        return None
    path = NAMED[name].path if name in NAMED else name
    if Path(path).exists() or hub.reference_in(path) is None:
        return None
    return path, section.revision


def _recorded(config: Config, mode: Mode) -> dict[Asked, str | None]:
    """Return the commits that a resumed run began with."""
    if mode != "resume" or not has_begun(config):
        return {}
    with read_journal(Path(config.logger.log_dir)) as journal:
        data = config_from_json(journal.config_json).data
    return {asked: section.commit for section, asked in _sections(data) if asked is not None}


def _sections(data: Data) -> Iterator[tuple[Data | DataSet, Asked | None]]:
    sections: list[Data | DataSet] = [*data.train, *data.validation]
    for section in sections if data.train else [data, *sections]:
        yield section, _asked(section)
