"""An engine that takes its weights from a store, where ``refit.store`` names one and the plan says so.

A refit waits, beside running requests, until the mirror has its version. Then it is an ordinary one between two tokens:
the engine copies out of its host's shared memory.
"""

from __future__ import annotations

import os
import time

import msgspec

from tandem.common import messages
from tandem.common.errors import RefitError
from tandem.common.wire import Arrays
from tandem.launch.service import ServiceContext
from tandem.refit import program
from tandem.refit.store.mirror import StoreMirror
from tandem.refit.store.objects import ObjectStore
from tandem.refit.store.publisher import StoreAccess
from tandem.refit.transports.store import URL_VARIABLE
from tandem.rollout.service import RolloutService


class MirroringRollout(RolloutService):
    """One engine's answers to the coordinator; its mirror follows the store in the background."""

    def __init__(self, context: ServiceContext) -> None:
        super().__init__(context)
        url = os.environ.get(URL_VARIABLE) or context.config.refit.store
        assert url is not None, "it is configured where this is used"
        access = StoreAccess(ObjectStore(url), context.store_key, context.run_id)
        self._mirror = StoreMirror(access, context.name, context.wake, lambda line: print(line, flush=True))
        self._waiting: messages.Refit | None = None
        """A refit whose version is not in the mirror yet."""
        self._wait_until = 0.0

    def handle(self, command: messages.RolloutCommand, arrays: Arrays) -> None:
        """Carry out one command; `Generate` goes on in `work`, and so does a `Refit` that waits for the store."""
        if isinstance(command, messages.InstallProgram):
            self._waiting = None
            programs = self._mirror.redirect([program.decode(encoded) for encoded in command.programs])
            command = msgspec.structs.replace(command, programs=tuple(map(program.encode, programs)))
        elif isinstance(command, messages.Refit) and self._mirror.is_needed and self._receives(command):
            self._mirror.want(command.version)
            self._waiting, self._wait_until = command, time.monotonic() + command.deadline_s
            return
        super().handle(command, arrays)

    def work(self) -> bool:
        """Take a version that has come, then advance generation as other engines do."""
        command = self._waiting
        if command is not None:
            try:
                self._take(command)
            except Exception as error:
                self._waiting = None
                self._mirror.settle()
                self._context.fail(command.command_id, error)
        return super().work()

    def close(self) -> None:
        """Stop following the store, and release the engine."""
        self._mirror.close()
        super().close()

    def _take(self, command: messages.Refit) -> None:
        """Take the version if it is there. Raises `RefitError` after the deadline, before any weight has changed."""
        with self._mirror.lock:
            if self._mirror.is_held(command.version):
                self._waiting = None
                super().handle(command, {})
                self._mirror.settle()
                return
        if time.monotonic() > self._wait_until:
            raise RefitError(
                f"version {command.version} did not come by refit.store within {command.deadline_s:g} s: "
                f"{self._mirror.trouble}"
            )

    def _receives(self, command: messages.Refit) -> bool:
        return not command.only or self._context.name in command.only
