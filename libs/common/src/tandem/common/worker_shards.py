"""Worker shards: the parts of processes between which the weight plane moves weights.

A trainer rank is one worker shard, and so is an engine with one worker; each is named like its process. The workers
of a larger engine are worker shards of its process, ``rollout-0/0``, ``rollout-0/1``, ... Each has its own layout,
transfer program and digests, while commands, failures and versions belong to the engine.
"""

from __future__ import annotations

_SEPARATOR = "/"


def worker_shard_names(process: str, num_shards: int) -> tuple[str, ...]:
    """Return the names of all worker shards of a process."""
    return (process,) if num_shards == 1 else tuple(f"{process}{_SEPARATOR}{index}" for index in range(num_shards))


def map_by_shard(process: str, sent: tuple[bytes, ...]) -> dict[str, bytes]:
    """Return what a process sent of each of its worker shards, by their names."""
    return dict(zip(worker_shard_names(process, len(sent)), sent, strict=True))


def process_of(shard: str) -> str:
    """Return the process that a worker shard belongs to."""
    return shard.partition(_SEPARATOR)[0]
