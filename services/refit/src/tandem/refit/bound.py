"""Transfer programs bound to memory: each refit only runs them and looks up no tensor.

Every process of a refit binds its own program. In each round, frozen tensors come first. Of either kind, transfers that
the receiver copies run before those that are sent, ordered by transport name, the same at every process. So a process
with a part in the first unfinished transfer has finished everything before it, and no two processes wait for each
other.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch

from tandem.common.errors import RefitError
from tandem.common.worker_shards import process_of
from tandem.refit.installing import BoundMerging, BoundQuantisation
from tandem.refit.transports.process_group import poll
from tandem.refit.transports.transport import BoundTransfers

Rounds = Sequence[Sequence[tuple[bool, BoundTransfers]]]
"""Transfers by round; the flag marks those that move frozen tensors."""


class BoundProgram:
    """A transfer program bound to memory: its sources are open, its destinations are the process's live tensors."""

    staging: Mapping[str, torch.Tensor]
    """Memory beside the parameters, by its name in the program: inputs of quantising and merging."""
    num_copies: int
    num_bytes: int
    """Bytes that one run moves over this process's links, frozen tensors included."""
    merger: BoundMerging | None
    """Merger of weights and adapters, if the program merges."""

    def __init__(
        self,
        member: str,
        rounds: Rounds,
        quantisers: Sequence[BoundQuantisation],
        merger: BoundMerging | None,
        staging: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._member = member
        self._rounds = rounds
        self._quantisers = quantisers
        self.merger = merger
        self.staging = staging
        self._device = device
        self._is_closed = False
        self.num_copies = sum(bound.num_copies for round_ in rounds for _, bound in round_)
        self.num_bytes = sum(bound.num_bytes for round_ in rounds for _, bound in round_)

    def run(
        self, deadline_s: float, only: Collection[str] | None = None, joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Do this process's part of one refit, and return when all of it is done.

        Args:
            deadline_s: seconds until it fails.
            only: processes to serve, including this one if it is to receive; None for all.
            joining_engines: those among them that also get frozen tensors; None for all.

        Returns:
            bytes moved over each link, by ``source>destination``.

        Raises:
            RefitError: names this process, its operation, the peer and the tensor. Weights here may be partial.
                Links unrelated to the failure have been served.

        """
        assert not self._is_closed, "a program was run after it was closed"
        deadline = time.monotonic() + deadline_s
        counted: dict[str, int] = {}
        for round_ in self._rounds:
            errors: list[str] = []
            for is_frozen, bound in round_:
                try:
                    bound.run(deadline, joining_engines if is_frozen and joining_engines is not None else only, counted)
                except RefitError as error:
                    errors.append(str(error))
            if errors:
                raise RefitError("; ".join(errors))
        if only is None or process_of(self._member) in only:
            for quantiser in self._quantisers:
                if time.monotonic() > deadline:
                    raise RefitError(f"{self._member} failed while quantising: the deadline passed")
                quantiser.run()
            if self.merger is not None:
                self.merger.run(deadline)
        if self._device.type == "cuda":
            self._synchronise(deadline)
        return counted

    def distrust(self, engines: Collection[str]) -> None:
        """Send these engines whole weights next time, not what changed since those that they hold."""
        from tandem.refit.transports.differences import DifferenceStreams  # most runs need none of it

        for bound in (each for round_ in self._rounds for _, each in round_):
            if isinstance(bound, DifferenceStreams):
                bound.distrust(engines)

    def misquantised(self) -> tuple[str, ...]:
        """Quantise again, and return the tensors of which this process holds something else."""
        return tuple(name for quantiser in self._quantisers for name in quantiser.wrong())

    def close(self) -> None:
        """Release all memory. The groups that were given to `bind` stay open."""
        self._is_closed = True
        self._rounds = []
        self._quantisers = []
        self.merger = None
        self.staging = {}

    def _synchronise(self, deadline: float) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        if not poll(event.query, deadline):
            raise RefitError(f"{self._member} failed while installing: the deadline passed")
