"""Engines on their way into the table of engines, which have joined later than the others.

    joined ─▶ WAITING ─▶ BUILDING ─▶ BUILT ─▶ PLANNING ─▶ INSTALLING ─▶ enters the table, and is refitted as any other.
                             └─────────── cannot: it is let go, and the run goes on without it.

Other processes take no part in this: an engine that joins reads weights where they lie, by a program of its own. The
processes of a transfer group are fixed when the run begins. So an engine that needs streamed weights can only take the
place of an engine that has left; otherwise it is let go.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from tandem.common.messages import EngineBuilt, Reply, TransfersPlanned
from tandem.coordinator.scheduler.agenda import Changed
from tandem.coordinator.scheduler.engines.transfers import TransferPlanner
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.requests import PendingRequests

_STREAMED = (
    "weights would have to be streamed to it, and the senders are fixed when a run begins: start it on a host "
    "of trainers, or interrupt the run and go on with --resume and more cluster.rollouts"
)


class JoiningStage(enum.Enum):
    """How far an engine is on its way into the table."""

    WAITING = "joined"
    BUILDING = "building"
    BUILT = "waiting for its transfers to be planned"
    PLANNING = "planning its transfers"
    INSTALLING = "installing its transfer program"


class JoiningEngines:
    """The engines that are joining."""

    def __init__(self, requests: PendingRequests, transfers: TransferPlanner, changed: Changed) -> None:
        self._changed = changed
        self._requests = requests
        self._transfers = transfers
        self.stages: dict[str, JoiningStage] = {}
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
        return bool(self._having(JoiningStage.BUILDING))

    def planned(self) -> list[str]:
        """Return the engines with layouts that the refit service already knows."""
        return self._having(JoiningStage.INSTALLING)

    def add(self, name: str) -> None:
        """Add an engine that has joined."""
        self.stages[name] = JoiningStage.WAITING
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
        joined = self._having(JoiningStage.WAITING) if may_build else []
        self.stages |= dict.fromkeys(joined, JoiningStage.BUILDING)
        actions: list[Action] = [self._transfers.request_build(name) for name in joined]
        built = self._having(JoiningStage.BUILT)
        if built and is_service_able:
            command = self._transfers.request_plan(trainers, [*engines, *self.planned(), *built])
            self.plan_request = command.command.command_id
            self.stages |= dict.fromkeys(built, JoiningStage.PLANNING)
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
                self.stages[process] = JoiningStage.BUILT
                return [], []
            case _:  # its program is installed
                del self.stages[process]
                return [], [process]

    def enter(self, name: str) -> None:
        """Note that an engine is in the table."""
        self.entered.append(name)
        self._changed()

    def refuse_planned(self, reason: str) -> None:
        """Note that transfers cannot be planned for the engines in `PLANNING`."""
        self.refused |= dict.fromkeys(self._having(JoiningStage.PLANNING), reason)
        self._changed()

    def plan_again(self) -> None:
        """Note that the refit service is lost, and its plan with it."""
        self.stages |= dict.fromkeys(self._having(JoiningStage.PLANNING), JoiningStage.BUILT)
        self._changed()

    def stop(self) -> None:
        """Stop waiting for any engine: the run ends."""
        if self._having(JoiningStage.PLANNING):
            self._requests.close(self.plan_request)
        for name in [*self.stages]:
            self.remove(name)

    def _take_plan(self, plan: TransfersPlanned) -> list[Action]:
        """Have engines install those of their programs that need no other process."""
        actions: list[Action] = []
        for name in self._having(JoiningStage.PLANNING):
            if self._transfers.extend(name, plan):
                self.stages[name] = JoiningStage.INSTALLING
                actions += self._transfers.request_install([name])
            else:
                self.refused[name] = _STREAMED
        return actions

    def _having(self, stage: JoiningStage) -> list[str]:
        return [name for name, current in self.stages.items() if current is stage]
