"""The loss of the refit service: what its replacement is told, and what waits for it meanwhile.

lost ─▶ replaced ─▶ it is told the layouts that processes still have ─▶ the version is verified once more

Weights go on moving, by the installed programs. Only the comparison of digests waits, and begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.errors import DeadlineExceeded
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.engines.table import EngineStatus
from tandem.coordinator.scheduler.engines.transfers import SERVICE, TransferPlanner
from tandem.coordinator.scheduler.events import Action, ReplaceEngine
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.weights.verification import VersionVerification


class RefitServicePresence(Tracked):
    """Whether the refit service is there, and the progress of its replacement."""

    def __init__(
        self,
        spec: RunSpec,
        requests: PendingRequests,
        transfers: TransferPlanner,
        verification: VersionVerification,
        changed: Changed,
    ) -> None:
        super().__init__(changed)
        self._join_s = spec.deadlines.join
        self._requests = requests
        self._transfers = transfers
        self._verification = verification
        self.is_absent = False
        """Whether a replacement is awaited."""
        self._replace_by = 0.0

    def replace(self, reason: str) -> list[Action]:
        """Ask for a replacement."""
        self._requests.drop(SERVICE)
        self._verification.forget_comparison()
        self.is_absent = True
        self._replace_by = self._requests.now + self._join_s
        return [ReplaceEngine(process=SERVICE, reason=reason)]

    def take_joined(self, trainers: Sequence[str], engines: Sequence[str]) -> list[Action]:
        """Tell the replacement which layouts the processes hold and want."""
        self.is_absent = False
        return [self._transfers.request_plan(trainers, engines)]

    def overdue(self) -> DeadlineExceeded | None:
        """Return the error for an overdue replacement."""
        if not self.is_absent or self._requests.now <= self._replace_by:
            return None
        message = f"no process has taken its place within {self._join_s:g} s"
        return DeadlineExceeded(SERVICE, EngineStatus.ABSENT.value, message)
