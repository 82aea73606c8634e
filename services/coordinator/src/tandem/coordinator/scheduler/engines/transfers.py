"""Planned transfers: the commands that set engines up with layouts, programs and transfer groups.

Weights are streamed over a transfer group. Engines that pass weights on to each other share one. Engines that come back
to it wait for each other. Then the group is connected anew and they are refitted together, so that no engine passes on
partial weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.common import messages
from tandem.common.errors import CommandFailed
from tandem.common.worker_shards import map_by_shard, process_of
from tandem.coordinator.scheduler.agenda import Changed
from tandem.coordinator.scheduler.engines.table import EngineState, EngineStatus, EngineTable
from tandem.coordinator.scheduler.events import Action, DispatchCommand
from tandem.coordinator.scheduler.requests import PendingRequests, RunPhase
from tandem.coordinator.scheduler.spec import RunSpec

SERVICE = "refit-0"
_NO_PLAN = messages.TransfersPlanned(
    command_id=0,
    programs={},
    senders=(),
    transfer_groups=(),
    num_bytes={},
    predicted_s=0.0,
    bound_s=0.0,
    seconds=0.0,
)
"""The plan before there is one."""


class TransferPlanner:
    """Layouts in, programs and transfer groups out. Raises `ServiceError` where the run cannot go on."""

    def __init__(self, spec: RunSpec, requests: PendingRequests, public_keys: Mapping[str, str]) -> None:
        """`public_keys` has the key of each process that is there."""
        self._spec = spec
        self._public_keys = public_keys
        self._build_s = spec.deadlines.build
        self._requests = requests
        self._rendezvous = ("", 0)
        self._layouts: dict[str, dict[str, bytes]] = {}
        """The layouts of each process, by part."""
        self.plan = _NO_PLAN
        self._programmed: dict[str, dict[str, bytes]] = {}
        """The layouts that the plan's programs are for."""
        self._epochs: dict[str, int] = {}
        """How often each transfer group was connected."""

    def take(self, process: str, reply: messages.Reply) -> None:
        """Take the layouts or the plan in a reply."""
        match reply:
            case messages.RendezvousOpened(host=host, port=port):
                self._rendezvous = (host, port)
            case messages.TrainerBuilt(layout=layout):
                self._layouts[process] = {process: layout}
            case messages.EngineBuilt(layouts=layouts):
                self._take_layouts(process, map_by_shard(process, layouts))
            case messages.TransfersPlanned() if self.plan is _NO_PLAN:
                self.plan, self._programmed = reply, dict(self._layouts)
            case messages.TransfersPlanned():
                pass  # from a replaced refit service: the installed programs stay
            case _:
                pass

    def request_build(self, engine: str) -> DispatchCommand:
        """Build an engine, which answers with its layout."""
        command = messages.BuildEngine(
            samples_folder=self._spec.samples_folder,
            reward_server=self._spec.reward_server,
            **self._requests.open(engine, RunPhase.BUILDING, self._build_s),
        )
        return DispatchCommand(process=engine, command=command)

    def request_plan(self, trainers: Sequence[str], engines: Sequence[str]) -> DispatchCommand:
        """Plan all transfers from the layouts of trainers and engines."""
        command = messages.PlanTransfers(
            sources={part: layout for name in trainers for part, layout in self._layouts[name].items()},
            destinations={part: layout for name in engines for part, layout in self._layouts[name].items()},
            allow_alias=self._spec.allow_alias,
            alias_frozen=self._spec.alias_frozen,
            **self._requests.open(SERVICE, RunPhase.PLANNING, self._build_s),
        )
        return DispatchCommand(process=SERVICE, command=command)

    def enter(self, engine: str, layouts: tuple[bytes, ...]) -> None:
        """Take the layouts of a joining engine, for which nothing is planned yet."""
        self._layouts[engine] = map_by_shard(engine, layouts)

    def extend(self, engine: str, plan: messages.TransfersPlanned) -> bool:
        """Take a joining engine's programs from a plan for all. Return False if others would have to take part.

        The programs of others stay as they are, even where the new plan has changed them. An engine that takes a vacant
        place and wants the same weights also keeps the old program, because the other processes have installed their
        side.
        """
        parts = self._layouts[engine]
        if self._programmed.get(engine) == parts:
            return True
        if any(engine in processes_in(transfer_group) for transfer_group in plan.transfer_groups):
            return False
        self._programmed[engine] = parts
        links, frozen = (
            {link: count for link, count in counts.items() if link.rpartition(">")[2] in parts}
            for counts in (plan.num_bytes, plan.num_bytes_frozen)
        )
        self.plan = msgspec.structs.replace(
            self.plan,
            programs={**self.plan.programs, **{part: plan.programs[part] for part in parts}},
            num_bytes={**self.plan.num_bytes, **links},
            num_bytes_frozen={**self.plan.num_bytes_frozen, **frozen},
            predicted_s=plan.predicted_s,
            bound_s=plan.bound_s,
        )
        return True

    def request_install(self, processes: Iterable[str] | None = None) -> list[DispatchCommand]:
        """Install the programs of all processes, or of the given ones."""
        programs = self.plan.programs
        every_process = dict.fromkeys(map(process_of, programs))
        return [
            DispatchCommand(
                process=process,
                command=messages.InstallProgram(
                    programs=tuple(programs[part] for part in self._layouts[process]),
                    **self._requests.open(process, RunPhase.INSTALLING, self._build_s),
                ),
            )
            for process in (every_process if processes is None else processes)
        ]

    def request_connect(self, transfer_group: messages.PlannedTransferGroup) -> list[DispatchCommand]:
        """Connect a transfer group, anew if it was connected before."""
        epoch = self._epochs[transfer_group.name] = self._epochs.get(transfer_group.name, -1) + 1
        host, port = self._rendezvous
        processes = processes_in(transfer_group)
        public_keys: dict[str, str] = {}
        if self._spec.streams_over_tcp:
            public_keys = {name: self._public_keys[name] for name in processes if name in self._public_keys}
        return [
            DispatchCommand(
                process=process,
                command=messages.ConnectTransferGroup(
                    transfer_group=transfer_group.name,
                    members=transfer_group.members,
                    device_type=transfer_group.device_type,
                    epoch=epoch,
                    rendezvous_host=host,
                    rendezvous_port=port,
                    public_keys=public_keys,
                    **self._requests.open(process, RunPhase.CONNECTING, self._build_s),
                ),
            )
            for process in processes
        ]

    def transfer_group_of(self, engine: str) -> messages.PlannedTransferGroup | None:
        """Return the transfer group that streams weights to an engine, if there is one."""
        return next(
            (transfer_group for transfer_group in self.plan.transfer_groups if engine in processes_in(transfer_group)),
            None,
        )

    def _take_layouts(self, engine: str, layouts: dict[str, bytes]) -> None:
        if self.plan is not _NO_PLAN and self._layouts[engine] != layouts:
            reason = "its replacement wants other weights than it did, or runs on another host: resume the run instead"
            raise CommandFailed(engine, RunPhase.BUILDING.value, reason)
        self._layouts[engine] = layouts

    def senders_for(self, engines: Sequence[str]) -> tuple[str, ...]:
        """Return the senders in the transfer groups of these engines."""
        groups = [group for group in map(self.transfer_group_of, engines) if group is not None]
        return tuple(sender for sender in self.plan.senders if any(sender in group.members for group in groups))


