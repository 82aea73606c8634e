"""Verification: prove that engines hold what trainers held, by digests taken beside what goes on.

digests are asked for ─▶ all of them have come ─▶ the refit service compares them ─▶ equal: the engine is verified

`RefitProgress` is what goes into the journal once that is so for all engines.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.messages import Attest, CommitVersion, TransfersPlanned, VersionCommitted
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.engines.table import Engine, EngineTable, Status
from tandem.coordinator.scheduler.engines.transfers import SERVICE, by_part
from tandem.coordinator.scheduler.events import Action, Dispatch, RecordRefit
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec


class Verification:
    """The digests of one version, as far as they are known, and the processes that are yet to send theirs."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, engines: EngineTable, changed: Changed) -> None:
        self._changed = changed
        self._is_verified = spec.is_verified
        self._requests = requests
        self._engines = engines
        self._digests: dict[str, dict[str, bytes]] = {}
        """Of each process, by worker shard; of what it holds."""
        self._unattested: set[str] = set()
        """Processes that were asked for digests and have not sent them."""
        self._unattested_trainers: set[str] = set()
        """Those of them whose weights must not change before."""
        self._comparing: list[str] | None = None
        """Engines whose digests the refit service compares; None while it compares none."""

    @property
    def is_going_on(self) -> bool:
        """Whether it is yet to be proven that an engine holds what it should."""
        if not len(self._engines):
            return False
        is_asked = bool(self._unattested) or self._comparing is not None
        return is_asked or self._engines.num_attested != self._engines.num_having(Status.HOLDING)

    @property
    def needs_trainers(self) -> bool:
        """Whether trainers are yet to take digests of weights that must not change before."""
        return bool(self._unattested_trainers)

    @property
    def may_compare(self) -> bool:
        """Whether every digest is there that was asked for, and some engine's was not compared."""
        if self._unattested or self._comparing is not None:
            return False
        return self._engines.num_attested != self._engines.num_having(Status.HOLDING)

    def begin_version(self) -> None:
        """Forget the digests of the version before."""
        self._digests = {}
        self._changed()

    def order(self, members: Sequence[str], version: int, allowed_s: float) -> list[Action]:
        """Have digests taken of what these members hold, unless the run is not to be verified."""
        if not self._is_verified:
            return []
        self._unattested.update(members)
        self._unattested_trainers.update(member for member in members if member not in self._engines)
        self._changed()
        return [
            Dispatch(
                member=member,
                order=Attest(version=version, **self._requests.open(member, Phase.ATTESTING, allowed_s)),
            )
            for member in members
        ]

    def take_digests(self, member: str, digests: tuple[bytes, ...]) -> None:
        """Take the digests of what a member holds, or of what a trainer has copied."""
        self._digests[member] = by_part(member, digests)
        self._unattested.discard(member)
        self._unattested_trainers.discard(member)
        self._changed()

    def compare(self, trainers: Sequence[str], version: int, allowed_s: float, *, has_update: bool) -> list[Action]:
        """Have the refit service compare the digests of engines that are not attested with those of trainers."""
        waiting = [name for name in self._engines.having(Status.HOLDING) if not self._engines[name].is_attested]
        self._comparing = waiting
        self._changed()
        known = [self._digests[name] for name in [*trainers, *waiting]] if self._is_verified else []
        order = CommitVersion(
            version=version,
            digests={part: digests for process in known for part, digests in process.items()},
            has_update=has_update,
            **self._requests.open(SERVICE, Phase.ATTESTING, allowed_s),
        )
        return [Dispatch(member=SERVICE, order=order)]

    def take_compared(self, reply: VersionCommitted) -> tuple[list[Engine], list[Engine]]:
        """Take what the refit service has found; return the engines that are attested now, and those that differ."""
        compared, self._comparing = self._comparing or [], None
        self._changed()
        engines = [self._engines[name] for name in compared if name in self._engines]
        attested = [engine for engine in engines if engine.name not in reply.differing]
        for engine in attested:
            self._engines.attest(engine, is_attested=True)
        return attested, [engine for engine in engines if engine.name in reply.differing]

    def forget_comparison(self) -> None:
        """Take note that the refit service compares nothing any more: it is lost."""
        self._comparing = None
        self._changed()

    def prove_again(self, version: int) -> None:
        """Have engines that hold a version, and had been proven to, proven by digests that are known."""
        for name in self._engines.having(Status.HOLDING):
            engine = self._engines[name]
            if engine.version == version and (name in self._digests or not self._is_verified):
                self._engines.attest(engine, is_attested=False)

    def forget(self, engine: str) -> None:
        """Take note that what an engine held does not count any more: it is lost, or torn."""
        self._digests.pop(engine, None)
        self._unattested.discard(engine)
        if self._comparing is not None and engine in self._comparing:
            self._comparing.remove(engine)
        self._changed()


class RefitProgress(Tracked):
    """What a version has gone through so far, until all of it is verified and goes into the journal."""

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
