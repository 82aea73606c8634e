"""Bring engines back: a new process in the place of a lost one, another refit for one that is torn.

    lost ─▶ ABSENT ─▶ joined: BUILDING ─▶ INSTALLING ─▶ CONNECTING ─▶ refitted like any other
    torn ──────────────────────────────────────────────────▲

Both happen a bounded number of times; then the error that this leads to ends the run.
"""

from __future__ import annotations

from tandem.common.errors import CommandFailed, DeadlineExceeded
from tandem.coordinator.scheduler.engines import Engine, EngineTable, Status
from tandem.coordinator.scheduler.events import Action, Dispatch, Replace
from tandem.coordinator.scheduler.meshes import Meshes
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.spec import RunSpec
from tandem.coordinator.scheduler.transfers import Transfers

MOST_FAILURES = 2
"""Attempts at one version that may fail before the run does."""


class EngineRecovery:
    """How often engines were lost or torn, and how far those are that come back."""

    def __init__(
        self, spec: RunSpec, requests: PendingRequests, engines: EngineTable, transfers: Transfers, meshes: Meshes
    ) -> None:
        self._spec = spec
        self._requests = requests
        self._engines = engines
        self._transfers = transfers
        self._meshes = meshes

    def count_failure(self, engine: Engine, doing: str, why: str) -> None:
        """Raise `CommandFailed` if an engine that is torn has had its second attempt."""
        engine.num_failures += 1
        if engine.num_failures >= MOST_FAILURES:
            raise CommandFailed(engine.name, doing, why)

    def replace(self, engine: Engine, why: str) -> list[Action]:
        """Ask for a process in the place of an engine that is lost."""
        self.vacate(engine)
        return [Replace(member=engine.name, why=why)]

    def vacate(self, engine: Engine) -> None:
        """Wait for a process in the place of an engine."""
        self._engines.move(engine, Status.ABSENT, version=-1)
        engine.awaited = set()
        engine.is_awaited_by_hand = False
        engine.replace_by = self._requests.now + self._spec.deadlines.join
        self._engines.stay(engine)
        self._meshes.stop_connecting(engine.name)

    def refit_again(self, engine: Engine) -> None:
        """Have an engine that is torn refitted once more."""
        self._engines.move(engine, Status.CONNECTING, version=-1)
        engine.awaited = set()

    def rebuild(self, name: str) -> list[Action]:
        """Begin to bring a new process to where the others are."""
        engine = self._engines[name]
        self._engines.move(engine, Status.BUILDING)
        return self._await(engine, [self._transfers.order_build(name)])

    def go_on(self, engine: Engine) -> list[Action]:
        """Take an engine whose requests were all answered one status further."""
        match engine.status:
            case Status.BUILDING:
                self._engines.move(engine, Status.INSTALLING)
                return self._await(engine, self._transfers.order_install([engine.name]))
            case Status.INSTALLING:
                self._engines.move(engine, Status.CONNECTING)
                return []
            case other:
                raise AssertionError(f"{engine.name} is {other.value} and waits for no answer")

    def is_overdue(self, engine: Engine) -> bool:
        """Tell whether no process has come in the place of an engine in time."""
        return engine.status is Status.ABSENT and self._requests.now > engine.replace_by

    def overdue(self) -> DeadlineExceeded | None:
        """Return the error of a replacement that did not come in time."""
        for name in self._engines.having(Status.ABSENT):
            if self.is_overdue(self._engines[name]):
                what = f"no process has taken its place within {self._spec.deadlines.join:g} s"
                return DeadlineExceeded(name, Status.ABSENT.value, what)
        return None

    def _await(self, engine: Engine, actions: list[Action]) -> list[Action]:
        """Have an engine wait for the answers to these orders."""
        engine.awaited = {action.order.command_id for action in actions if isinstance(action, Dispatch)}
        return actions
