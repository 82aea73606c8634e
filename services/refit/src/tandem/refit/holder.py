"""The interface of what takes part in refits: a trainer's weights, or an engine's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from tandem.refit.digests import comparison
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.program import TransferProgram
from tandem.refit.transfer import TransferGroup
from tandem.refit.transports.meeting import GroupStore


class InstalledPrograms(Protocol):
    """Bound programs, as each refit runs them."""

    @property
    def num_copies(self) -> int:
        """Number of copies in one run."""
        ...

    @property
    def num_bytes(self) -> int:
        """Number of bytes that one run moves."""
        ...


class RunningDigest(Protocol):
    """A digest in progress; see `DigestTask`."""

    @property
    def expected_s(self) -> float:
        """Rough duration on an idle machine, in seconds."""
        ...

    def advance(self, seconds: float) -> bool:
        """Work for this long; return whether everything is done."""
        ...

    def results(self) -> tuple[comparison.Digests, ...]:
        """Return the digests of each worker."""
        ...


class WeightHolder(Protocol):
    """Weights that take part in refits: a trainer's (`tandem.refit.weights.Weights`) or an engine, with its workers."""

    def install(self, programs: Sequence[TransferProgram]) -> InstalledPrograms:
        """Bind the program of each worker, replacing the previous one. Raises `RefitError`."""
        ...

    def connect(self, transfer_group: TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
        """Connect a transfer group for each worker in it, replacing an earlier connection. Raises `RefitError`."""
        ...

    def apply(
        self, version: int, deadline_s: float, only: Collection[str], joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Run the program: receive or send `version`; return the bytes on each link. Raises `RefitError`.

        `only` are the destinations to serve; empty for all. `joining_engines` are those among them that also get frozen
        tensors; None for all.
        """
        ...

    def distrust(self, engines: Collection[str]) -> None:
        """Send these engines whole weights next time. Engines do nothing: only trainers send differences."""
        ...

    def digest_task(self, sampling: ElementSampling | None) -> RunningDigest:
        """Return a task that digests the weights, which must not change until it is done. Raises `RefitError`."""
        ...

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors that differ from the quantisation of the received weights."""
        ...
