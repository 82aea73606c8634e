"""What a publication has been so far, until all of it is proven and goes into the journal."""

from __future__ import annotations

from tandem.common.messages import TransfersPlanned
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.events import RecordRefit


class RefitProgress(Tracked):
    """What a publication has been so far."""

    def __init__(self, changed: Changed, *, started_at: float = 0.0, deadline: float = 0.0) -> None:
        super().__init__(changed)
        self.deadline = deadline
        self.seconds: dict[str, float] = {}
        self.engines: list[str] = []
        self.quarantined: dict[str, str] = {}
        self.digest: int | None = None
        """Of the version, once it is known."""
        self.num_failures_to_send: dict[str, int] = {}
        self._since = started_at

    def transferred(self, now: float) -> None:
        """Every engine holds the version."""
        self._note("transfer", now)

    def attested(self, now: float) -> None:
        """All digests are here."""
        self._note("attest" if "transfer" in self.seconds else "transfer", now)

    def committed(self, version: int, plan: TransfersPlanned, now: float) -> RecordRefit:
        """Return what goes into the journal: the refit service has compared all digests."""
        assert self.digest is not None, "it comes with the comparison"
        self._note("commit", now)
        return RecordRefit(
            version=version,
            engines=tuple(sorted(set(self.engines))),
            seconds=self.seconds,
            digest=self.digest,
            predicted_s=plan.predicted_s,
            bound_s=plan.bound_s,
            quarantined=self.quarantined,
        )

    def _note(self, phase: str, now: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
