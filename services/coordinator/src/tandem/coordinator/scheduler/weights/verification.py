"""Verification that engines hold the trainers' weights: by bytes counted, and by digests.

digests are asked for ─▶ all of them have come ─▶ the refit service compares them ─▶ equal: the engine is verified

`RefitProgress` goes into the journal once all engines are verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.errors import CommandFailed
from tandem.common.messages import CommitVersion, Refitted, ReportDigests, TransfersPlanned
from tandem.common.worker_shards import map_by_shard, process_of
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.engines.table import EngineStatus, EngineTable
from tandem.coordinator.scheduler.engines.transfers import SERVICE, TransferPlanner
from tandem.coordinator.scheduler.events import Action, DispatchCommand, RecordRefit
from tandem.coordinator.scheduler.phases import RunPhase
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec


class VersionVerification:
    """The digests of one version that are known so far, and the processes that have yet to send theirs."""

    def __init__(
        self,
        spec: RunSpec,
        requests: PendingRequests,
        engines: EngineTable,
        transfers: TransferPlanner,
        changed: Changed,
    ) -> None:
        self._changed = changed
        self._spec = spec
        self._transfers = transfers
        self._is_verified = spec.is_verified
        self._requests = requests
        self._engines = engines
        self._digests: dict[str, dict[str, bytes]] = {}
        """Digests of the weights that each process holds, by slice."""
        self.awaited: set[str] = set()
        """Processes that were asked for digests and have not sent them."""
        self.comparing: list[str] | None = None
        """Engines with digests that the refit service is comparing; None if it compares none."""
        self._joining_engines: dict[int, tuple[str, ...]] = {}
        """The engines that also get the weights that never change, by the id of the pending refit command."""

    @property
    def is_going_on(self) -> bool:
        """Whether an engine has yet to be verified."""
        is_asked = bool(self.awaited) or self.comparing is not None
        return len(self._engines) > 0 and (is_asked or self._engines.are_any_unverified)

    @property
    def needs_trainers(self) -> bool:
        """Whether trainers have yet to take digests of weights that must not change before."""
        return any(process not in self._engines for process in self.awaited)

    def note_joining(self, command_id: int, joining_engines: tuple[str, ...]) -> None:
        """Note the engines that also get the weights that never change with this refit."""
        self._joining_engines[command_id] = joining_engines

    def check_bytes(self, process: str, reply: Refitted) -> None:
        """Raise `CommandFailed` if a link carried more or fewer bytes than planned; differences may be fewer."""
        plan, joining_engines = self._transfers.plan, self._joining_engines.pop(reply.command_id, ())
        for link, counted in reply.num_bytes.items():
            planned = plan.num_bytes.get(link)
            if joining_engines and process_of(link.rpartition(">")[2]) in joining_engines:
                frozen = plan.num_bytes_frozen.get(link)
                planned = planned if frozen is None else (planned or 0) + frozen
            is_fewer = self._spec.sends_differences and planned is not None and counted <= planned
            if counted != planned and not is_fewer:
                mismatch = f"{counted} bytes were counted on {link}, where {planned or 'none'} were planned"
                raise CommandFailed(process, RunPhase.REFITTING.value, mismatch)

    def begin_version(self) -> None:
        """Forget the digests of the version before."""
        self._digests = {}
        self._changed()

    def request_digests(self, processes: Sequence[str], version: int, allowed_s: float) -> list[Action]:
        """Take digests of the version on these processes, unless the run does not verify."""
        if not self._is_verified:
            return []
        self.awaited.update(processes)
        self._changed()
        actions: list[Action] = []
        for process in processes:
            fields = self._requests.open(process, RunPhase.VERIFYING, allowed_s)
            actions.append(DispatchCommand(process=process, command=ReportDigests(version=version, **fields)))
        return actions

    def take_digests(self, process: str, digests: tuple[bytes, ...]) -> None:
        """Note the digests of the weights that a process holds, or that a trainer has copied."""
        self._digests[process] = map_by_shard(process, digests)
        self.awaited.discard(process)
        self._changed()

    def compare(self, trainers: Sequence[str], version: int, allowed_s: float, *, has_update: bool) -> list[Action]:
        """Compare the digests of unverified engines with those of trainers, on the refit service."""
        waiting = [name for name in self._engines.having(EngineStatus.HOLDING) if not self._engines[name].is_verified]
        self.comparing = waiting
        self._changed()
        digests: dict[str, bytes] = {}
        for name in [*trainers, *waiting] if self._is_verified else []:
            digests |= self._digests[name]
        command = CommitVersion(
            version=version,
            digests=digests,
            has_update=has_update,
            **self._requests.open(SERVICE, RunPhase.VERIFYING, allowed_s),
        )
        return [DispatchCommand(process=SERVICE, command=command)]

    def end_comparison(self) -> list[str]:
        """Note that the refit service has compared digests; return the engines that they are of."""
        compared, self.comparing = self.comparing or [], None
        self._changed()
        return compared

    def forget_comparison(self) -> None:
        """Note that the refit service is lost, and its comparison with it."""
        self.comparing = None
        self._changed()

    def prove_again(self, version: int) -> None:
        """Verify engines again that hold a version and were verified, with the digests that are known."""
        for name in self._engines.having(EngineStatus.HOLDING):
            engine = self._engines[name]
            if engine.version == version and (name in self._digests or not self._is_verified):
                self._engines.verify(engine, is_verified=False)

    def forget(self, engine: str) -> None:
        """Forget the digests of an engine that is lost or invalidated."""
        self._digests.pop(engine, None)
        self.awaited.discard(engine)
        if self.comparing is not None and engine in self.comparing:
            self.comparing.remove(engine)
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

    def committed(self, version: int, plan: TransfersPlanned, now: float) -> RecordRefit:
        """Return the journal entry: the refit service has compared all digests."""
        assert self.digest is not None, "it comes with the comparison"
        self.note("commit", now)
        return RecordRefit(
            version=version,
            engines=tuple(sorted(set(self.engines))),
            seconds=self.seconds,
            digest=self.digest,
            predicted_s=plan.predicted_s,
            bound_s=plan.bound_s,
            quarantined=self.quarantined,
        )

    def note(self, phase: str, now: float) -> None:
        """Note the end of a phase: `transfer` ends when every engine holds the version, `verify` with the digests."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now
