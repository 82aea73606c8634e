"""The files of the record of samples: their names; what is in them knows `tandem.common.sample_record`.

Arrow is not imported here.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

FOLDER = "samples"
"""Of the record within the run folder."""
UNFINISHED = "unfinished"
"""Of what is not trained on yet, within the folder of the record."""
SHARD, STREAM = ".parquet", ".arrows"
"""What the names of shards end with, and those of unfinished files."""
_NAME = re.compile(r"\.?step-(?P<step>\d{8,})\.(?P<rollout>[^.]+)(\.[0-9a-f]+)?\.(parquet|arrows)(\.[0-9a-f]+)?")


class RecordFile(NamedTuple):
    """What the name of a file of the record says."""

    path: Path
    step: int
    rollout: str


def files(folder: Path, suffix: str = "") -> list[RecordFile]:
    """Return the files of the record in a folder, by name: all, its shards, or its unfinished ones."""
    return _named(sorted(folder.glob(f"step-*{suffix}")))


def half_written(folder: Path) -> list[RecordFile]:
    """Return the shards of a record that are being written, or were when their writer was killed."""
    return _named(sorted((folder / UNFINISHED).glob(".step-*")))


def _named(paths: Iterable[Path]) -> list[RecordFile]:
    found = []
    for path in paths:
        named = _NAME.fullmatch(path.name)
        if named is not None:
            found.append(RecordFile(path, int(named["step"]), named["rollout"]))
    return found


def shard_path(folder: Path, step: int, rollout: str) -> Path:
    """Return where the shard of a rollout's samples of a step lies."""
    return folder / f"step-{step:08d}.{rollout}{SHARD}"


def temporary_path(shard: Path) -> Path:
    """Return where a shard is written before it gets its name."""
    return shard.parent / UNFINISHED / f".{shard.name}.{secrets.token_hex(4)}"


def unfinished_path(folder: Path, step: int, rollout: str) -> Path:
    """Return the path of a new unfinished file in the folder of the record."""
    return folder / UNFINISHED / f"step-{step:08d}.{rollout}.{secrets.token_hex(4)}{STREAM}"
