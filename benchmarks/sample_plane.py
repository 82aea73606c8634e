"""A coordinator's own parts with stand-ins for ranks and engines: what its steps over samples cost.

Stand-ins are a few processes with many sockets each, which speak the real protocol and compute nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.smoke import sized
from tandem.common.curve import new_key_pair, prove
from tandem.common.keys import ProcessKeys
from tandem.common.messages import (
    PROTOCOL_VERSION,
    BuildEngine,
    BuildTrainer,
    EngineBuilt,
    FromRollout,
    Generate,
    Generated,
    Hello,
    MemoryUse,
    Problem,
    PromptGroup,
    Refit,
    Refitted,
    SampleScored,
    SamplesFinished,
    SamplingParameters,
    ServiceKind,
    ToRollout,
    ToTrainer,
    Train,
    TrainerBuilt,
)
from tandem.common.wire import Frames, MessageCodec, encode
from tandem.config import Config, build_config
from tandem.coordinator.algorithms.step_batch import training_batch
from tandem.coordinator.loop.loop import StepBatches
from tandem.coordinator.processes.registry import ProcessRegistry
from tandem.coordinator.processes.replies import Replies, SampleLimits
from tandem.coordinator.scheduler.events import (
    CommandFields,
    DispatchBatch,
    GroupSize,
    ProcessJoined,
    ProcessReplied,
    SampleRecord,
)
from tandem.coordinator.scheduler.groups.table import GroupTable
from tandem.launch.admission import HeartbeatSettings
from tandem.refit import layout
from tandem.refit.layout import LayoutBuilder
from tandem.samples.batch import SAMPLES, SampleBatch
from tests.harness.answers import trained
from tests.harness.members import at, open_listening

NUM_GROUPS, GROUP_SIZE, PROMPT = sized(128, 8), 8, 128
DEADLINE_S = 120.0
MEMORY = MemoryUse(peak=1, held=1)
VOCABULARY = 150_000


# --- stand-ins -------------------------------------------------------------------------------------------------------


def stand_in(address: str, kind: ServiceKind) -> None:
    """Be processes whose keys come in: join, answer every command at once, end with the coordinator's process."""
    context, poller = zmq.Context(), zmq.Poller()
    codec: MessageCodec[Any] = MessageCodec(ToTrainer if kind == "trainer" else ToRollout)
    own = msgspec.json.decode(sys.stdin.buffer.read(), type=list[ProcessKeys])
    for keys in own:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        prove(socket, keys.own, keys.coordinator)
        socket.connect(address)
        socket.send_multipart(encode(Hello(protocol_version=PROTOCOL_VERSION, service=kind, host="here", pid=1)))
        poller.register(socket, zmq.POLLIN)
    parent = os.getppid()
    while os.getppid() == parent:
        for socket, _ in poller.poll(1000):
            frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
            for answer in answers(codec.decode(frames).message):
                socket.send_multipart(answer, copy=False)
    context.destroy(linger=0)


def answers(command: Any) -> Iterator[Frames]:
    match command:
        case BuildTrainer(command_id=command_id):
            yield encode(
                TrainerBuilt(
                    command_id=command_id, version=0, num_parameters=1, shares_prompts=True, layout=empty_layout()
                )
            )
        case BuildEngine(command_id=command_id):
            yield encode(
                EngineBuilt(command_id=command_id, layouts=(empty_layout(),), samples_at=at("tcp://10.0.0.1:4711"))
            )
        case Refit(command_id=command_id, version=version):
            yield encode(Refitted(command_id=command_id, version=version, num_bytes={}, seconds=0.1, memory=MEMORY))
        case Train(command_id=command_id, step=step):
            yield encode(trained(command_id, step))
        case Generate():
            yield from generated(command)
        case _:
            pass


def generated(command: Generate) -> Iterator[Frames]:
    """Finish one sample after the other, each in a message of its own; with their arrays in the former way."""
    with_arrays = command.sampling.temperature == FORMER
    num_made = command.sampling.max_new_tokens
    num_samples = 0
    for group in command.groups:
        for sample in range(len(group.seeds)):
            num_samples += 1
            scored = SampleScored(
                group=group.group,
                sample=sample,
                prompt_length=len(group.prompt_ids),
                response_length=num_made,
                num_tokens=len(group.prompt_ids) + num_made,
                oldest_version=0,
                newest_version=0,
                tokens_by_version=(num_made,),
                num_turns=1,
                finish_reason="stop",
                reward=float(sample % 3),
                correct=sample == 0,
                response="",
            )
            finished = SamplesFinished(
                command_id=command.command_id, step=command.step, purpose=command.purpose, samples=(scored,)
            )
            arrays = arrays_of(group, num_made).columns if with_arrays else None
            yield encode(finished, arrays)
    yield encode(
        Generated(
            command_id=command.command_id,
            step=command.step,
            purpose=command.purpose,
            num_samples=num_samples,
            num_tokens=num_samples * num_made,
            seconds={},
            memory=MEMORY,
        )
    )


