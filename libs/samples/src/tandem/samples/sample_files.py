"""The files of the rollout log: their names, how much is kept, and those set aside for a resumed run.

Rollouts and trainers write the files; `tandem.samples.sample_record` knows their contents. The coordinator deletes
them: the oldest steps, if the limit in ``logger.samples`` is exceeded, and leftovers of recorded steps. When a run is
resumed, files of the steps to come are put aside, to be trained on again
(`tandem.coordinator.loop.restored_samples`).

Arrow is not imported here.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec

from tandem.common.files import replace_file
from tandem.common.messages import Purpose
from tandem.config.schema import LoggerConfig

FOLDER = "samples"
"""Folder of the rollout log within the run folder."""
UNFINISHED = "unfinished"
"""Subfolder for samples that are not trained on yet."""
LOGPROBS = "logprobs"
"""Subfolder for trainers' log-probabilities of the samples."""
PURPOSES: tuple[Purpose, ...] = ("train", "validate")
SHARD, STREAM = ".parquet", ".arrows"
"""Suffixes of shards and of unfinished files."""
_KINDS: Mapping[Purpose, str] = {"train": "step", "validate": "validation"}
"""Prefixes of files: with the samples of a training step, and with those of its validation."""
_OF_KIND = {kind: purpose for purpose, kind in _KINDS.items()}
_MOST_LISTED = 256
"""Number of steps that are listed at a time to be deleted."""
_LATEST = 8
"""Number of latest steps to check for log-probabilities, since trainers write them with a delay."""
_NAME = re.compile(
    r"\.?(?P<kind>step|validation)-(?P<step>\d{8,})\.(?P<rollout>[^.]+)(\.[0-9a-f]+)?\.(parquet|arrows)(\.[0-9a-f]+)?"
)
_ASIDE = "before-resume-"
"""Prefix of the folders with files from before the run was resumed; a number follows."""
_LIMITS = "limits.json"


class RestoreLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the validity of files that were put aside together."""

    newest_proven: int | None
    """Newest weights that engines were verified to hold, if they are verified; samples of newer weights are valid
    only if a step was trained on them."""
    quarantined: dict[str, tuple[int, ...]] = {}
    """Versions that an engine was found not to hold at first, with the same effect."""
    below: int | None = None
    """Version from which on samples are invalid, because the run has made others with these numbers."""


def folders_aside(folder: Path) -> list[Path]:
    """Return the folders of files that were put aside, the newest first, in the folder of a rollout log."""
    return sorted(filter(_number, folder.glob(f"{_ASIDE}*")), key=_number, reverse=True)


def new_folder_aside(folder: Path, limits: RestoreLimits) -> Path:
    """Make another one, and return it. Raises `OSError`."""
    newest = max(map(_number, folders_aside(folder)), default=0)
    aside = folder / f"{_ASIDE}{newest + 1}"
    aside.mkdir()
    _write_limits(aside, limits)
    return aside


def invalidate(aside: Path, version: int) -> None:
    """Invalidate the files of such a folder for this version of the weights and later ones, if it can be written."""
    with contextlib.suppress(OSError):
        limits = read_limits(aside)
        below = version if limits.below is None else min(limits.below, version)
        _write_limits(aside, msgspec.structs.replace(limits, below=below))


def remove_folder_aside(aside: Path) -> None:
    """Remove such a folder without files, as far as the disk allows."""
    for remove in ((aside / _LIMITS).unlink, aside.rmdir):
        with contextlib.suppress(OSError):
            remove()


def read_limits(aside: Path) -> RestoreLimits:
    """Return the validity limits of a folder of files put aside. Raises `OSError`."""
    try:
        return msgspec.json.decode((aside / _LIMITS).read_bytes(), type=RestoreLimits)
    except msgspec.MsgspecError as error:
        raise OSError(None, f"{aside / _LIMITS}: {error}") from error


def _write_limits(aside: Path, limits: RestoreLimits) -> None:
    """Write the validity limits, atomically. Raises `OSError`."""
    replace_file(aside / _LIMITS, msgspec.json.encode(limits))


def _number(aside: Path) -> int:
    """Return the number of a folder of files put aside; zero for any other folder."""
    number = aside.name.removeprefix(_ASIDE)
    return int(number) if number.isdecimal() else 0


class RecordFile(NamedTuple):
    """A file of the rollout log, with the parts of its name."""

    path: Path
    step: int
    rollout: str
    purpose: Purpose


def files(folder: Path, suffix: str = "", purpose: Purpose = "train") -> list[RecordFile]:
    """Return the files of the rollout log in a folder, by name: all for a purpose, or those with a suffix."""
    return _parse_names(sorted(folder.glob(f"{_KINDS[purpose]}-*{suffix}")))


def half_written(folder: Path) -> list[RecordFile]:
    """Return shards, for any purpose, that are being written, or were when their writer was killed."""
    return _parse_names(sorted((folder / UNFINISHED).glob(".*-*")))


def _parse_names(paths: Iterable[Path]) -> list[RecordFile]:
    record_files = []
    for path in paths:
        named = _NAME.fullmatch(path.name)
        if named is not None:
            record_files.append(RecordFile(path, int(named["step"]), named["rollout"], _OF_KIND[named["kind"]]))
    return record_files


def shard_path(folder: Path, step: int, rollout: str, purpose: Purpose = "train") -> Path:
    """Return the path of the shard with a rollout's samples of a step."""
    return folder / f"{_KINDS[purpose]}-{step:08d}.{rollout}{SHARD}"


