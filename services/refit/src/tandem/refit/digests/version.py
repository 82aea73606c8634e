"""The digests of one version: changing tensors, frozen tensors, and a check of merged weights.

Frozen tensors are digested once, in full, with the first version after a program is bound. The result for each version
still covers all tensors, so the comparison need not know which are frozen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from tandem.refit.digests.comparison import Digests
from tandem.refit.digests.task import DigestTask


class FrozenDigests:
    """The digests of frozen tensors, computed once."""

    def __init__(self, task: DigestTask) -> None:
        """Start from a task that computes them."""
        self._task = task
        self._known: Digests | None = None

    @property
    def expected_s(self) -> float:
        """Rough seconds until the digests are known."""
        return self._task.expected_s if self._known is None else 0.0

    def advance(self, seconds: float) -> bool:
        """Work for this long; return whether the digests are known."""
        if self._known is None and self._task.advance(seconds):
            self._known = self._task.result()
        return self._known is not None

    def result(self) -> Digests:
        """Finish the work, and return the digests, one per tensor."""
        self.advance(math.inf)
        assert self._known is not None, "the task was run to its end"
        return self._known


class VersionDigest:
    """The digests of a version: changing tensors by a `DigestTask`, frozen ones, and a check of merged weights."""

    def __init__(self, changing: DigestTask, frozen: FrozenDigests, merges: Iterator[None], merges_s: float) -> None:
        """Set the work up; `merges` checks the merged weights step by step, in about `merges_s` altogether.

        It raises `RefitError` at a difference.
        """
        self._changing = changing
        self._frozen = frozen
        self._merges = merges
        self.expected_s = changing.expected_s + frozen.expected_s + merges_s
        """Rough duration on an idle machine, in seconds."""

    def advance(self, seconds: float) -> bool:
        """Work for this long, or a little longer; return whether everything is done."""
        deadline = time.perf_counter() + seconds
        if not self._frozen.advance(seconds) or not self._changing.advance(deadline - time.perf_counter()):
            return False
        return all(time.perf_counter() < deadline for _ in self._merges)

    def result(self) -> Digests:
        """Finish the work, and return this process's partial digest of each tensor."""
        self.advance(math.inf)
        return self._changing.result() + self._frozen.result()

    def results(self) -> tuple[Digests]:
        """Return `result` as that of the only worker of a process."""
        return (self.result(),)