def arrays_of(group: PromptGroup, num_made: int) -> SampleBatch:
    length = len(group.prompt_ids) + num_made
    made_T = np.arange(length) >= len(group.prompt_ids)
    return SampleBatch(
        lengths_S=np.array([length], dtype=np.int32),
        token_ids_T=np.concatenate([np.array(group.prompt_ids, np.int32), np.full(num_made, 9, np.int32)]),
        loss_mask_T=made_T,
        generation_logprobs_T=np.where(made_T, np.float32(-0.5), np.float32(0)),
        versions_T=np.where(made_T, np.int32(0), np.int32(-1)),
    )


def empty_layout() -> bytes:
    return layout.encode(LayoutBuilder("here").build())


# --- the coordinator -------------------------------------------------------------------------------------------------

OURS, FORMER = 1.0, 0.5
"""The way, as the temperature that engines are told."""


class RunningAlgorithm:
    """What `StepBatches` asks of an algorithm, from the records of one step."""

    def __init__(self, config: Config, prompts: dict[int, Any]) -> None:
        self.validation_parts: dict[str, int] = {}
        self._config = config
        self._prompts = prompts

    def batch(self, step: int, purpose: Any, records: Sequence[SampleRecord]) -> Any:
        return training_batch(self._config, step, records, self._prompts)


