"""An invocation: the configuration to run, the mode, and the resources of its caller."""

from __future__ import annotations

import msgspec

from tandem.common.messages import RewardServer
from tandem.coordinator.preparing.prerequisite import Mode, Ready, Say
from tandem.launch.fork_server import ForkServer
from tandem.launch.supervision import Supervision


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """The request of a command, made once and read by everything that begins a run."""

    ready: Ready
    mode: Mode
    say: Say
    """Function that prints a line."""
    fork_server: ForkServer
    """Fork server of the services."""
    from_step: int | None = None
    """Step to resume after, if it is not the newest with a checkpoint."""
    supervision: Supervision | None = None
    """Supervision of this process, if another one takes over when it is lost."""
    reward_server: RewardServer | None = None
    """Address of the Python program that scores samples, if one does."""

    def of_prerequisite(self, prerequisite: Ready, mode: Mode) -> Invocation:
        """Return the invocation of the run that comes before, which continues from its own progress."""
        return msgspec.structs.replace(self, ready=prerequisite, mode=mode, from_step=None)
