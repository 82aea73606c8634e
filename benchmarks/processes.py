"""The weight plane without a coordinator: trainers and engines in processes of their own, which a benchmark commands.

Each process runs the loop, the `ServiceContext` and the `WeightClient` that services run, over a pipe instead of a
socket. What a benchmark wants beside the plane's commands (an alternative, new weights, a check) it asks for by name.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch.multiprocessing
from torch.distributed import TCPStore

from tandem.common.curve import AdmittedKeys, new_key_pair
from tandem.common.messages import (
    CommitVersion,
    ConnectTransferGroup,
    Failed,
    FromRefit,
    FromRollout,
    InstallProgram,
    Message,
    PlanTransfers,
    Refit,
    ReportDigests,
    Shutdown,
    ToRollout,
    TransfersPlanned,
    VersionCommitted,
    Welcome,
)
from tandem.common.wire import Arrays, Frames, MessageCodec, ReceivedMessage, encode
from tandem.config import build_config, config_to_json
from tandem.launch.run_service import RunnableService, _answer_commands
from tandem.launch.service import ServiceContext
from tandem.refit.service import RefitService
from tandem.refit.weight_client import WeightClient

if TYPE_CHECKING:
    from tandem.rollout.service import RolloutService

TIMEOUT_S = 300.0
VERIFY = ("off", "sampled", "full")

Asked = Mapping[str, Callable[..., Any]]
"""What a process does for a benchmark, by name."""
Make = Callable[..., tuple[RunnableService, Asked]]
"""Takes the member, its connection and further arguments; runs in the process."""


def config_json(verify: str, **policy: Any) -> bytes:
    """Return the smallest configuration that the plane's code reads."""
    settings = {
        "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 1, "val_period": 0},
        "loss_fn": {"reference_policy_kl_penalty": 0.0},
        "policy": {
            "model_name": "model",
            "train_global_batch_size": 2,
            "train_micro_batch_size": 2,
            "max_total_sequence_length": 64,
            "precision": "float32",
            "generation": {"max_new_tokens": 8},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-6}},
            **policy,
        },
        "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        "checkpointing": {"enabled": False, "checkpoint_dir": "none", "metric_name": "reward"},
        "cluster": {"threads_per_process": 1},
        "refit": {"verify": verify},
    }
    return config_to_json(build_config(settings))


class EndpointService:
    """A service that knows no commands but the weight plane's."""

    weight_client: WeightClient

    def verify(self, mode: str) -> None:
        """Verify like this from now on: so that one run has every way."""
        self.weight_client._verify = mode  # type: ignore[assignment]

    def handle(self, command: Any, arrays: Arrays) -> None:
        """Carry out one command."""
        self.weight_client.handle(command)

    def work(self) -> bool:
        """Go on with digests."""
        return self.weight_client.work()

    def close(self) -> None:
        """Leave all meshes."""
        self.weight_client.close()


class PipeLink:
    """A `tandem.common.wire.Link` over a pipe, which also answers what the benchmark asks for."""

    def __init__(self, connection: Connection, asked: Asked) -> None:
        self._connection = connection
        self._codec: MessageCodec[Any] = MessageCodec(ToRollout)
        self.asked = asked
        self.own, self.trainers = new_key_pair(), AdmittedKeys()

    def send(self, frames: Frames) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode([bytes(frame) for frame in frames]))

    def set_phase(self, name: str) -> None:
        """Heartbeats would report it."""

    def receive(self, timeout_s: float) -> ReceivedMessage[Any] | None:
        while self._connection.poll(timeout_s):
            frames = msgspec.msgpack.decode(self._connection.recv_bytes())
            if isinstance(frames, dict):
                self._connection.send_bytes(msgspec.msgpack.encode(self._answer(**frames)))
            else:
                return self._codec.decode(frames)
        return None

    def _answer(self, ask: str, arguments: list[Any]) -> Any:
        try:
            return [self.asked[ask](*arguments)]
        except Exception:
            return traceback.format_exc()


