"""An invocation: the configuration that is to be run, how, and what its caller has at hand."""

from __future__ import annotations

import msgspec

from tandem.common.messages import RewardServer
from tandem.coordinator.preparing.prerequisite import Mode, Ready, Say
from tandem.launch.fork_server import ForkServer
from tandem.launch.supervision import Supervision


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """What a command asks for, made once and read by everything that begins a run."""

    ready: Ready
    mode: Mode
    say: Say
    """Prints a line."""
    fork_server: ForkServer
    """Forks the services."""
    from_step: int | None = None
    """The step to resume after, where it is not the newest with a checkpoint."""
    supervision: Supervision | None = None
    """Of this process, if another one goes on when it is lost."""
    reward_server: RewardServer | None = None
    """Where a Python program scores samples, if one does."""

    def of_prerequisite(self, prerequisite: Ready, mode: Mode) -> Invocation:
        """Return what is asked for of the run that comes before, which goes on from wherever it stands."""
        return msgspec.structs.replace(self, ready=prerequisite, mode=mode, from_step=None)
