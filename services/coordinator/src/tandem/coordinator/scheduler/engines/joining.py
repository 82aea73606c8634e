"""Engines on their way into the table of engines: new ones, and those that come back.

    joined ─▶ WAITING ─▶ BUILDING ─▶ BUILT ─▶ PLANNING ─▶ INSTALLING ─▶ enters the table, and is refitted as any other.
                             └─────────── cannot: it is let go, and the run goes on without it.

Other processes take no part in this: an engine that joins reads weights where they lie, by a program of its own. The
processes of a transfer group are fixed when the run begins. So an engine that needs streamed weights can only take the
place of an engine that has left; otherwise it is let go.

    lost ─▶ ABSENT ─▶ JOINED ─▶ BUILDING ─▶ INSTALLING ─▶ CONNECTING ─▶ refitted like any other.
    torn ────────────────────────────────────────────────────▲

An engine comes back a bounded number of times. After that, its error ends the run.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.common.messages import EngineBuilt, Reply, TransfersPlanned
from tandem.coordinator.scheduler.agenda import Changed
from tandem.coordinator.scheduler.engines.table import Engine, Engines, Status
from tandem.coordinator.scheduler.engines.transfers import TransferGroups, Transfers
from tandem.coordinator.scheduler.events import Action, Dispatch, Replace
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec

_STREAMED = (
    "weights would have to be streamed to it, and the senders are fixed when a run begins: start it on a host "
    "of trainers, or interrupt the run and go on with --resume and more cluster.rollouts"
)


class Stage(enum.Enum):
    """How far an engine is on its way into the table."""

    WAITING = "joined"
    BUILDING = "building"
    BUILT = "waiting for its transfers to be planned"
    PLANNING = "planning its transfers"
    INSTALLING = "installing its transfer program"


class Joining:
    """The engines that are joining."""

    def __init__(self, requests: PendingRequests, transfers: Transfers, changed: Changed) -> None:
        self._changed = changed
        self._requests = requests
        self._transfers = transfers
        self.stages: dict[str, Stage] = {}
        """The stage of each engine."""
        self.plan_request = 0
        """The newest command to plan transfers for engines in `PLANNING`."""
        self.refused: dict[str, str] = {}
        """The engines that cannot join, with the reason, until they are let go."""
        self.entered: list[str] = []
        """The engines that have entered the table. The reader empties it."""

    def __len__(self) -> int:
        return len(self.stages)

    def __contains__(self, name: str) -> bool:
        return name in self.stages

    @property
    def is_building(self) -> bool:
        """Whether an engine is built."""
        return bool(self._having(Stage.BUILDING))

    def planned(self) -> list[str]:
        """Return the engines with layouts that the refit service already knows."""
        return self._having(Stage.INSTALLING)

    def add(self, name: str) -> None:
        """Add an engine that has joined."""
        self.stages[name] = Stage.WAITING
        self._changed()

    def remove(self, name: str) -> None:
        """Stop waiting for an engine that is let go or lost."""
        del self.stages[name]
        self.refused.pop(name, None)
        self._requests.drop(name)
        self._changed()

    def go_on(
        self, trainers: Sequence[str], engines: Sequence[str], *, may_build: bool, is_service_able: bool
    ) -> list[Action]:
        """Build the engines that have joined, and plan transfers for those that are built."""
        joined = self._having(Stage.WAITING) if may_build else []
        self.stages |= dict.fromkeys(joined, Stage.BUILDING)
        actions: list[Action] = [self._transfers.request_build(name) for name in joined]
        built = self._having(Stage.BUILT)
        if built and is_service_able:
            command = self._transfers.request_plan(trainers, [*engines, *self.planned(), *built])
            self.plan_request = command.command.command_id
            self.stages |= dict.fromkeys(built, Stage.PLANNING)
            actions.append(command)
        return actions

    def take_reply(self, process: str, reply: Reply) -> tuple[list[Action], list[str]]:
        """Take an engine's reply, or the plan for some. Return also the engines that can now enter the table."""
        self._changed()
        match reply:
            case TransfersPlanned():
                return self._take_plan(reply), []
            case EngineBuilt(layouts=layouts):
                self._transfers.enter(process, layouts)
                self.stages[process] = Stage.BUILT
                return [], []
            case _:  # its program is installed
                del self.stages[process]
                return [], [process]

    def enter(self, name: str) -> None:
        """Note that an engine is in the table."""
        self.entered.append(name)
        self._changed()

    def refuse_planned(self, why: str) -> None:
        """Note that transfers cannot be planned for the engines in `PLANNING`."""
        self.refused |= dict.fromkeys(self._having(Stage.PLANNING), why)
        self._changed()

    def plan_again(self) -> None:
        """Note that the refit service is lost, and its plan with it."""
        self.stages |= dict.fromkeys(self._having(Stage.PLANNING), Stage.BUILT)
        self._changed()

    def stop(self) -> None:
        """Stop waiting for any engine: the run ends."""
        if self._having(Stage.PLANNING):
            self._requests.close(self.plan_request)
        for name in [*self.stages]:
            self.remove(name)

    def _take_plan(self, plan: TransfersPlanned) -> list[Action]:
        """Have engines install those of their programs that need no other process."""
        actions: list[Action] = []
        for name in self._having(Stage.PLANNING):
            if self._transfers.extend(name, plan):
                self.stages[name] = Stage.INSTALLING
                actions += self._transfers.request_install([name])
            else:
                self.refused[name] = _STREAMED
        return actions

    def _having(self, stage: Stage) -> list[str]:
        return [name for name, its in self.stages.items() if its is stage]