def _serve(connection: Connection, make: Make, name: str, config: bytes, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    link = PipeLink(connection, {})
    index = int(name.rpartition("-")[2])
    welcome = Welcome(
        name=name, index=index, run_id="", heartbeat_interval_s=1, heartbeat_timeout_s=15, config_json=config
    )
    context = ServiceContext(link, welcome, "tcp://127.0.0.1:0")  # type: ignore[arg-type]
    service, link.asked = make(context, connection, *arguments)
    _answer_commands(link, context, service)  # type: ignore[arg-type]
    service.close()


_FROM_MEMBER: MessageCodec[Any] = MessageCodec(FromRollout)
_FROM_REFIT: MessageCodec[Any] = MessageCodec(FromRefit)


class Remote:
    """A member in another process."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.connection = connection

    def command(self, message: Message) -> None:
        """Send a command."""
        self.connection.send_bytes(msgspec.msgpack.encode([bytes(frame) for frame in encode(message)]))

    def receive(self) -> Any:
        """Return the next message, which must not be a failure."""
        return self.receive_all()[0]

    def receive_all(self) -> tuple[Any, Arrays]:
        """Return the next message and its arrays."""
        assert self.connection.poll(TIMEOUT_S), f"{self.name} does not answer"
        received = _FROM_MEMBER.decode(msgspec.msgpack.decode(self.connection.recv_bytes()))
        message = received.message
        assert not isinstance(message, Failed), f"{self.name}: {message.error}\n{message.traceback}"
        return message, received.arrays

    def tell(self, ask: str, *arguments: Any) -> None:
        """Ask for something; `answer` has its result."""
        self.connection.send_bytes(msgspec.msgpack.encode({"ask": ask, "arguments": arguments}))

    def answer(self) -> Any:
        """Return the result of what was asked for."""
        assert self.connection.poll(TIMEOUT_S), f"{self.name} does not answer"
        answer = msgspec.msgpack.decode(self.connection.recv_bytes())
        assert isinstance(answer, list), f"{self.name}: {answer}"
        return answer[0]

    def ask(self, ask: str, *arguments: Any) -> Any:
        """Ask, and wait for the result."""
        self.tell(ask, *arguments)
        return self.answer()


@contextmanager
def started(make: Make, config: bytes, members: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Remote]]:
    """Start a process for each member; all have ended at the end."""
    context = torch.multiprocessing.get_context("spawn")
    processes, remotes = [], {}
    try:
        for name, arguments in members.items():
            connection, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, make, name, config, arguments), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            remotes[name] = Remote(name, connection)
        yield remotes
        for remote in remotes.values():
            remote.command(Shutdown(reason="the benchmark is over"))
        for process in processes:
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join(TIMEOUT_S)


class _Replies:
    """The link of a service in the benchmark's own process."""

    def __init__(self) -> None:
        self.replies: list[Frames] = []
        self.own, self.trainers = new_key_pair(), AdmittedKeys()

    def send(self, frames: Frames) -> None:
        self.replies.append(frames)

    def set_phase(self, name: str) -> None:
        """Heartbeats would report it."""


def take_samples(service: RolloutService, command_id: int) -> list[tuple[int, int, list[int]]]:
    """Return group, place and tokens of each sample that was made for a command, and keep them no longer."""
    store = service.parts.store
    taken = [(*place, arrays.token_ids_T.tolist()) for place, arrays in store._samples[command_id].items()]
    store.release([command_id])
    return taken


class Plane:
    """Commands the processes as the coordinator's weight plane does, with the real refit service beside it."""

    def __init__(
        self,
        trainers: Sequence[Remote],
        engines: Sequence[Remote],
        config: bytes,
        *,
        alias: bool,
        alias_frozen: bool = False,
    ) -> None:
        """Plan and install, from the layouts that the processes answer to ``layout``."""
        self.trainers, self.engines = trainers, engines
        self._replies = _Replies()
        welcome = Welcome(
            name="refit-0", index=0, run_id="", heartbeat_interval_s=1, heartbeat_timeout_s=15, config_json=config
        )
        self._service = RefitService(ServiceContext(self._replies, welcome, ""))  # type: ignore[arg-type]
        self._ids = itertools.count(1)
        layouts = {remote.name: remote.ask("layout") for remote in [*trainers, *engines]}
        command = PlanTransfers(
            sources={remote.name: layouts[remote.name] for remote in trainers},
            destinations={remote.name: layouts[remote.name] for remote in engines},
            allow_alias=alias,
            alias_frozen=alias_frozen,
            **self.promise(),
        )
        self.planned: TransfersPlanned = self._serve(command)
        for remote in [*trainers, *engines]:
            remote.command(InstallProgram(programs=(self.planned.programs[remote.name],), **self.promise()))
        for remote in [*trainers, *engines]:
            remote.receive()
        self._connect()

    def _connect(self) -> None:
        """Connect the meshes, where weights are streamed."""
        if not self.planned.transfer_groups:
            return
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        remotes = {remote.name: remote for remote in [*self.trainers, *self.engines]}
        for transfer_group in self.planned.transfer_groups:
            for name in transfer_group.members:
                command = ConnectTransferGroup(
                    transfer_group=transfer_group.name,
                    members=transfer_group.members,
                    epoch=0,
                    rendezvous_host="127.0.0.1",
                    rendezvous_port=self._store.port,
                    **self.promise(),
                )
                remotes[name].command(command)
            for name in transfer_group.members:
                remotes[name].receive()

    def promise(self) -> dict[str, Any]:
        """Return what every command has."""
        return {"command_id": next(self._ids), "deadline_s": TIMEOUT_S}

    def refit(self, version: int, *, is_first: bool = False) -> int:
        """Have every engine hold a version, the first one with what never changes; return the bytes that were moved."""
        joining_engines = tuple(engine.name for engine in self.engines) if is_first else ()
        senders = [remote for remote in self.trainers if remote.name in self.planned.senders]
        for remote in [*senders, *self.engines]:
            remote.command(Refit(version=version, joining_engines=joining_engines, **self.promise()))
        for remote in senders:
            remote.receive()
        return sum(sum(engine.receive().num_bytes.values()) for engine in self.engines)

    def request_digests(self, version: int) -> None:
        """Have the version digested everywhere."""
        for remote in [*self.trainers, *self.engines]:
            remote.command(ReportDigests(version=version, **self.promise()))

    def commit(self, version: int, digests: Mapping[str, bytes]) -> None:
        """Have the refit service compare the digests; they must agree."""
        command = CommitVersion(version=version, digests=dict(digests), has_update=True, **self.promise())
        committed: VersionCommitted = self._serve(command)
        assert committed.differing == {}
        assert committed.digest != 0

    def verify(self, version: int) -> None:
        """Have the version digested everywhere, and compared."""
        self.request_digests(version)
        remotes = [*self.trainers, *self.engines]
        self.commit(version, {remote.name: remote.receive().digests[0] for remote in remotes})

    def _serve(self, command: Any) -> Any:
        self._service.handle(command, {})
        return _FROM_REFIT.decode(self._replies.replies.pop()).message


def enter_network(namespace: str) -> None:
    """Move this thread, and those that it starts, to a network namespace."""
    with open(f"/run/netns/{namespace}", "rb") as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


def limit_rate(namespace: str, gigabytes_per_s: float) -> None:
    """Hold what a host sends over its cable to a rate."""
    words = f"qdisc add dev cable root tbf rate {gigabytes_per_s * 8}gbit burst 4mb latency 100ms"
    command = ["tc", "-n", namespace, *words.split()]
    limited = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if limited.returncode:
        pytest.skip(f"the cable cannot be held to a rate here: {limited.stderr.strip()}")


def clock() -> float:
    """Return a time that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
