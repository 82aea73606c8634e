"""Verification that engines hold the trainers' weights, by digests taken while the run goes on.

digests are asked for ─▶ all of them have come ─▶ the refit service compares them ─▶ equal: the engine is verified

`RefitProgress` goes into the journal once all engines are verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.messages import CommitVersion, ReportDigests, TransfersPlanned, VersionCommitted
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.engines.table import Engine, EngineTable, Status
from tandem.coordinator.scheduler.engines.transfers import SERVICE, by_part
from tandem.coordinator.scheduler.events import Action, Dispatch, RecordRefit
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec


class Verification:
    """The digests of one version that are known so far, and the processes that have yet to send theirs."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, engines: EngineTable, changed: Changed) -> None:
        self._changed = changed
        self._is_verified = spec.is_verified
        self._requests = requests
        self._engines = engines
        self._digests: dict[str, dict[str, bytes]] = {}
        """Digests of the weights that each process holds, by slice."""
        self._unverified: set[str] = set()
        """Processes that were asked for digests and have not sent them."""
        self._unverified_trainers: set[str] = set()
        """The trainers among them. Their weights must not change before."""
        self._comparing: list[str] | None = None
        """Engines with digests that the refit service is comparing; None if it compares none."""

    @property
    def is_going_on(self) -> bool:
        """Whether an engine has yet to be verified."""
        if not len(self._engines):
            return False
        is_asked = bool(self._unverified) or self._comparing is not None
        return is_asked or self._engines.num_verified != self._engines.num_having(Status.HOLDING)

    @property
    def needs_trainers(self) -> bool:
        """Whether trainers have yet to take digests of weights that must not change before."""
        return bool(self._unverified_trainers)

    @property
    def may_compare(self) -> bool:
        """Whether all requested digests are there, and those of some engine were not compared."""
        if self._unverified or self._comparing is not None:
            return False
        return self._engines.num_verified != self._engines.num_having(Status.HOLDING)

    def begin_version(self) -> None:
        """Forget the digests of the version before."""
        self._digests = {}
        self._changed()

    def command(self, processes: Sequence[str], version: int, allowed_s: float) -> list[Action]:
        """Take digests of the weights that these processes hold, unless the run does not verify."""
        if not self._is_verified:
            return []
        self._unverified.update(processes)
        self._unverified_trainers.update(process for process in processes if process not in self._engines)
        self._changed()
        return [
            Dispatch(
                process=process,
                command=ReportDigests(version=version, **self._requests.open(process, Phase.VERIFYING, allowed_s)),
            )
            for process in processes
        ]

    def take_digests(self, process: str, digests: tuple[bytes, ...]) -> None:
        """Note the digests of the weights that a process holds, or that a trainer has copied."""
        self._digests[process] = by_part(process, digests)
        self._unverified.discard(process)
        self._unverified_trainers.discard(process)
        self._changed()

    def compare(self, trainers: Sequence[str], version: int, allowed_s: float, *, has_update: bool) -> list[Action]:
        """Compare the digests of unverified engines with those of trainers, on the refit service."""
        waiting = [name for name in self._engines.having(Status.HOLDING) if not self._engines[name].is_verified]
        self._comparing = waiting
        self._changed()
        known = [self._digests[name] for name in [*trainers, *waiting]] if self._is_verified else []
        command = CommitVersion(
            version=version,
            digests={part: digests for process in known for part, digests in process.items()},
            has_update=has_update,
            **self._requests.open(SERVICE, Phase.VERIFYING, allowed_s),
        )
        return [Dispatch(process=SERVICE, command=command)]

    def take_compared(self, reply: VersionCommitted) -> tuple[list[Engine], list[Engine]]:
        """Take the result of the refit service; return the engines that are now verified, and those that differ."""
        compared, self._comparing = self._comparing or [], None
        self._changed()
        engines = [self._engines[name] for name in compared if name in self._engines]
        verified = [engine for engine in engines if engine.name not in reply.differing]
        for engine in verified:
            self._engines.verify(engine, is_verified=True)
        return verified, [engine for engine in engines if engine.name in reply.differing]

    def forget_comparison(self) -> None:
        """Note that the refit service is lost, and its comparison with it."""
        self._comparing = None
        self._changed()

    def prove_again(self, version: int) -> None:
        """Verify engines again that hold a version and were verified, with the digests that are known."""
        for name in self._engines.having(Status.HOLDING):
            engine = self._engines[name]
            if engine.version == version and (name in self._digests or not self._is_verified):
                self._engines.verify(engine, is_verified=False)

    def forget(self, engine: str) -> None:
        """Forget the digests of an engine that is lost or invalidated."""
        self._digests.pop(engine, None)
        self._unverified.discard(engine)
        if self._comparing is not None and engine in self._comparing:
            self._comparing.remove(engine)
        self._changed()


class RefitProgress(Tracked):
    """The record of a version so far, which goes into the journal once all of it is verified."""

    def __init__(self, changed: Changed, *, started_at: float = 0.0, deadline: float = 0.0) -> None:
        super().__init__(changed)
        self.deadline = deadline
        self.seconds: dict[str, float] = {}
        self.engines: list[str] = []
        self.quarantined: dict[str, str] = {}
        self.digest: int | None = None
        """The digest of the version, once it is known."""
        self.num_failures_to_send: dict[str, int] = {}
        self._since = started_at

    def transferred(self, now: float) -> None:
        """Note that every engine holds the version."""
        self._note("transfer", now)

    def verified(self, now: float) -> None:
        """Note that all digests are here."""
        self._note("attest" if "transfer" in self.seconds else "transfer", now)

    def committed(self, version: int, plan: TransfersPlanned, now: float) -> RecordRefit:
        """Return the journal entry: the refit service has compared all digests."""
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
