"""The newest version of the weights: its way from the trainers to each engine, and its verification.

A version reaches every engine in one transaction, with one deadline::

    refit ─▶ the engine holds the version ─▶ digests ─▶ compared: verified ─▶ recorded
                                             `── beside generation; no sample is trained on before the end ──┘

If trainers keep a copy for engines to read (`RunSpec.keeps_copy`), a version begins with that copy and its digests.
Trainers go on at once. Engines, also late ones, read the copy until the next one is requested. That happens when no
engine reads it and all that was read is verified. A version that no engine had time for is skipped.

`Weights` knows how far the version is. The rule that brings it to engines is in `rules.publishing`. Engines that are
lost or invalidated meanwhile are handled in `rules.recovery`.
"""

from __future__ import annotations

from tandem.common.messages import CopyWeights
from tandem.coordinator.scheduler.agenda import Changed, Tracked
from tandem.coordinator.scheduler.engines.table import Engine, EngineTable, Status
from tandem.coordinator.scheduler.engines.transfers import TransferGroups, Transfers
from tandem.coordinator.scheduler.events import Action, Dispatch, Say
from tandem.coordinator.scheduler.phases import Phase
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.weights.verification import RefitProgress, Verification


class Weights(Tracked):
    """The newest version of the trainers' weights, on its way to engines."""

    def __init__(
        self, spec: RunSpec, requests: PendingRequests, engines: EngineTable, transfers: Transfers, changed: Changed
    ) -> None:
        super().__init__(changed)
        self.spec = spec
        self.requests = requests
        self.engines = engines
        self.transfers = transfers
        self.version = -1
        """The version that trainers hold, or held before the step in progress."""
        self.has_update = False
        """Whether it must differ from the version before."""
        self.is_readable = False
        """Whether trainers, or their copies, still have it, so that engines can be brought to it."""
        self._uncopied: set[str] = set()
        """Trainers that have yet to copy it."""
        self.is_begun = False
        """Whether any engine was sent it."""
        self.is_transferred = False
        """Whether every engine that it was begun with holds it, and digests are taken."""
        self.num_behind = 0
        """Engines that hold an older version than the newest one."""
        self.trainers: list[str] = []
        self.record = RefitProgress(changed)
        self.verification = Verification(spec, requests, engines, changed)
        self.transfer_groups = TransferGroups(transfers, engines, requests, changed)
        self.may_address_all = True
        """Whether a refit can address all processes with a program without naming them, as no engine has left."""

    # --- what the scheduler asks -------------------------------------------------------------------------------------

    @property
    def is_transferring(self) -> bool:
        """Whether the version that trainers hold is on its way to its first engines."""
        if self._uncopied:
            return len(self.engines) > 0
        is_on_its_way = self.is_begun or self.spec.is_synchronous
        return self.is_readable and is_on_its_way and not self.is_transferred and len(self.engines) > 0

    @property
    def holds_up_step(self) -> bool:
        """Whether the step that has made the version waits for that."""
        return self.is_transferring and (bool(self._uncopied) or not self._outlasts_step)

    @property
    def is_settled(self) -> bool:
        """Whether every engine has what it needs of the trainers' version, and that is verified."""
        if not len(self.engines):
            return True
        is_read = self.is_transferred and not self.engines.num_having(Status.REFITTING)
        return is_read and not self.is_verifying and self.is_everything_verified()

    @property
    def is_verifying(self) -> bool:
        """Whether an engine has yet to be verified."""
        return self.verification.is_going_on

    @property
    def may_offer(self) -> bool:
        """Whether no engine reads the version before, and what was read is verified."""
        return not self.is_verifying and not self.engines.num_having(Status.REFITTING)

    @property
    def may_step(self) -> bool:
        """Whether trainers may change their weights, because no engine needs the old ones or there is a copy.

        Synchronous training also waits until they are verified. Otherwise verification goes on beside the step.
        """
        if self.spec.is_synchronous or not len(self.engines):
            return self.is_settled
        if self._outlasts_step:
            return self.is_readable
        is_read = self.is_transferred and not self.num_behind
        is_read &= not self.engines.num_having(Status.READY, Status.REFITTING)
        return is_read and not self.verification.needs_trainers

    def is_proven(self, name: str, version: int) -> bool:
        """Tell whether the samples that an engine made with a version, and before, were made with verified weights."""
        engine = self.engines.get(name)
        # No engine takes a version before its present one is verified.
        return engine is None or version < engine.version or engine.is_verified

    def can_generate(self, engine: str, oldest_version: int, newest_version: int) -> bool:
        """Tell whether an engine holds weights within these bounds, and need not finish its samples to take others."""
        state = self.engines.get(engine)
        return (
            state is not None
            and state.status is Status.HOLDING
            and state.leave_by is None
            and self._is_transferred_to(state)
            and (self.spec.updates_in_flight or not self.is_behind(state))
            and oldest_version <= state.version <= newest_version
        )

    @property
    def _outlasts_step(self) -> bool:
        """Whether engines can read a version while trainers step: there is a copy, and no trainer has to send it."""
        return self.spec.keeps_copy and not self.transfers.plan.senders

    def _is_transferred_to(self, engine: Engine) -> bool:
        """Tell whether an engine may serve tokens. In synchronous training, the others must hold it as well."""
        if not self.spec.is_synchronous:
            return True
        return self.is_transferred or engine.version < self.version or not self.is_readable

    # --- what the rules in `publishing` ask --------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether every engine has the version, and all of it is verified and recorded, as is usual."""
        if not len(self.engines):
            return True
        is_read = self.is_transferred and not self.num_behind
        return is_read and self.engines.num_verified == len(self.engines) and not self.record.engines

    def is_everything_verified(self) -> bool:
        """Tell whether every engine is verified; in synchronous training, also whether all hold the version."""
        expected = len(self.engines) if self.spec.is_synchronous else self.engines.num_having(Status.HOLDING)
        return self.engines.num_verified == expected

    def is_behind(self, engine: Engine) -> bool:
        """Tell whether an engine can be brought to a newer version than its own."""
        return self.is_readable and engine.status is Status.HOLDING and engine.version < self.version

    def verify(self, processes: list[str]) -> list[Action]:
        """Take digests of the version on these processes."""
        return self.verification.command(processes, self.version, self.remaining_s())

    def begin_record(self, deadline: float) -> None:
        """Begin a new record of the version; `deadline` is that of its refit."""
        self.record = RefitProgress(self._changed, started_at=self.requests.now, deadline=deadline)

    def remaining_s(self) -> float:
        """Return the rest of the refit's deadline, at least a little, so that a late error is the command's own."""
        return max(self.record.deadline - self.requests.now, 1.0)

    # --- what the scheduler says -------------------------------------------------------------------------------------

    def begin(self, trainers: list[str], engines: list[str]) -> list[Action]:
        """Enter the processes of the run, now that transfers are planned, installed and connected."""
        self.trainers = trainers
        self.engines.fill(engines)
        if not self.spec.keeps_copy or self._outlasts_step:
            return []
        return [
            Say(
                text="refit.keep_copy changes nothing but memory here: trainers send weights to engines themselves, "
                "and step only then"
            )
        ]

    def offer(self, version: int, *, has_update: bool) -> list[Action]:
        """Note that trainers hold a version, which engines may be brought to until `withdraw`, or copy it.

        Call it only when `may_offer`.
        """
        is_skipped = self.version >= 0 and not self.is_begun
        self.version = version
        self.has_update = has_update or (is_skipped and self.has_update)
        self.is_begun = self.is_transferred = False
        for name in self.engines:
            self.engines[name].num_failures = 0
        self.verification.begin_version()
        if not self.spec.keeps_copy:
            self._make_readable()
            return []
        self.is_readable = False
        self._uncopied = {*self.trainers}
        return [
            Dispatch(
                process=rank,
                command=CopyWeights(
                    version=version,
                    with_digests=self.spec.is_verified,
                    **self.requests.open(rank, Phase.COPYING, self.spec.deadlines.refit),
                ),
            )
            for rank in self.trainers
        ]

    def withdraw(self) -> None:
        """Note that trainers begin to step. The version can no longer be read, unless from a copy."""
        self.is_readable = self._outlasts_step

    def resume(self) -> None:
        """Note that trainers have not stepped. The version can be read as before `withdraw`."""
        self.is_readable = True

    def stop(self) -> None:
        """Ask nothing more of engines, because the run is being interrupted."""
        self.transfer_groups.stop()
        self.engines.fill([])
        self.is_transferred = False

    def take_copied(self, trainer: str, digests: tuple[bytes, ...]) -> None:
        """Note that a trainer has copied the version. Once all have, engines can read it."""
        self.verification.take_digests(trainer, digests)
        self._uncopied = self._uncopied - {trainer}
        if not self._uncopied:
            self._make_readable()

    def take_service(self) -> None:
        """Note that a replacement of the refit service is able. What was verified is verified again."""
        self.record.deadline = max(self.record.deadline, self.requests.now + self.spec.deadlines.refit)
        if self.is_transferred:
            self.verification.prove_again(self.version)

    def forget(self, engine: Engine) -> None:
        """Forget an engine's weights: neither their digests nor the samples made with them count."""
        self.num_behind -= self.is_behind(engine)
        engine.has_frozen = False
        self.verification.forget(engine.name)
        self.engines.invalidate(engine.name)

    def expect_one(self) -> None:
        """Note that one engine is to be brought to the version by itself, if the others hold it."""
        if not self.record.seconds:
            self.begin_record(self.record.deadline)

    def _make_readable(self) -> None:
        self.is_readable = True
        self.num_behind = self.engines.num_having(Status.HOLDING)
