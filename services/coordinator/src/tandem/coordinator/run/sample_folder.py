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

import msgspec

from tandem.common.config.schema import Logger
from tandem.common.sample_files import FOLDER, UNFINISHED, RecordFile, files, half_written, shard_path

_ASIDE = "before-resume-"
"""Of a folder of what had been there when the run was resumed, within that of the record; a number follows."""
_LIMITS = "limits.json"


class KeptLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What counts of the files that were put aside together."""

    newest_proven: int | None
    """The newest weights that engines were proven to hold, where that is looked at: what was made with newer ones
    counts only if a step was trained on it."""
    quarantined: dict[str, tuple[int, ...]] = {}
    """Versions that an engine was found not to hold at first; likewise."""
    below: int | None = None
    """Nothing counts that was made with this version, or later ones: the run has others of that number."""


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

    def put_aside_after(self, step: int, limits: KeptLimits) -> None:
        """Move all that is there of the steps after `step` to a folder of its own. Raises `OSError`.

        What was to become part of the record of earlier steps, which are not going to be trained on again, is deleted,
        and so are shards that were being written when the run was killed.
        """
        for file in half_written(self.path):
            _delete(file.path)
        self._delete_leftovers({file.step for file in self._all() if file.step <= step})
        later = [file for file in [*files(self.path), *files(self.path / UNFINISHED)] if file.step > step]
        if not later:
            return
        newest = max((_number(path) for path in self.aside()), default=0)
        aside = self.path / f"{_ASIDE}{newest + 1}"
        aside.mkdir()
        write_limits(aside, limits)
        for file in later:
            file.path.rename(aside / file.path.name)
            self._shards.pop(file.step, None)

    def drop_from(self, version: int) -> None:
        """Note that nothing that was put aside counts which was made with this version of the weights or later ones."""
        for aside in self.aside():
            with contextlib.suppress(OSError):
                limits = read_limits(aside)
                below = version if limits.below is None else min(limits.below, version)
                write_limits(aside, msgspec.structs.replace(limits, below=below))

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
        found = [file for folder in (self.path / UNFINISHED, *self.aside()) for file in files(folder)]
        for file in [*found, *half_written(self.path)]:
            if file.step in steps:
                _delete(file.path)
        for aside in self.aside():
            if not files(aside):
                _delete(aside / _LIMITS)
                with contextlib.suppress(OSError):
                    aside.rmdir()


def read_limits(aside: Path) -> KeptLimits:
    """Return what counts of what was put aside. Raises `OSError`."""
    try:
        return msgspec.json.decode((aside / _LIMITS).read_bytes(), type=KeptLimits)
    except msgspec.MsgspecError as error:
        raise OSError(None, f"{aside / _LIMITS}: {error}") from error


def write_limits(aside: Path, limits: KeptLimits) -> None:
    """Write what counts of what was put aside, whole or not at all. Raises `OSError`."""
    temporary = aside / f".{_LIMITS}"
    temporary.write_bytes(msgspec.json.encode(limits))
    temporary.rename(aside / _LIMITS)


def _number(aside: Path) -> int:
    """Return the number of a folder of what was put aside; zero if it is none."""
    number = aside.name.removeprefix(_ASIDE)
    return int(number) if number.isdecimal() else 0


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