def temporary_path(shard: Path) -> Path:
    """Return the path at which a shard is written before it gets its name."""
    return shard.parent / UNFINISHED / f".{shard.name}.{secrets.token_hex(4)}"


def unfinished_path(folder: Path, step: int, rollout: str, purpose: Purpose = "train") -> Path:
    """Return the path of a new unfinished file in the rollout log."""
    return folder / UNFINISHED / f"{_KINDS[purpose]}-{step:08d}.{rollout}.{secrets.token_hex(4)}{STREAM}"


class SampleFolder:
    """The files of one run's rollout log. Disk errors never stop the run."""

    def __init__(self, logger: LoggerConfig, trainers: Sequence[str] = ()) -> None:
        """Count the existing files; `trainers` are those that write log-probabilities."""
        self.path = (Path(logger.log_dir) / FOLDER).absolute()
        self._trainers = trainers
        self._most = logger.samples * 1e9 if isinstance(logger.samples, float) else None
        self._num_bytes = 0
        """Bytes of all files: the files themselves are not remembered, since a long run has too many."""
        self._counted: dict[Path, int] = {}
        """Bytes of those counted files that are not shards in their place, and will be deleted."""
        self._oldest: deque[tuple[int, list[Path]]] = deque()
        """The oldest steps when they were last listed, with their files; empty if they have to be listed again."""
        self._awaited: dict[int, set[str]] = {}
        """The trainers without log-probabilities so far, of the latest steps."""
        self._aside: list[Path] = []
        """Folders of files that were put aside, the newest first."""
        self._look()

    def take_recorded(self, step: int, rollouts: Iterable[str], num_bytes: int, purpose: Purpose = "train") -> None:
        """Note that a step is fully recorded; delete its leftovers, and steps beyond the limit."""
        self._num_bytes += num_bytes
        self._delete_leftovers({(step, purpose)})
        if purpose == "train":
            self._look_for_logprobs(step)
        if self._most is not None and self._num_bytes > self._most:
            self._delete_oldest(step, self._most)

    def put_aside_after(self, step: int, limits: RestoreLimits) -> None:
        """Move the files of all steps after `step` to a folder of their own. Raises `OSError`.

        Unfinished files of earlier steps, which will not be trained on again, are deleted. So are shards that were
        being written when the run was killed. Of later steps, validation samples and trainers' log-probabilities are
        deleted, since they are always made again.
        """
        self._look()  # rollouts may have written until now
        for file in [*half_written(self.path), *half_written(self.path / LOGPROBS)]:
            _delete(file.path)
        sample_files = [*self._all()]
        self._delete_leftovers({(file.step, file.purpose) for file in sample_files if file.step <= step})
        for file in [*(each for each in sample_files if each.purpose != "train"), *files(self.path / LOGPROBS)]:
            if file.step > step:
                _delete(file.path)
        later = [file for file in [*files(self.path), *files(self.path / UNFINISHED)] if file.step > step]
        aside = new_folder_aside(self.path, limits) if later else self.path
        for file in later:
            file.path.rename(aside / file.path.name)
        self._look()

    def drop_from(self, version: int) -> None:
        """Invalidate all files that were put aside for this version of the weights and later ones."""
        for aside in self._aside:
            invalidate(aside, version)

    def aside(self) -> list[Path]:
        """Return the folders of files that were put aside, the newest first."""
        return [*self._aside]

    def _look(self) -> None:
        """Count all existing files."""
        self._oldest.clear()
        self._aside = folders_aside(self.path)
        sizes = {file.path: _size(file.path) for file in self._all()}
        self._counted = {path: size for path, size in sizes.items() if path.parent != self.path}
        self._num_bytes = sum(sizes.values()) + sum(_size(file.path) for file in files(self.path / LOGPROBS))
        for step, trainers in self._awaited.items():
            trainers -= {each for each in trainers if self._logprobs_path(step, each).exists()}

    def _all(self) -> Iterator[RecordFile]:
        """Yield all files of samples."""
        for folder in (self.path, self.path / UNFINISHED, *self._aside):
            for purpose in PURPOSES:
                yield from files(folder, purpose=purpose)

    def _logprobs_path(self, step: int, trainer: str) -> Path:
        return shard_path(self.path / LOGPROBS, step, trainer)

    def _look_for_logprobs(self, step: int) -> None:
        """Look for new log-probabilities from trainers, for the latest steps up to this one."""
        self._awaited[step] = {*self._trainers}
        for awaited_step, trainers in [*self._awaited.items()]:
            if awaited_step > step - _LATEST:
                for trainer in [*trainers]:
                    if size := _size(self._logprobs_path(awaited_step, trainer)):  # most often none is there yet
                        self._num_bytes += size
                        trainers.remove(trainer)
            if awaited_step <= step - _LATEST or not trainers:
                del self._awaited[awaited_step]

    def _delete_oldest(self, newest: int, max_bytes: float) -> None:
        """Delete the oldest steps until at most `max_bytes` bytes, or only the newest step, are left."""
        while self._num_bytes > max_bytes:
            if not self._oldest:
                self._look()
                self._list_oldest(newest)
            if self._num_bytes <= max_bytes or not self._oldest:
                return
            oldest, paths = self._oldest.popleft()
            for path in paths:
                self._num_bytes -= _size(path)
                self._counted.pop(path, None)
                _delete(path)
            for trainer in self._trainers:  # the file may be new
                _delete(self._logprobs_path(oldest, trainer))
            self._delete_leftovers({(oldest, purpose) for purpose in PURPOSES})

    def _list_oldest(self, newest: int) -> None:
        """List the files of the oldest steps before `newest`."""
        paths: dict[int, list[Path]] = {}
        for file in [*self._all(), *files(self.path / LOGPROBS)]:
            if file.step < newest:
                paths.setdefault(file.step, []).append(file.path)
        self._oldest.extend((step, paths[step]) for step in sorted(paths)[:_MOST_LISTED])

    def _delete_leftovers(self, of: set[tuple[int, Purpose]]) -> None:
        """Delete all files of these steps except their shards."""
        folders = (self.path / UNFINISHED, *self._aside)
        leftovers = half_written(self.path)
        for folder, purpose in product(folders, PURPOSES):
            leftovers += files(folder, purpose=purpose)
        for file in leftovers:
            if (file.step, file.purpose) in of:
                self._num_bytes -= self._counted.pop(file.path, 0)
                _delete(file.path)
        for aside in [*self._aside]:
            if not files(aside):
                remove_folder_aside(aside)
                if not aside.exists():
                    self._aside.remove(aside)


def _size(path: Path) -> int:
    """Return the bytes of a file; zero if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
