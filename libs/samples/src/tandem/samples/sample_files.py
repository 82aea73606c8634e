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
"""Of the record within the run folder."""
UNFINISHED = "unfinished"
"""Of what is not trained on yet, within the folder of the record."""
LOGPROBS = "logprobs"
"""Of the log-probabilities that trainers computed of the samples, within the folder of the record."""
PURPOSES: tuple[Purpose, ...] = ("train", "validate")
SHARD, STREAM = ".parquet", ".arrows"
"""What the names of shards end with, and those of unfinished files."""
_KINDS: Mapping[Purpose, str] = {"train": "step", "validate": "validation"}
"""What the names of files begin with: of the samples that a step trained on, and of those that it was validated by."""
_OF_KIND = {kind: purpose for purpose, kind in _KINDS.items()}
_NAME = re.compile(
    r"\.?(?P<kind>step|validation)-(?P<step>\d{8,})\.(?P<rollout>[^.]+)(\.[0-9a-f]+)?\.(parquet|arrows)(\.[0-9a-f]+)?"
)


class RecordFile(NamedTuple):
    """What the name of a file of the record says."""

    path: Path
    step: int
    rollout: str
    purpose: Purpose


def files(folder: Path, suffix: str = "", purpose: Purpose = "train") -> list[RecordFile]:
    """Return the files of the record in a folder, by name: all of a purpose, its shards, or its unfinished ones."""
    return _named(sorted(folder.glob(f"{_KINDS[purpose]}-*{suffix}")))


def half_written(folder: Path) -> list[RecordFile]:
    """Return the shards of a record, for any purpose, that are being written, or were when their writer was killed."""
    return _named(sorted((folder / UNFINISHED).glob(".*-*")))


def _named(paths: Iterable[Path]) -> list[RecordFile]:
    found = []
    for path in paths:
        named = _NAME.fullmatch(path.name)
        if named is not None:
            found.append(RecordFile(path, int(named["step"]), named["rollout"], _OF_KIND[named["kind"]]))
    return found


def shard_path(folder: Path, step: int, rollout: str, purpose: Purpose = "train") -> Path:
    """Return where the shard of a rollout's samples of a step lies."""
    return folder / f"{_KINDS[purpose]}-{step:08d}.{rollout}{SHARD}"


def temporary_path(shard: Path) -> Path:
    """Return where a shard is written before it gets its name."""
    return shard.parent / UNFINISHED / f".{shard.name}.{secrets.token_hex(4)}"


def unfinished_path(folder: Path, step: int, rollout: str, purpose: Purpose = "train") -> Path:
    """Return the path of a new unfinished file in the folder of the record."""
    return folder / UNFINISHED / f"{_KINDS[purpose]}-{step:08d}.{rollout}.{secrets.token_hex(4)}{STREAM}"
