"""An invocation: the configuration to run, the mode, and the resources of its caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from tandem.common.messages import RewardServer
from tandem.coordinator.preparing.prerequisite import CheckedConfig
from tandem.launch.fork_server import ServiceForkServer
from tandem.launch.preparing.beginning import Mode, Say
from tandem.launch.supervision import SupervisorConnection

if TYPE_CHECKING:
    from tandem.coordinator.loop.loop import CoordinatorLoop
    from tandem.coordinator.observers.observer import Observer
    from tandem.coordinator.scheduler.spec import RunSpec


class FrontEnd(Protocol):
    """A driver of a run in the place of its algorithm."""

    def spec(self, spec: RunSpec) -> RunSpec:
        """Return the run spec that it needs."""
        ...

    def display(self) -> Observer:
        """Return what shows the run on the console."""
        ...

    def loop(self, *parts: Any) -> CoordinatorLoop:
        """Return the loop of an attempt, from the arguments of `CoordinatorLoop`."""
        ...


class CommandInvocation(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a command, made once and read by everything that begins a run."""

    ready: CheckedConfig
    mode: Mode
    say: Say
    """Function that prints a line."""
    fork_server: ServiceForkServer
    """Fork server of the services."""
    from_step: int | None = None
    """Step to resume after, if it is not the newest with a checkpoint."""
    supervision: SupervisorConnection | None = None
    """Supervision of this process, if another one takes over when it is lost."""
    reward_server: RewardServer | None = None
    """Address of the Python program that scores samples, if one does."""

    front_end: FrontEnd | None = None
    """The front end that drives the run; None if its algorithm does."""

    def of_prerequisite(self, prerequisite: CheckedConfig, mode: Mode) -> CommandInvocation:
        """Return the invocation of the run that comes before, which continues from its own progress."""
        return msgspec.structs.replace(self, ready=prerequisite, mode=mode, from_step=None, front_end=None)
