"""The files of the record of samples: their names; what is in them knows `tandem.common.sample_record`.

Arrow is not imported here.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import NamedTuple

FOLDER = "samples"
"""Of the record within the run folder."""
UNFINISHED = "unfinished"
"""Of what is not trained on yet, within the folder of the record."""
SHARD, STREAM = ".parquet", ".arrows"
"""What the names of shards end with, and those of unfinished files."""
_NAME = re.compile(r"step-(?P<step>\d{8,})\.(?P<rollout>[^.]+)(\.[0-9a-f]+)?\.(parquet|arrows)")


class RecordFile(NamedTuple):
    """What the name of a file of the record says."""

    path: Path
    step: int
    rollout: str


def files(folder: Path, suffix: str = "") -> list[RecordFile]:
    """Return the files of the record in a folder, by name: all, its shards, or its unfinished ones."""
    found = []
    for path in sorted(folder.glob(f"step-*{suffix}")):
        named = _NAME.fullmatch(path.name)
        if named is not None:
            found.append(RecordFile(path, int(named["step"]), named["rollout"]))
    return found


def shard_path(folder: Path, step: int, rollout: str) -> Path:
    """Return where the shard of a rollout's samples of a step lies."""
    return folder / f"step-{step:08d}.{rollout}{SHARD}"


def temporary_path(shard: Path) -> Path:
    """Return a path for a shard that has no name yet, since it is not whole."""
    return shard.with_name(f".{shard.name}.{secrets.token_hex(4)}")


def unnamed(folder: Path) -> list[Path]:
    """Return the shards in a folder that have no name yet."""
    return [path for path in folder.glob(".step-*") if _NAME.fullmatch(path.name[1:].rpartition(".")[0])]


def unfinished_path(folder: Path, step: int, rollout: str) -> Path:
    """Return the path of a new unfinished file in the folder of the record."""
    return folder / UNFINISHED / f"step-{step:08d}.{rollout}.{secrets.token_hex(4)}{STREAM}"