class Cluster:
    """A coordinator's registry, and stand-ins for everybody else."""

    def __init__(self, num_ranks: int, num_engines: int, length: int) -> None:
        listening = open_listening()
        self.hub = listening.hub
        self.config = config_of(num_ranks, num_engines, length)
        limits = SampleLimits(vocabulary=VOCABULARY, max_tokens=length, max_turns=1)
        expected: dict[ServiceKind, int] = {"trainer": num_ranks, "rollout": num_engines}
        heartbeat = HeartbeatSettings(interval_s=1000.0, timeout_s=1000.0)
        self.registry = ProcessRegistry(listening, expected, b"{}", "run", heartbeat, Replies(limits))
        self.ranks = [f"trainer-{i}" for i in range(num_ranks)]
        self.engines = [f"rollout-{i}" for i in range(num_engines)]
        self.prompts = {
            group: tuple(int(t) for t in np.random.default_rng(group).integers(3, VOCABULARY, PROMPT))
            for group in range(NUM_GROUPS)
        }
        self._num_made = length - PROMPT
        self._processes = [self._stand_ins(kind, count // 2) for kind, count in expected.items() for _ in range(2)]
        self._command_id = 0
        self._step = 0
        self.bytes_sent = self.bytes_received = 0
        joined = 0
        while joined < num_ranks + num_engines:
            joined += sum(isinstance(event, ProcessJoined) for event in self.registry.receive(1.0))
        self.built = [self.ask(rank, BuildTrainer(**self.command(), **MEETING)) for rank in self.ranks]
        self.built += [self.ask(engine, BuildEngine(**self.command())) for engine in self.engines]
        for engine in self.engines:
            self.ask(engine, Refit(**self.command(), version=0))

    def _stand_ins(self, kind: ServiceKind, count: int) -> subprocess.Popen[bytes]:
        """Start a process that stands for several members."""
        words = [sys.executable, "-m", "benchmarks.sample_plane", self.hub.address, kind]
        process = subprocess.Popen(words, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE)
        keys = [
            ProcessKeys(coordinator=self.hub.at.public_key, own=new_key_pair(), is_joining=False) for _ in range(count)
        ]
        for each in keys:
            self.registry.names.register(each.own.public)
        assert process.stdin is not None
        with process.stdin as file:
            file.write(msgspec.json.encode(keys))
        return process

    def command(self) -> CommandFields:
        self._command_id += 1
        return {"command_id": self._command_id, "deadline_s": DEADLINE_S}

    def send(self, process: str, command: Any, arrays: Any = None) -> None:
        frames = encode(command, arrays)
        self.bytes_sent += sum(map(len, frames))
        self.registry.command(process, command, frames)

    def ask(self, process: str, command: Any) -> ProcessReplied:
        self.send(process, command)
        return next(iter(self.replies(1)))

    def replies(self, count: int) -> Iterator[ProcessReplied]:
        """Yield replies until so many commands are answered whole."""
        deadline = time.monotonic() + DEADLINE_S
        while count:
            assert time.monotonic() < deadline
            for event in self.registry.receive(1.0):
                assert isinstance(event, ProcessReplied), event
                count -= not isinstance(event.reply, SamplesFinished)
                yield event

    def commands(self, way: float) -> Iterator[tuple[str, Generate]]:
        sampling = SamplingParameters(
            temperature=way, top_p=1.0, top_k=0, max_new_tokens=self._num_made, stop_token_ids=(2,), stop_strings=()
        )
        self._step += 1
        for number, engine in enumerate(self.engines):
            groups = tuple(
                PromptGroup(
                    group=group,
                    problem=Problem(problem_id=f"p{group}", question="", answer="", metadata={}),
                    prompt_ids=self.prompts[group],
                    seeds=tuple(range(GROUP_SIZE)),
                )
                for group in range(number, NUM_GROUPS, len(self.engines))
            )
            command = self.command()
            yield (
                engine,
                Generate(
                    **command,
                    cancel_before=command["command_id"],
                    step=self._step,
                    purpose="train",
                    sampling=sampling,
                    groups=groups,
                ),
            )

    def step(self) -> dict[str, float]:
        """Take one step; return the seconds of processor time by what they were for."""
        running = RunningAlgorithm(self.config, self.prompts)
        batches = StepBatches(self.config, running)  # type: ignore[arg-type]
        for built in self.built:
            batches.take_reply(built.process, built.reply)
        self.bytes_sent = 0
        times = [time.process_time()]
        groups = GroupTable()
        groups.draw(self._step + 1, "train", NUM_GROUPS)
        waiting: Any = None
        for engine, command in self.commands(OURS):
            if waiting is None:
                sizes = [GroupSize(num_samples=GROUP_SIZE, num_tokens=1)] * NUM_GROUPS
                waiting = groups.add(self._step, "train", sizes)
            groups.assign([waiting[group.group] for group in command.groups], engine, command.command_id)
            self.send(engine, command)
        times.append(time.process_time())
        sent_to_engines = self.bytes_sent
        for event in self.replies(len(self.engines)):
            if isinstance(event.reply, SamplesFinished):
                groups.take_results(event.process, event.reply)
        of_step = groups.of_step(self._step, "train")
        assert of_step is not None
        times.append(time.process_time())
        action = DispatchBatch(step=self._step, purpose="train", commands={rank: self.command() for rank in self.ranks})
        made = batches.make(action, of_step.records())
        times.append(time.process_time())
        for rank, command, arrays in made.commands:
            self.send(rank, command, arrays)
        for _ in self.replies(len(self.ranks)):
            pass
        times.append(time.process_time())
        self.bytes_to_ranks = self.bytes_sent - sent_to_engines
        names = ("order samples", "take records", "make and assign the batch", "send it and hear of it")
        seconds = {name: end - start for name, start, end in zip(names, times, times[1:], strict=False)}
        return seconds | {"all": times[-1] - times[0]}

    def former_step(self) -> dict[str, float]:
        """Take one step in which arrays come here and go to every rank."""
        codec: MessageCodec[Any] = MessageCodec(FromRollout)
        bundles: dict[tuple[int, int], SampleBatch] = {}
        began = time.process_time()
        for engine, command in self.commands(FORMER):
            self.registry.send(engine, encode(command))
        num_done, deadline = 0, time.monotonic() + DEADLINE_S
        while num_done < len(self.engines):
            assert time.monotonic() < deadline
            for _, frames in self.hub.receive(1.0):
                received = codec.decode(frames)
                if isinstance(received.message, Generated):
                    num_done += 1
                    continue
                (sample,) = received.message.samples
                bundles[sample.group, sample.sample] = SampleBatch.parse_frames(received.arrays, SAMPLES)
        arrays = SampleBatch.concatenate([bundles[key] for key in sorted(bundles)])
        batch = SampleBatch(
            lengths_S=arrays.lengths_S,
            token_ids_T=arrays.token_ids_T,
            loss_mask_T=arrays.loss_mask_T,
            generation_logprobs_T=arrays.generation_logprobs_T,
            advantages_S=np.ones(len(arrays.lengths_S), dtype=np.float32),
            rewards_S=np.zeros(len(arrays.lengths_S), dtype=np.float32),
        )
        self.bytes_to_ranks = 0
        for rank in self.ranks:
            command = Train(**self.command(), step=self._step, sources={})
            frames = encode(command, batch.columns)
            self.bytes_to_ranks += sum(map(len, frames))
            self.registry.command(rank, command, frames)
        for _ in self.replies(len(self.ranks)):
            pass
        return {"all": time.process_time() - began}

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self.hub.close()


MEETING: dict[str, Any] = {"rendezvous_host": "here", "rendezvous_port": 1, "world_size": 1, "version": 0}


def config_of(num_ranks: int, num_engines: int, length: int) -> Config:
    return build_config(
        {
            "grpo": {"num_prompts_per_step": NUM_GROUPS, "num_generations_per_prompt": GROUP_SIZE},
            "policy": {
                "model_name": "model",
                "max_total_sequence_length": length,
                "train_global_batch_size": NUM_GROUPS * GROUP_SIZE,
                "train_micro_batch_size": 1,
                "generation": {"max_new_tokens": length - PROMPT},
            },
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
            "cluster": {"trainers": num_ranks, "rollouts": num_engines},
        }
    )


@contextmanager
def cluster_of(num_ranks: int, num_engines: int, length: int) -> Iterator[Cluster]:
    cluster = Cluster(num_ranks, num_engines, length)
    try:
        yield cluster
    finally:
        cluster.stop()


if __name__ == "__main__":
    stand_in(sys.argv[1], sys.argv[2])  # type: ignore[arg-type]
