"""A rule: when it fires, and the tables that it reads."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from tandem.coordinator.scheduler.events import Action


class RuleTables(enum.Enum):
    """The tables that rules read."""

    PROCESSES = "processes that have joined"
    REQUESTS = "commands without an answer"
    GROUPS = "rollout groups, and which engine each is at"
    READY = "steps whose groups are all ready"
    WAITING = "groups that wait for an engine, and the room that engines have"
    STORED = "tokens that rollouts keep"
    ENGINES = "engines, and what they hold"
    JOINING = "engines on their way into the table of engines"
    LEAVING = "draining engines"
    INVALIDATED = "engines whose samples no longer count"
    WEIGHTS = "the version that trainers hold, and how far it is"
    STEPS = "the step in progress, and how far the run is"
    SAVING = "the checkpoint that is being written"
    RECORDING = "parts of the rollout log that are not written"


class RuleMode(enum.Enum):
    """The rules in force."""

    SETTING_UP = "setting up"
    GOING_ON = "going on"
    FAILING = "waiting for the last checkpoint of a run that has failed"
    OVER = "over"


class HasMode(Protocol):
    """The part of the tables that the agenda reads."""

    @property
    def mode(self) -> RuleMode:
        """The rules in force."""
        ...


Tables = TypeVar("Tables", bound=HasMode)


class TableRule(msgspec.Struct, Generic[Tables], frozen=True, kw_only=True):
    """One rule, and the tables that it reads."""

    name: str
    fire: Callable[[Tables], list[Action] | None]
    """Returns None if the rule does not fire, else its actions. These may be none if it has changed the tables."""
    opens_with: tuple[RuleTables, ...]
    """The tables that `is_open` reads."""
    is_open: Callable[[Tables], bool]
    """Whether the rule has anything to do. It is not asked while it has not."""
    reads: tuple[RuleTables, ...] = ()
    """The other tables that `fire` reads before it returns None."""
