"""The names of the rollout log's files; `tandem.samples.sample_record` knows their contents.

Arrow is not imported here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tandem.common.messages import Purpose

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