MOST_FAILURES = 2
"""The attempts at one version that may fail before the run does."""


class Recovery:
    """How often engines were lost or invalidated, and how far those are that come back."""

    def __init__(
        self,
        spec: RunSpec,
        requests: PendingRequests,
        engines: Engines,
        transfers: Transfers,
        groups: TransferGroups,
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._engines = engines
        self._transfers = transfers
        self._groups = groups

    def count_failure(self, engine: Engine, doing: str, why: str) -> None:
        """Raise `CommandFailed` if an invalidated engine has had its second attempt."""
        engine.num_failures += 1
        if engine.num_failures >= MOST_FAILURES:
            raise CommandFailed(engine.name, doing, why)

    def replace(self, engine: Engine, why: str) -> list[Action]:
        """Ask for a process in the place of a lost engine."""
        self.vacate(engine)
        return [Replace(process=engine.name, why=why)]

    def vacate(self, engine: Engine) -> None:
        """Wait for a process in the place of an engine."""
        self._engines.move(engine, Status.ABSENT, version=-1)
        engine.awaited = set()
        engine.is_awaited_by_hand = False
        engine.replace_by = self._requests.now + self._spec.deadlines.join
        self._engines.stay(engine)
        self._groups.stop_connecting(engine.name)

    def refit_again(self, engine: Engine) -> None:
        """Refit an invalidated engine once more."""
        self._engines.move(engine, Status.CONNECTING, version=-1)
        engine.awaited = set()

    def take_joined(self, name: str) -> None:
        """Note a new process, which is built and brought to the state of the others."""
        self._engines.move(self._engines[name], Status.JOINED)

    def build(self) -> list[Action]:
        """Build the engines in new processes."""
        actions: list[Action] = []
        for name in self._engines.having(Status.JOINED):
            self._engines.move(self._engines[name], Status.BUILDING)
            actions += self._await(self._engines[name], [self._transfers.request_build(name)])
        return actions

    def go_on(self, engine: Engine) -> list[Action]:
        """Advance an engine by one status, now that all its requests were answered."""
        match engine.status:
            case Status.BUILDING:
                self._engines.move(engine, Status.INSTALLING)
                return self._await(engine, self._transfers.request_install([engine.name]))
            case Status.INSTALLING:
                self._engines.move(engine, Status.CONNECTING)
                return []
            case other:
                raise AssertionError(f"{engine.name} is {other.value} and waits for no answer")

    def is_overdue(self, engine: Engine) -> bool:
        """Tell whether the replacement of an engine is overdue."""
        return engine.status is Status.ABSENT and self._requests.now > engine.replace_by

    def overdue(self) -> DeadlineExceeded | None:
        """Return the error for an overdue replacement."""
        for name in self._engines.having(Status.ABSENT):
            if self.is_overdue(self._engines[name]):
                what = f"no process has taken its place within {self._spec.deadlines.join:g} s"
                return DeadlineExceeded(name, Status.ABSENT.value, what)
        return None

    def _await(self, engine: Engine, actions: list[Action]) -> list[Action]:
        """Make an engine wait for the answers to these commands."""
        engine.awaited = {action.command.command_id for action in actions if isinstance(action, Dispatch)}
        return actions
