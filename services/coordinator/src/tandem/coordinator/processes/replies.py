"""The check of replies against their requests; pure, no sockets and no clock.

`Replies` is told of every request that is sent (`expect`) and of every process that is lost (`forget`). Every reply
passes `take` before it becomes an event. A reply that cannot answer its request thus never reaches a batch, a metric or
the journal.

Decoding has already checked each field by itself (the types in `tandem.common.messages`). Here fields are compared with
the request, by one check for each message (`reply_checks`). ``docs/protocol.md`` lists the docstrings of the checks
(``scripts/protocol_page.py``).
"""

from __future__ import annotations

import bisect

from tandem.common.errors import WireError
from tandem.common.messages import (
    AnyCommand,
    BuildEngine,
    Failed,
    Generate,
    Refit,
    Reply,
    ReportDigests,
    SamplesFinished,
)
from tandem.common.wire import Arrays
from tandem.coordinator.processes.reply_checks import SHOWN, KnownState, UnansweredRequest, must
from tandem.coordinator.processes.reply_table import CHECKS, answerable
from tandem.coordinator.processes.sample_limits import SampleLimits


class Replies:
    """The unanswered requests, and the check whether a reply can answer one."""

    def __init__(self, limits: SampleLimits, newest: int = 0) -> None:
        """`newest` is at least every command id that an earlier coordinator gave out."""
        self._limits = limits
        self._requests: dict[int, UnansweredRequest] = {}
        self._states: dict[str, KnownState] = {}
        self._newest = newest
        """Highest command id so far."""

    def expect(self, name: str, command: AnyCommand) -> None:
        """Note a request that is sent to a process, whose replies are checked against it."""
        self._newest = max(self._newest, command.command_id)
        if isinstance(command, BuildEngine):  # it begins anew, without any version
            self._states[name] = KnownState()
        state = self._states.setdefault(name, KnownState())
        match command:
            case Refit() if name in command.only or not command.only:
                if command.version not in state.versions[-1:]:
                    bisect.insort(state.versions, command.version)
            case Generate() | ReportDigests():  # the requests that this cancels are never answered
                oldest = command.cancel_before if isinstance(command, Generate) else command.command_id
                self._requests = {
                    i: request
                    for i, request in self._requests.items()
                    if request.name != name or type(request.command) is not type(command) or i >= oldest
                }
            case _:
                pass
        self._requests[command.command_id] = UnansweredRequest(
            name=name, command=command, state=state, limits=self._limits, oldest_version=state.version
        )

    def forget(self, name: str) -> None:
        """Expect nothing more of a process; another of its name begins anew."""
        self._requests = {i: request for i, request in self._requests.items() if request.name != name}
        self._states.pop(name, None)

    def forget_commands(self) -> None:
        """Accept no more answers to earlier requests."""
        self._requests = {}

    def take(self, name: str, reply: Reply | Failed, arrays: Arrays) -> bool:
        """Check a reply; return whether it answers an open request, rather than one that is over.

        Raise `WireError` if it cannot be an answer to that request; its text begins with the message and the field.
        """
        request = self._requests.get(reply.command_id)
        try:
            if request is None:
                must(reply.command_id <= self._newest, "command_id", reply.command_id, "of a command")
                return False
            must(request.name == name, "command_id", reply.command_id, f"of a command to {name}, not to {request.name}")
            if not isinstance(reply, Failed):
                checks, command = CHECKS[type(reply)], type(request.command)
                if command not in checks:
                    must(False, "command_id", reply.command_id, answerable(type(reply), command))
                elif (check := checks[command]) is not None:
                    check(request, reply)
            for array in arrays:
                raise WireError(f"{array[:SHOWN]}: arrays came with a message that has none")
        except WireError as error:
            raise WireError(f"{type(reply).__name__}.{error}") from error
        if isinstance(reply, SamplesFinished):
            return True  # more answers follow
        del self._requests[reply.command_id]
        return True
