"""The folder of the record of samples: how much of it is kept, and what in it no longer counts.

Rollouts write the files (`tandem.common.sample_record`). The coordinator deletes them: the oldest steps, where there
are more bytes than ``logger.samples`` says, and what is left over of a step that is recorded. When a run is resumed,
what lies there of the steps that are to come is put aside, to be trained on again
(`tandem.coordinator.run.kept_samples`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tandem.common.config.schema import Logger
from tandem.common.sample_files import FOLDER, UNFINISHED, RecordFile, files, shard_path

_ASIDE = "before-resume-"
"""Of a folder of what had been there when the run was resumed, within that of the record; a number follows."""


class SampleFolder:
    """The files of one run's record. What the disk says to it never stops the run."""

    def __init__(self, logger: Logger) -> None:
        """Look at what is there."""
        self.path = (Path(logger.log_dir) / FOLDER).absolute()
        self._most = logger.samples * 1e9 if isinstance(logger.samples, float) else None
        self._num_bytes: dict[int, int] = {}
        """Of each step."""
        self._shards: dict[int, set[Path]] = {}
        for file in self._all():
            self._add(file)

    def take_recorded(self, step: int, rollouts: Iterable[str], num_bytes: int) -> None:
        """Take note that a step is recorded whole; delete what is left over of it, and what is too old to be kept."""
        self._num_bytes[step] = num_bytes
        self._shards[step] = {shard_path(self.path, step, rollout) for rollout in rollouts}
        self._delete_leftovers({step})
        total, old = sum(self._num_bytes.values()), set[int]()
        for oldest in sorted(self._num_bytes):
            if self._most is None or total <= self._most or oldest >= step:
                break
            total -= self._num_bytes.pop(oldest)
            old.add(oldest)
        for path in [path for oldest in old for path in self._shards.pop(oldest, ())]:
            _delete(path)
        if old:
            self._delete_leftovers(old)

    def put_aside_after(self, step: int) -> Path | None:
        """Move all that is there of the steps after `step` to a folder of its own; None if there is nothing."""
        later = [file for file in [*files(self.path), *files(self.path / UNFINISHED)] if file.step > step]
        if not later:
            return None
        newest = max((_number(path) for path in self.aside()), default=0)
        aside = self.path / f"{_ASIDE}{newest + 1}"
        aside.mkdir()
        for file in later:
            file.path.rename(aside / file.path.name)
            self._shards.pop(file.step, None)
        return aside

    def aside(self) -> list[Path]:
        """Return the folders of what was put aside, the newest first."""
        return sorted((path for path in self.path.glob(f"{_ASIDE}*") if _number(path)), key=_number, reverse=True)

    def _all(self) -> Iterator[RecordFile]:
        for folder in (self.path, self.path / UNFINISHED, *self.aside()):
            yield from files(folder)

    def _add(self, file: RecordFile) -> None:
        with contextlib.suppress(OSError):
            self._num_bytes[file.step] = self._num_bytes.get(file.step, 0) + file.path.stat().st_size
        if file.path.parent == self.path:
            self._shards.setdefault(file.step, set()).add(file.path)

    def _delete_leftovers(self, steps: set[int]) -> None:
        """Delete what is there of these steps beside their shards."""
        for folder in (self.path / UNFINISHED, *self.aside()):
            for file in files(folder):
                if file.step in steps:
                    _delete(file.path)


def _number(aside: Path) -> int:
    """Return the number of a folder of what was put aside; zero if it is none."""
    number = aside.name.removeprefix(_ASIDE)
    return int(number) if number.isdecimal() else 0


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
