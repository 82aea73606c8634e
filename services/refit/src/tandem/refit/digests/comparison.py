"""Comparison of digests: do engines hold the weights that the trainers sent?

No torch here: the refit service compares digests for models of any size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RefitError
from tandem.refit.layout import Layout

Digests = NDArray[np.uint64]
"""One process's partial digests, one for each of its `Layout.tensors`."""

Held = tuple[Layout, Digests]

_NUM_NAMED = 3
"""Number of tensors named for each engine that differs."""


class EngineDifference(msgspec.Struct, frozen=True):
    """An engine with weights that differ from the trainers'."""

    engine: str
    tensors: tuple[str, ...]
    """The first tensors that differ, in the order of the layouts."""
    num_tensors: int
    """Number of tensors that differ."""

    def __str__(self) -> str:
        num_more = self.num_tensors - len(self.tensors)
        return ", ".join(self.tensors) + (f" and {num_more} more" if num_more else "")


class DigestVerdict(msgspec.Struct, frozen=True):
    """The result of comparing the digests of a version."""

    differences: tuple[EngineDifference, ...]
    """Engines that differ; empty if the version is verified."""
    digest: int
    """Digest of all tensors together, as the trainers hold them."""

    @property
    def differing(self) -> dict[str, str]:
        """Tensors that differ, as text, by engine."""
        texts: dict[str, str] = {}
        for difference in self.differences:
            texts[difference.engine] = str(difference)
        return texts


def compare(sources: Mapping[str, Held], engines: Mapping[str, Mapping[str, Held]]) -> DigestVerdict:
    """Compare the digests of engines with those of trainers.

    An engine's partial digests of a tensor must add up to the sources' sum times the number of copies that the engine
    holds: two, for example, if both tensor-parallel ranks hold the whole tensor. Tensors that were not digested, such
    as scales that an engine computes, count as equal.

    Args:
        sources: layout and digests of each trainer rank. Over all ranks each element is digested once.
        engines: for each engine, layout and digests of each of its processes (one, unless it is sharded).

    Raises:
        RefitError: a process sent digests for another number of tensors than its layout has, or an engine holds some
            elements of a digested tensor more often than others.

    """
    everyone = [*sources.values()]
    for members in engines.values():
        everyone += members.values()
    names = _Names(everyone)
    sent_N = names.total(sources)
    differences = []
    for engine, members in engines.items():
        held_N = names.total(members)
        times_N = names.times_held(engine, members, (held_N != 0) | (sent_N != 0))
        wrong = np.flatnonzero(held_N != sent_N * times_N)
        if len(wrong):
            first = tuple(names.names[index] for index in wrong[:_NUM_NAMED].tolist())
            differences.append(EngineDifference(engine, first, len(wrong)))
    return DigestVerdict(tuple(differences), combine(*sent_N.tolist()))


def is_unchanged(previous: Mapping[str, Digests], current: Mapping[str, Digests]) -> bool:
    """Return whether all tensors of all sources have the same digests as before.

    After an optimizer step with a non-zero update, that is an error: the digested weights are not the trained ones.
    Both must be digests of the same elements: of all, or of one `ElementSampling` of one version.
    """
    return previous.keys() == current.keys() and all(np.array_equal(previous[name], current[name]) for name in current)


def combine(*digests: int) -> int:
    """Add partial digests up, modulo 2**64."""
    return sum(digests) % 2**64


def encode_digests(digests_T: Digests) -> bytes:
    """Return digests in wire format: unsigned 64-bit little-endian integers."""
    return digests_T.astype("<u8").tobytes()


def decode_digests(encoded: bytes) -> Digests:
    """Decode the output of `encode_digests`. Raises `RefitError` for anything else."""
    if len(encoded) % 8:
        raise RefitError(f"{len(encoded)} bytes are not digests of 8 bytes each")
    return np.frombuffer(encoded, "<u8").astype(np.uint64)


class _Names:
    """Numbers for the tensors' names over all layouts. Layouts that share a tuple of tensors cost one lookup."""

    def __init__(self, members: Iterable[Held]) -> None:
        numbers: dict[str, int] = {}
        sizes: list[int] = []
        self._of_tuple: dict[int, NDArray[np.int64]] = {}
        """The numbers of each tuple of tensors, by its identity."""
        for layout, _ in members:
            if id(layout.tensors) not in self._of_tuple:
                tensor_numbers = []
                for tensor in layout.tensors:
                    tensor_numbers.append(numbers.setdefault(tensor.name, len(numbers)))
                    if len(numbers) > len(sizes):
                        sizes.append(max(1, math.prod(tensor.shape)))
                self._of_tuple[id(layout.tensors)] = np.array(tensor_numbers, np.int64)
        self.names = [*numbers]
        self._sizes_N = np.array(sizes, np.int64)

    def total(self, members: Mapping[str, Held]) -> Digests:
        """Return the sum of the processes' digests for each tensor."""
        total_N = np.zeros(len(self.names), np.uint64)
        for member, (layout, digests_T) in members.items():
            if len(digests_T) != len(layout.tensors):
                raise RefitError(f"{member} sent {len(digests_T)} digests for {len(layout.tensors)} tensors")
            total_N[self._of_tuple[id(layout.tensors)]] += digests_T
        return total_N

    def times_held(
        self, engine: str, members: Mapping[str, Held], is_digested_N: NDArray[np.bool_]
    ) -> NDArray[np.uint64]:
        """Return how many copies of each tensor the processes hold together."""
        elements_N = np.zeros(len(self.names), np.int64)
        for layout, _ in members.values():
            pieces = layout.pieces
            num_T = np.bincount(pieces.tensor_P, pieces.shape_PD.prod(axis=1), len(layout.tensors))
            elements_N[self._of_tuple[id(layout.tensors)]] += num_T.astype(np.int64)  # exact below 2**53 elements
        times_N, left_N = np.divmod(elements_N, self._sizes_N)
        uneven = np.flatnonzero((left_N > 0) & is_digested_N)
        if len(uneven):
            name = self.names[int(uneven[0])]
            raise RefitError(f"{engine} holds some elements of {name} more often than others: cannot verify it")
        return times_N.astype(np.uint64)
