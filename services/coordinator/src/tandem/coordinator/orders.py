"""Orders that were given and not yet answered: each has an id of its own and a deadline."""

from __future__ import annotations

from typing import TypedDict

import msgspec

from tandem.coordinator.decisions import Phase


class Outstanding(msgspec.Struct, frozen=True, kw_only=True):
    """An order that was not answered yet."""

    member: str
    phase: Phase
    deadline: float
    allowed_s: float


class Promise(TypedDict):
    """The two fields every command has."""

    command_id: int
    deadline_s: float


class Orders:
    """Gives each order its id and deadline, and knows which were answered. Reads no clock: its owner sets `now`."""

    def __init__(self, now: float) -> None:
        self.now = now
        self.outstanding: dict[int, Outstanding] = {}
        self._next_command_id = 1

    def promise(self, member: str, phase: Phase, allowed_s: float) -> Promise:
        """Open an outstanding order for `member`; `phase` is what it is for."""
        promise = self.notice(allowed_s)
        self.outstanding[promise["command_id"]] = Outstanding(
            member=member, phase=phase, deadline=self.now + allowed_s, allowed_s=allowed_s
        )
        return promise

    def notice(self, allowed_s: float) -> Promise:
        """Give an id to an order whose answer nobody waits for."""
        command_id = self._next_command_id
        self._next_command_id += 1
        return Promise(command_id=command_id, deadline_s=allowed_s)

    def drop(self, member: str, *phases: Phase) -> None:
        """Expect no more answers from `member`: to any order, or to those of some phases."""
        self.outstanding = {
            command_id: order
            for command_id, order in self.outstanding.items()
            if order.member != member or (phases and order.phase not in phases)
        }

    def drop_all_but(self, phase: Phase) -> None:
        """Expect no more answers, except to orders of one phase."""
        self.outstanding = {i: order for i, order in self.outstanding.items() if order.phase is phase}

    def overdue(self) -> Outstanding | None:
        """Return an order whose deadline has passed."""
        return next((order for order in self.outstanding.values() if self.now > order.deadline), None)
