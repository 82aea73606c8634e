"""Meshes that weights are streamed over: which are connected anew, and who passes on what to whom.

Engines that pass weights on to each other are in one mesh. Those of them that come back wait for each other before it
is connected anew and they are refitted together: what is torn is passed on by nobody.
"""

from __future__ import annotations

from tandem.common.messages import PlannedMesh
from tandem.coordinator.scheduler.agenda import Changed
from tandem.coordinator.scheduler.engines import Engine, EngineTable, Status
from tandem.coordinator.scheduler.events import Action
from tandem.coordinator.scheduler.requests import PendingRequests
from tandem.coordinator.scheduler.transfers import Transfers, processes_in

_NOT_TO_BE_CONNECTED = {Status.ABSENT, Status.BUILDING, Status.INSTALLING, Status.REFITTING}
"""A mesh with such an engine is not connected: it is not there, or is busy with what is torn already."""


class Meshes:
    """The meshes of the plan. Those that are connected for the first time, as a run is set up, are not seen here."""

    def __init__(self, transfers: Transfers, engines: EngineTable, requests: PendingRequests, changed: Changed) -> None:
        self._changed = changed
        self._transfers = transfers
        self._engines = engines
        self._requests = requests
        self._connecting: dict[str, set[int]] = {}
        """Requests that must be answered before a mesh is connected again."""

    def connect(self, *, may_join: bool) -> list[Action]:
        """Connect engines anew that have all they need but a mesh, once those that they share it with have, too.

        `may_join` says whether trainers can take part: who is in a step joins nothing before its end.
        """
        actions: list[Action] = []
        for name in self._engines.having(Status.CONNECTING):
            mesh = self._transfers.mesh_of(name)
            if mesh is None:
                self._engines.move(self._engines[name], Status.READY)
                continue
            if mesh.name in self._connecting or not may_join:
                continue
            if not {self._engines[other].status for other in self._engines_in(mesh)} & _NOT_TO_BE_CONNECTED:
                orders = self._transfers.order_connect(mesh)
                self._connecting[mesh.name] = {action.order.command_id for action in orders}
                actions += orders
        return actions

    def take_reply(self, command_id: int) -> bool:
        """Take what a member of a mesh answers; return whether the request was to connect one."""
        for name, awaited in self._connecting.items():
            if command_id in awaited:
                awaited.discard(command_id)
                if not awaited:
                    self._connected(name)
                return True
        return False

    def stop_connecting(self, engine: str) -> None:
        """Wait no longer for the mesh of an engine, which is lost: it is connected when there is another."""
        mesh = self._transfers.mesh_of(engine)
        if mesh is not None:
            self._stop_connecting(mesh.name)

    def stop(self) -> None:
        """Wait for no mesh any more."""
        for mesh in [*self._connecting]:
            self._stop_connecting(mesh)

    def has_others(self, engine: str) -> bool:
        """Tell whether an engine is in a mesh with others: who gets weights from whom there is fixed."""
        mesh = self._transfers.mesh_of(engine)
        return mesh is not None and len(self._engines_in(mesh)) > 1

    def who_get_it_whole(self, able: list[str], version: int) -> list[str]:
        """Leave out engines to which another of their mesh would pass on what is older, or torn, or nothing."""
        if not self._transfers.plan.meshes:
            return able
        takers, chosen = [], set(able)
        for name in able:
            mesh = self._transfers.mesh_of(name)
            others = self._engines_in(mesh) if mesh is not None else []
            if all(other in chosen or _holds(self._engines[other], version) for other in others):
                takers.append(name)
        return takers

    def _connected(self, name: str) -> None:
        del self._connecting[name]
        self._changed()
        mesh = next(mesh for mesh in self._transfers.plan.meshes if mesh.name == name)
        for engine in self._engines_in(mesh):
            if self._engines[engine].status is Status.CONNECTING:
                self._engines.move(self._engines[engine], Status.READY)

    def _stop_connecting(self, mesh: str) -> None:
        """Wait for a mesh no longer; its members do so in vain, until they are told of the next attempt."""
        for command_id in self._connecting.pop(mesh, ()):
            self._requests.close(command_id)
        self._changed()

    def _engines_in(self, mesh: PlannedMesh) -> list[str]:
        return [name for name in processes_in(mesh) if name in self._engines]


def _holds(engine: Engine, version: int) -> bool:
    return engine.status is Status.HOLDING and engine.version == version
