"""The order of problems and the seeds of samples: pure functions of the run's seed."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(size)


def epoch_stream(seed: int, size: int, first: int, count: int, *, shuffle: bool = True) -> list[int]:
    """Return `count` indexes, from position `first` on, of the stream of epochs: each a fresh permutation of `size`.

    Where nothing is to `shuffle`, each is in order.
    """
    positions = range(first, first + count)
    if not shuffle:
        return [position % size for position in positions]
    return [int(_permutation(seed, position // size, size)[position % size]) for position in positions]


def sample_seed(seed: int, step: int, purpose: str, group: int, sample: int) -> int:
    """Return the unsigned 64-bit seed of one sample: BLAKE2b of what identifies it within the run."""
    identity = f"{seed}/{purpose}/{step}/{group}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
