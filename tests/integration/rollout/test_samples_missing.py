"""A rollout dies between finishing samples and giving them out: every rank says so, and no weight has changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.curve import AdmittedKeys
from tandem.common.keys import KeyPair
from tandem.common.messages import (
    BuildTrainer,
    Listener,
    Message,
    OpenRendezvous,
    RendezvousOpened,
    SamplesMissing,
    Train,
    Trained,
    TrainerBuilt,
)
from tandem.config import Config
from tandem.samples.batch import SAMPLES, SampleBatch, build_given_table
from tandem.samples.batch_sharding import BatchSharding
from tandem.samples.sample_store import SampleStore
from tandem.trainer.service import TrainerService
from tests.harness.members import MEMBER
from tests.harness.trainers.trainer_harness import CONTEXT, DEADLINE_S, digest_of, make_config, make_groups, make_model

pytestmark = pytest.mark.usefixtures("rank_server")

RUN_ID = "run"
BATCH = make_groups(4, 4)


class Context:
    """Stands where the link to the coordinator would: keeps what the service sends."""

    run_id = RUN_ID
    coordinator = "tcp://127.0.0.1:1"

    def __init__(self, config: Config, index: int, keys: KeyPair) -> None:
        self.keys = keys
        self.config, self.index, self.name = config, index, f"trainer-{index}"
        self.sent: list[Message] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def reply(self, command_id: int, message: Message) -> None:
        self.sent.append(message)


def serve_trainer(end: Connection, config: Config, index: int, own: KeyPair) -> None:
    """Carry out commands until there are no more; answer each with what was said, and what the weights are then."""
    context = Context(config, index, own)
    service = TrainerService(context)  # type: ignore[arg-type]
    while (command := end.recv()) is not None:
        service.handle(*command)
        end.send((context.sent.pop(), digest_of(service._parts.backend) if service._parts is not None else 0))
    service.close()


def serve_samples(end: Connection, batch: SampleBatch, command_id: int, trainer: str) -> None:
    """Have a rollout that keeps every sequence of a batch as a sample; its group is the row."""
    store = SampleStore("127.0.0.1", RUN_ID, max_tokens=10_000, trainers=AdmittedKeys([trainer]))
    for row in range(len(batch.lengths_S)):
        one = batch.take([row])
        versions_T = np.where(one.loss_mask_T, np.int32(0), np.int32(-1))
        arrays = {name: one.columns[name] for name in SAMPLES if name.endswith(("_S", "_T")) and name != "versions_T"}
        store.put((command_id, row, 0), SampleBatch(**arrays, versions_T=versions_T))
    end.send(store.at)
    end.recv()
    store.close()


class Processes:
    """Two trainer ranks and some rollouts."""

    def __init__(self, config: Config) -> None:
        self._started: list[tuple[BaseProcess, Connection]] = []
        self.ranks = [self.start(serve_trainer, config, index, MEMBER)[1] for index in range(2)]
        (opened, _), *_ = self.command(OpenRendezvous(command_id=1, deadline_s=60.0), ranks=[self.ranks[0]])
        assert isinstance(opened, RendezvousOpened)
        built = self.command(
            BuildTrainer(
                command_id=2,
                deadline_s=60.0,
                rendezvous_host=opened.host,
                rendezvous_port=opened.port,
                world_size=2,
                version=0,
            )
        )
        assert [type(reply) for reply, _ in built] == [TrainerBuilt] * 2
        self.digests = [digest for _, digest in built]

    def start(self, function: Any, *args: Any) -> tuple[BaseProcess, Connection]:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=function, args=(theirs, *args))
        process.start()
        theirs.close()
        self._started.append((process, ours))
        return process, ours

    def rollout(self, command_id: int) -> tuple[BaseProcess, Listener]:
        process, end = self.start(serve_samples, BATCH, command_id, MEMBER.public)
        assert end.poll(DEADLINE_S)
        return process, end.recv()

    def command(
        self, command: Any, arrays: Any = None, ranks: list[Connection] | None = None
    ) -> list[tuple[Message, int]]:
        ranks = ranks or self.ranks
        for rank in ranks:
            rank.send((command, arrays or {}))
        answers = []
        for rank in ranks:
            assert rank.poll(DEADLINE_S)
            answers.append(rank.recv())
        return answers

    def train(self, command_id: int, table: SampleBatch, sources: dict[str, Listener]) -> list[tuple[Message, int]]:
        command = Train(command_id=command_id, deadline_s=60.0, step=1, sources=sources)
        return self.command(command, table.columns)

    def stop(self) -> None:
        for _, end in self._started:
            with contextlib.suppress(OSError):
                end.send(None)
        for process, end in self._started:
            process.join(60.0)
            if process.is_alive():
                process.kill()
                process.join()
            end.close()


@contextlib.contextmanager
def processes(config: Config) -> Iterator[Processes]:
    started = Processes(config)
    try:
        yield started
    finally:
        started.stop()


def table_of(config: Config, sources: dict[int, int], commands: dict[int, int]) -> SampleBatch:
    """Return the batch's table, where each rank's sequences are all of one source, made for one command."""
    table = BatchSharding.of(config, shares_prompts=True).shard(build_given_table(BATCH))
    return table.replace(
        source_S=np.array([sources[rank] for rank in table.rank_S.tolist()], dtype=np.int32),
        command_S=np.array([commands[rank] for rank in table.rank_S.tolist()], dtype=np.int64),
        group_S=np.arange(len(table), dtype=np.int32),
    )


def test_what_one_rank_lacks_no_rank_trains_without(tmp_path: Path) -> None:
    config = make_config(make_model(tmp_path / "model"), trainers=2)
    with processes(config) as there:
        (_, first), (process, second) = there.rollout(7), there.rollout(8)
        process.kill()
        process.join()
        table = table_of(config, {0: 0, 1: 1}, {0: 7, 1: 8})
        replies = there.train(3, table, {"rollout-0": first, "rollout-1": second})
        assert [reply for reply, _ in replies] == [
            SamplesMissing(command_id=3, step=1, rollouts={}),
            SamplesMissing(command_id=3, step=1, rollouts={"rollout-1": f"nobody answers at {second.address}"}),
        ]
        assert [digest for _, digest in replies] == there.digests, "no weight has changed"
        # What was lost is made again; what rank 0 has fetched is not asked for again, and is not to be had any more.
        (_, third) = there.rollout(9)
        table = table_of(config, {0: 0, 1: 1}, {0: 7, 1: 9})
        replies = there.train(4, table, {"rollout-0": "tcp://127.0.0.1:1", "rollout-1": third})
        assert all(isinstance(reply, Trained) for reply, _ in replies)
        after = [digest for _, digest in replies]
    with processes(config) as undisturbed:
        (_, address) = undisturbed.rollout(7)
        replies = undisturbed.train(3, table_of(config, {0: 0, 1: 0}, {0: 7, 1: 7}), {"rollout-0": address})
        assert [digest for _, digest in replies] == after != undisturbed.digests
