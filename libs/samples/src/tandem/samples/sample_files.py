"""The files of the rollout log: their names, how much of it is kept, and which files are obsolete.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Literal, NamedTuple

from tandem.common.messages import Purpose
from tandem.config.schema import Logger
from tandem.samples.folders_aside import (
    RestoreLimits,
    folders_aside,
    invalidate,
    new_folder_aside,
    remove_folder_aside,
)

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
_Kind = Purpose | Literal["logprobs"]
_LATEST = 8
"""Number of latest steps to check for log-probabilities, since trainers write them with a delay."""
_NAME = re.compile(
    r"\.?(?P<kind>step|validation)-(?P<step>\d{8,})\.(?P<rollout>[^.]+)(\.[0-9a-f]+)?\.(parquet|arrows)(\.[0-9a-f]+)?"
)


class RecordFile(NamedTuple):
    """A file of the rollout log, with the parts of its name."""

    path: Path
    step: int
    rollout: str
    purpose: Purpose


def files(folder: Path, suffix: str = "", purpose: Purpose = "train") -> list[RecordFile]:
    """Return the files of the rollout log in a folder, by name: all for a purpose, or those with a suffix."""
    return _named(sorted(folder.glob(f"{_KINDS[purpose]}-*{suffix}")))


def half_written(folder: Path) -> list[RecordFile]:
    """Return shards, for any purpose, that are being written, or were when their writer was killed."""
    return _named(sorted((folder / UNFINISHED).glob(".*-*")))


def _named(paths: Iterable[Path]) -> list[RecordFile]:
    found = []
    for path in paths:
        named = _NAME.fullmatch(path.name)
        if named is not None:
            found.append(RecordFile(path, int(named["step"]), named["rollout"], _OF_KIND[named["kind"]]))
    return found


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

    def __init__(self, logger: Logger, trainers: Sequence[str] = ()) -> None:
        """List the existing files; `trainers` are those that write log-probabilities."""
        self.path = (Path(logger.log_dir) / FOLDER).absolute()
        self._trainers = trainers
        self._most = logger.samples * 1e9 if isinstance(logger.samples, float) else None
        self._files: dict[tuple[int, _Kind], dict[Path, int]] = {}
        """Files of each step, with their bytes; of shards that are written together, the first has the bytes of all."""
        self._awaited: list[int] = []
        """Steps without log-probabilities so far."""
        self._aside: list[Path] = []
        """Folders of files that were put aside, the newest first."""
        self._look()

    def take_recorded(self, step: int, rollouts: Iterable[str], num_bytes: int, purpose: Purpose = "train") -> None:
        """Note that a step is fully recorded; delete its leftovers, and steps beyond the limit."""
        shards = self._files[step, purpose] = {}
        for rollout in rollouts:
            shards[shard_path(self.path, step, rollout, purpose)] = 0 if shards else num_bytes
        self._delete_leftovers({(step, purpose)})
        if purpose == "train":
            self._look_for_logprobs(step)
        if self._most is not None:
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
        self._delete_leftovers({(file.step, file.purpose) for file in self._all() if file.step <= step})
        for key, of_step in [*self._files.items()]:
            if key[0] > step and key[1] != "train":
                for path in of_step:
                    _delete(path)
                del self._files[key]
        later = [file for file in [*files(self.path), *files(self.path / UNFINISHED)] if file.step > step]
        if not later:
            return
        aside = new_folder_aside(self.path, limits)
        self._aside.insert(0, aside)
        for file in later:
            of_step = self._files.setdefault((file.step, "train"), {})
            of_step[file.path.rename(aside / file.path.name)] = of_step.pop(file.path, 0)

    def drop_from(self, version: int) -> None:
        """Invalidate all files that were put aside for this version of the weights and later ones."""
        for aside in self._aside:
            invalidate(aside, version)

    def aside(self) -> list[Path]:
        """Return the folders of files that were put aside, the newest first."""
        return [*self._aside]

    def _look(self) -> None:
        """List all existing files."""
        self._files.clear()
        self._aside = folders_aside(self.path)
        for file in self._all():
            self._add(file, file.purpose)
        for file in files(self.path / LOGPROBS):
            self._add(file, "logprobs")

    def _all(self) -> Iterator[RecordFile]:
        """Yield all files of samples."""
        for folder in (self.path, self.path / UNFINISHED, *self._aside):
            for purpose in PURPOSES:
                yield from files(folder, purpose=purpose)

    def _add(self, file: RecordFile, kind: _Kind) -> None:
        with contextlib.suppress(OSError):
            self._files.setdefault((file.step, kind), {})[file.path] = file.path.stat().st_size

    def _look_for_logprobs(self, step: int) -> None:
        """Look for new log-probabilities from trainers, for the latest steps up to this one."""
        awaited, self._awaited = [*self._awaited, step], []
        for each in awaited:
            if each <= step - _LATEST:
                continue
            found = self._files[each, "logprobs"] = {}
            for trainer in self._trainers:
                path = shard_path(self.path / LOGPROBS, each, trainer)
                with contextlib.suppress(OSError):  # most often it is not there yet
                    found[path] = path.stat().st_size
            if len(found) < len(self._trainers):
                self._awaited.append(each)

    def _delete_oldest(self, newest: int, most: float) -> None:
        """Delete the oldest steps until at most `most` bytes, or only the newest step, are left."""
        total = sum(chain.from_iterable(map(dict.values, self._files.values())))
        if total <= most:
            return
        for oldest in sorted({step for step, _ in self._files}):
            if total <= most or oldest >= newest:
                return
            for key in [key for key in self._files if key[0] == oldest]:
                of_step = self._files.pop(key)
                total -= sum(of_step.values())
                for path in of_step:
                    _delete(path)
            for trainer in self._trainers:  # the file may be new
                _delete(shard_path(self.path / LOGPROBS, oldest, trainer))
            self._delete_leftovers({(oldest, purpose) for purpose in PURPOSES})

    def _delete_leftovers(self, of: set[tuple[int, Purpose]]) -> None:
        """Delete all files of these steps except their shards."""
        folders = (self.path / UNFINISHED, *self._aside)
        found = half_written(self.path)
        for folder, purpose in product(folders, PURPOSES):
            found += files(folder, purpose=purpose)
        for file in found:
            if (file.step, file.purpose) in of:
                _delete(file.path)
        for aside in [*self._aside]:
            if not files(aside):
                remove_folder_aside(aside)
                if not aside.exists():
                    self._aside.remove(aside)


def _delete(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
