"""What a process digests of one version: what changes, what does not, and whether a merge is right.

Digests of what never changes are taken with the first version after a program is bound, in full, and kept. Those of
each version are of all that the process holds all the same, so whoever compares them need not know.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from tandem.refit.digests.comparison import Digests
from tandem.refit.digests.task import DigestTask


class FrozenDigests:
    """The digests of what never changes, once they are known."""

    def __init__(self, task: DigestTask) -> None:
        """Begin with a task that takes them."""
        self._task = task
        self._known: Digests | None = None

    @property
    def expected_s(self) -> float:
        """Roughly the seconds that it will take."""
        return self._task.expected_s if self._known is None else 0.0

    def advance(self, seconds: float) -> bool:
        """Work for this long; return whether everything is known."""
        if self._known is None and self._task.advance(seconds):
            self._known = self._task.result()
        return self._known is not None

    def result(self) -> Digests:
        """Return the digests, one a tensor."""
        self.advance(math.inf)
        assert self._known is not None, "the task was run to its end"
        return self._known


class VersionDigest:
    """The digests of a version: of what changes, by a `DigestTask`, of what does not, and a check of merged weights."""

    def __init__(self, changing: DigestTask, frozen: FrozenDigests, merges: Iterator[None], merges_s: float) -> None:
        """`merges` checks some more of the merged weights at each step, in all for about `merges_s`.

        It raises `RefitError` where one differs.
        """
        self._changing = changing
        self._frozen = frozen
        self._merges = merges
        self.expected_s = changing.expected_s + frozen.expected_s + merges_s
        """Roughly the seconds that it takes where nothing else runs."""

    def advance(self, seconds: float) -> bool:
        """Work for this long, or a little longer; return whether everything is done."""
        deadline = time.perf_counter() + seconds
        if not self._frozen.advance(seconds) or not self._changing.advance(deadline - time.perf_counter()):
            return False
        return all(time.perf_counter() < deadline for _ in self._merges)

    def result(self) -> Digests:
        """Return this process's share of the digest of each tensor; does what is left to do."""
        self.advance(math.inf)
        return self._changing.result() + self._frozen.result()

    def results(self) -> tuple[Digests]:
        """Return `result`, as that of the only worker shard of a process."""
        return (self.result(),)
