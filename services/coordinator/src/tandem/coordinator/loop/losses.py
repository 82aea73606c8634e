"""Processes that a run has lost, or lets go, and what comes in their place."""

from __future__ import annotations

import time
from collections.abc import Callable

from tandem.coordinator.loop.recorder import ResultRecorder
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.scheduler.events import AwaitedByHand, Event, LetGo, ReplaceEngine
from tandem.launch.launch import LocalProcesses

_NOT_BACK = "it has not come back after the coordinator was lost"
_LEAVES_S = 10.0
"""Time for a launched process to end once it is dismissed."""


class ProcessLosses:
    """The processes that an attempt has lost, and the replacements of some."""

    def __init__(
        self,
        registry: ProcessRegistry,
        processes: LocalProcesses,
        recorder: ResultRecorder,
        handle: Callable[[Event], None],
    ) -> None:
        """`handle` gives the scheduler an event."""
        self._registry = registry
        self._processes = processes
        self._recorder = recorder
        self._handle = handle
        self.lost: dict[str, str] = {}
        """Lost processes that have not been replaced yet, by name, with the reason."""
        self.replaced_at: list[float] = []
        """Times of replacements, by `time.monotonic`."""

    def replace_missing(self) -> None:
        """Replace processes that have not come back to this coordinator, once everything received is handled."""
        for name in self._registry.not_back():
            if self._registry.names.needs(name):
                self.lost[name] = _NOT_BACK
                self._replace(name, _NOT_BACK)
            else:
                self._registry.dismiss(name, _NOT_BACK, is_over=True, is_awaited=False)
                self._recorder.note(f"{name} is lost: {_NOT_BACK}")

    def do_without(self, action: ReplaceEngine | LetGo) -> None:
        """Let the run go on without a process, or with another in its place."""
        match action:
            case ReplaceEngine(process=process, reason=reason):
                self._replace(process, reason)
            case LetGo():
                self._let_go(action)

    def _replace(self, process: str, reason: str) -> None:
        """Launch a process in the place of a lost one, or ask for one if the lost one was started by hand."""
        self.lost.pop(process, None)  # one that missed a deadline is not in it
        self.replaced_at.append(time.monotonic())
        self._registry.dismiss(process, f"it is replaced: {reason}")
        self._recorder.observers.lost(process)
        self._recorder.observers.replaced(1)
        launched = self._processes.restart([process])
        if not launched:
            remedy = f"start another: {self._registry.describe_joining(process.rpartition('-')[0])}"
            self._handle(AwaitedByHand(now=time.monotonic(), process=process))
        else:
            self._registry.names.reserve(*launched)
            remedy = "another is launched in its place"
        self._recorder.note(f"{process} is lost: {reason}; {remedy}")

    def _let_go(self, action: LetGo) -> None:
        """Dismiss an engine that is not replaced by a launched one."""
        process = action.process
        self.lost.pop(process, None)
        self._registry.dismiss(process, action.reason, is_over=True, is_awaited=action.is_awaited)
        self._processes.let_go(process, _LEAVES_S)
        self._recorder.observers.lost(process)
        remedy = (
            f"; the run waits for another: {self._registry.describe_joining('rollout')}" if action.is_awaited else ""
        )
        self._recorder.note(f"{process} leaves the run: {action.reason}{remedy}")
