"""What those who watch a run from outside see: Prometheus, and Weights & Biases."""

from __future__ import annotations

import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec


def scraped(url: str) -> dict[str, float]:
    """Return what is served, by name and labels; nothing while there is no answer."""
    try:
        with urllib.request.urlopen(url, timeout=120) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, OSError):
        return {}
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics in the file that ``wandb sync`` would send."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    rows = []
    for data in records_in(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or ".".join(item.nested_key): msgspec.json.decode(item.value_json) for item in items}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def records_in(log: bytes) -> Iterator[bytes]:
    """Yield what is in a log of LevelDB's format, after a header of 7 bytes: wandb has no reader of it in Python."""
    block, head = 32768, struct.Struct("<IHB")
    at, parts = 7, b""
    while at < len(log):
        if block - at % block < head.size:  # what is left of a block is padding
            at += block - at % block
            continue
        _, length, kind = head.unpack_from(log, at)
        parts += log[at + head.size : at + head.size + length]
        at += head.size + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
