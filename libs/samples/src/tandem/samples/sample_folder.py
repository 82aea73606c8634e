"""The folder of the record of samples: how much of it is kept, and what in it no longer counts.

Rollouts and trainers write the files (`tandem.samples.sample_record`). The coordinator deletes them: the oldest steps,
where there are more bytes than ``logger.samples`` says, and what is left over of a step that is recorded. When a run is
resumed, what lies there of the steps that are to come is put aside, to be trained on again
(`tandem.coordinator.loop.kept_samples`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tandem.common.messages import Purpose
from tandem.config.schema import Logger
from tandem.samples.sample_files import (
    FOLDER,
    LOGPROBS,
    PURPOSES,
    UNFINISHED,
    RecordFile,
    files,
    half_written,
    shard_path,
)

_ASIDE = "before-resume-"
"""Of a folder of what had been there when the run was resumed, within that of the record; a number follows."""
_LIMITS = "limits.json"
_Kind = Purpose | Literal["logprobs"]
_LATEST = 8
"""Steps back that files of log-probabilities are looked for: trainers write them when they get to it."""


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

    def __init__(self, logger: Logger, trainers: Sequence[str] = ()) -> None:
        """Look at what is there; `trainers` are those that write log-probabilities."""
        self.path = (Path(logger.log_dir) / FOLDER).absolute()
        self._trainers = trainers
        self._most = logger.samples * 1e9 if isinstance(logger.samples, float) else None
        self._files: dict[tuple[int, _Kind], dict[Path, int]] = {}
        """Of each step, with their bytes; of shards that are written together, the first has those of all."""
        self._awaited: list[int] = []
        """Steps whose log-probabilities have not been seen."""
        self._look()

    def take_recorded(self, step: int, rollouts: Iterable[str], num_bytes: int, purpose: Purpose = "train") -> None:
        """Take note that a step is recorded whole; delete what is left over of it, and what is too old to be kept."""
        shards = [shard_path(self.path, step, rollout, purpose) for rollout in rollouts]
        self._files[step, purpose] = dict.fromkeys(shards, 0) | dict.fromkeys(shards[:1], num_bytes)
        self._delete_leftovers({(step, purpose)})
        if purpose == "train":
            self._look_for_logprobs(step)
        if self._most is not None:
            self._delete_oldest(step, self._most)

    def put_aside_after(self, step: int, limits: KeptLimits) -> None:
        """Move all that is there of the steps after `step` to a folder of its own. Raises `OSError`.

        What was to become part of the record of earlier steps, which are not going to be trained on again, is deleted,
        and so are shards that were being written when the run was killed, and of later steps what is made again
        whatever is kept: validation samples, and trainers' log-probabilities.
        """
        self._look()  # rollouts may have gone on until now
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
        newest = max((_number(path) for path in self.aside()), default=0)
        aside = self.path / f"{_ASIDE}{newest + 1}"
        aside.mkdir()
        write_limits(aside, limits)
        for file in later:
            of_step = self._files.setdefault((file.step, "train"), {})
            of_step[file.path.rename(aside / file.path.name)] = of_step.pop(file.path, 0)

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

    def _look(self) -> None:
        """Take note of all that is there."""
        self._files.clear()
        for file in self._all():
            self._add(file, file.purpose)
        for file in files(self.path / LOGPROBS):
            self._add(file, "logprobs")

    def _all(self) -> Iterator[RecordFile]:
        """Yield all files of samples."""
        for folder in (self.path, self.path / UNFINISHED, *self.aside()):
            for purpose in PURPOSES:
                yield from files(folder, purpose=purpose)

    def _add(self, file: RecordFile, kind: _Kind) -> None:
        with contextlib.suppress(OSError):
            self._files.setdefault((file.step, kind), {})[file.path] = file.path.stat().st_size

    def _look_for_logprobs(self, step: int) -> None:
        """Take note of log-probabilities that trainers have written since, beside the steps up to this one."""
        self._awaited = [awaited for awaited in [*self._awaited, step] if step - _LATEST < awaited]
        for awaited in [*self._awaited]:
            paths = [shard_path(self.path / LOGPROBS, awaited, trainer) for trainer in self._trainers]
            found = {path: size for path in paths if (size := _size(path))}
            self._files[awaited, "logprobs"] = found
            if len(found) == len(paths):
                self._awaited.remove(awaited)

    def _delete_oldest(self, newest: int, most: float) -> None:
        """Delete the oldest steps, whole, until there are no more bytes than `most`, or no other than the newest."""
        total = sum(sum(of_step.values()) for of_step in self._files.values())
        for oldest in sorted({step for step, _ in self._files}):
            if total <= most or oldest >= newest:
                return
            for key in [key for key in self._files if key[0] == oldest]:
                of_step = self._files.pop(key)
                total -= sum(of_step.values())
                for path in of_step:
                    _delete(path)
            for trainer in self._trainers:  # it may have come since
                _delete(shard_path(self.path / LOGPROBS, oldest, trainer))
            self._delete_leftovers({(oldest, purpose) for purpose in PURPOSES})

    def _delete_leftovers(self, of: set[tuple[int, Purpose]]) -> None:
        """Delete what is there of these steps beside their shards."""
        folders = (self.path / UNFINISHED, *self.aside())
        found = [file for folder in folders for purpose in PURPOSES for file in files(folder, purpose=purpose)]
        for file in [*found, *half_written(self.path)]:
            if (file.step, file.purpose) in of:
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


def _size(path: Path) -> int:
    """Return the bytes of a file; zero if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