def processes_in(transfer_group: messages.PlannedTransferGroup) -> list[str]:
    """Return the processes that have parts in a transfer group."""
    return list(dict.fromkeys(map(process_of, transfer_group.members)))


_NOT_TO_BE_CONNECTED = {
    EngineStatus.ABSENT,
    EngineStatus.JOINED,
    EngineStatus.BUILDING,
    EngineStatus.INSTALLING,
    EngineStatus.REFITTING,
}
"""The statuses that keep an engine's transfer group unconnected: it is absent, or busy with partial weights."""


class TransferGroups:
    """The transfer groups of the plan. Their first connection, while the run is set up, happens elsewhere."""

    def __init__(
        self, transfers: TransferPlanner, engines: EngineTable, requests: PendingRequests, changed: Changed
    ) -> None:
        self._changed = changed
        self._transfers = transfers
        self._engines = engines
        self._requests = requests
        self.connecting: dict[str, set[int]] = {}
        """The requests that must be answered before a transfer group is connected again."""

    def connect(self, *, may_join: bool) -> list[Action]:
        """Reconnect each transfer group when all of its engines are ready for it.

        `may_join` says whether trainers can take part. A trainer in a step cannot until the step ends.
        """
        actions: list[Action] = []
        for name in self._engines.having(EngineStatus.CONNECTING):
            transfer_group = self._transfers.transfer_group_of(name)
            if transfer_group is None:
                self._engines.move(self._engines[name], EngineStatus.READY)
                continue
            if transfer_group.name in self.connecting or not may_join:
                continue
            if not {self._engines[engine].status for engine in self._engines_in(transfer_group)} & _NOT_TO_BE_CONNECTED:
                commands = self._transfers.request_connect(transfer_group)
                self.connecting[transfer_group.name] = {action.command.command_id for action in commands}
                actions += commands
        return actions

    def take_reply(self, command_id: int) -> bool:
        """Take the answer of a process in a transfer group. Return whether the request was to connect the group."""
        for name, awaited in self.connecting.items():
            if command_id in awaited:
                awaited.discard(command_id)
                if not awaited:
                    self._connected(name)
                return True
        return False

    def stop_connecting(self, engine: str) -> None:
        """Stop waiting for the transfer group of a lost engine. It is connected when a replacement is there."""
        transfer_group = self._transfers.transfer_group_of(engine)
        if transfer_group is not None:
            self._stop_connecting(transfer_group.name)

    def stop(self) -> None:
        """Stop waiting for all transfer groups."""
        for transfer_group in [*self.connecting]:
            self._stop_connecting(transfer_group)

    def has_others(self, engine: str) -> bool:
        """Tell whether an engine shares a transfer group with others, which fixes the sender of its weights."""
        transfer_group = self._transfers.transfer_group_of(engine)
        return transfer_group is not None and len(self._engines_in(transfer_group)) > 1

    def who_get_it_whole(self, able: list[str], version: int) -> list[str]:
        """Leave out engines that would get older or partial weights, or none, from another engine of their group."""
        takers, candidates = [], set(able)
        for name in able:
            transfer_group = self._transfers.transfer_group_of(name)
            peers = self._engines_in(transfer_group) if transfer_group is not None else []
            if all(peer in candidates or _holds(self._engines[peer], version) for peer in peers):
                takers.append(name)
        return takers

    def _connected(self, name: str) -> None:
        del self.connecting[name]
        self._changed()
        transfer_group = next(
            transfer_group for transfer_group in self._transfers.plan.transfer_groups if transfer_group.name == name
        )
        for engine in self._engines_in(transfer_group):
            if self._engines[engine].status is EngineStatus.CONNECTING:
                self._engines.move(self._engines[engine], EngineStatus.READY)

    def _stop_connecting(self, transfer_group: str) -> None:
        """Stop waiting for a transfer group. Its processes wait in vain until the next attempt."""
        for command_id in self.connecting.pop(transfer_group, ()):
            self._requests.close(command_id)
        self._changed()

    def _engines_in(self, transfer_group: messages.PlannedTransferGroup) -> list[str]:
        return [name for name in processes_in(transfer_group) if name in self._engines]


def _holds(engine: EngineState, version: int) -> bool:
    return engine.status is EngineStatus.HOLDING and engine.version == version
