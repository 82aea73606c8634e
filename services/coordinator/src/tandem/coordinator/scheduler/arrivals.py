"""Engines that join while the run goes on, on their way into the table of engines.

    joined ─▶ WAITING ─▶ BUILDING ─▶ BUILT ─▶ PLANNING ─▶ INSTALLING ─▶ enters the table, and is refitted like any other
                             └─────────── cannot: it is let go, and the run goes on without it

Nobody else takes part: an engine that joins reads weights where they lie, by a program of its own. One that they would
have to be streamed to is let go, since the processes of a mesh are fixed when the run begins, unless it comes in the
place of an engine that has left.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from tandem.common.messages import EngineBuilt, Reply, TransfersPlanned
from tandem.coordinator.scheduler.agenda import Changed
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.transfers import Transfers

_STREAMED = (
    "weights would have to be streamed to it, and who streams to whom is fixed when a run begins: start it on a host "
    "of trainers, or interrupt the run and go on with --resume and more cluster.rollouts"
)


class Stage(enum.Enum):
    """How far an engine is on its way into the table."""

    WAITING = "joined"
    BUILDING = "building"
    BUILT = "waiting for its transfers to be planned"
    PLANNING = "planning its transfers"
    INSTALLING = "installing its transfer program"


class Arrivals:
    """The engines on their way."""

    def __init__(self, requests: PendingRequests, transfers: Transfers, changed: Changed) -> None:
        self._changed = changed
        self._requests = requests
        self._transfers = transfers
        self._stages: dict[str, Stage] = {}
        self._plan_request = 0
        """The order to plan for those whose transfers are being planned."""
        self.refused: dict[str, str] = {}
        """Those that cannot join, and why, until they are let go."""

    def __len__(self) -> int:
        return len(self._stages)

    def __contains__(self, name: str) -> bool:
        return name in self._stages

    def stages(self) -> dict[str, Stage]:
        """Return how far each is."""
        return dict(self._stages)

    def is_planned_by(self, command_id: int) -> bool:
        """Tell whether an order is the newest one to plan for some of them."""
        return command_id == self._plan_request

    def planned(self) -> list[str]:
        """Return those whose layouts the refit service knows already."""
        return self._having(Stage.INSTALLING)

    def add(self, name: str) -> None:
        """Take an engine that has joined."""
        self._stages[name] = Stage.WAITING
        self._changed()

    def remove(self, name: str) -> None:
        """Wait for one no longer: it is let go, or lost."""
        del self._stages[name]
        self.refused.pop(name, None)
        self._requests.drop(name)
        self._changed()

    def go_on(self, trainers: Sequence[str], engines: Sequence[str], *, is_service_able: bool) -> list[Action]:
        """Have those built that have joined, and transfers planned for those that are built."""
        joined = self._having(Stage.WAITING)
        self._stages |= dict.fromkeys(joined, Stage.BUILDING)
        actions: list[Action] = [self._transfers.order_build(name) for name in joined]
        built = self._having(Stage.BUILT)
        if built and is_service_able:
            order = self._transfers.order_plan(trainers, [*engines, *self.planned(), *built])
            self._plan_request = order.order.command_id
            self._stages |= dict.fromkeys(built, Stage.PLANNING)
            actions.append(order)
        return actions

    def take_reply(self, member: str, reply: Reply) -> tuple[list[Action], list[str]]:
        """Take what one of them has answered, or the plan for some; return also who can enter the table now."""
        self._changed()
        match reply:
            case TransfersPlanned():
                return self._take_plan(reply), []
            case EngineBuilt(layouts=layouts):
                self._transfers.enter(member, layouts)
                self._stages[member] = Stage.BUILT
                return [], []
            case _:  # its program is installed
                del self._stages[member]
                return [], [member]

    def refuse_planned(self, why: str) -> None:
        """Take note that transfers cannot be planned for those that they were to be planned for."""
        self.refused |= dict.fromkeys(self._having(Stage.PLANNING), why)
        self._changed()

    def plan_again(self) -> None:
        """Take note that the refit service is lost: it plans nothing any more."""
        self._stages |= dict.fromkeys(self._having(Stage.PLANNING), Stage.BUILT)
        self._changed()

    def stop(self) -> None:
        """Wait for none any more: the run ends."""
        if self._having(Stage.PLANNING):
            self._requests.close(self._plan_request)
        for name in [*self._stages]:
            self.remove(name)

    def _take_plan(self, plan: TransfersPlanned) -> list[Action]:
        """Have those install their programs that need nobody else for it."""
        actions: list[Action] = []
        for name in self._having(Stage.PLANNING):
            if self._transfers.extend(name, plan):
                self._stages[name] = Stage.INSTALLING
                actions += self._transfers.order_install([name])
            else:
                self.refused[name] = _STREAMED
        return actions

    def _having(self, stage: Stage) -> list[str]:
        return [name for name, its in self._stages.items() if its is stage]
