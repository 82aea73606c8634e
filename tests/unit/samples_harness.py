"""Samples, what is known of them, and a process's way to fetch them that is not the trainer's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tandem.common.curve import AdmittedKeys
from tandem.common.messages import (
    FetchSamples,
    FromSampleStore,
    Listener,
    PromptGroup,
    SampleKey,
    SampleScored,
    SamplesFetched,
    SamplesFinished,
    SamplesGone,
    SequenceKey,
)
from tandem.common.wire import CallerConnections, Frames, MessageCodec, encode
from tandem.coordinator.scheduler.events import GroupSize, SampleRecord
from tandem.coordinator.scheduler.groups.table import GroupTable
from tandem.samples.batch import MEDIA, SAMPLES, SampleBatch
from tandem.samples.sample_record import RecordedSample
from tests.harness.members import MEMBER

RUN_ID = "run"
WAIT_S = 60.0
TRAINERS = AdmittedKeys([MEMBER.public])


def scored(group: int, sample: int, *, prompt_length: int = 1, response_length: int = 1, **known: Any) -> SampleScored:
    """What is known of a sample of one turn."""
    usual: dict[str, Any] = {
        "num_tokens": prompt_length + response_length,
        "oldest_version": 0,
        "newest_version": 0,
        "num_turns": 1,
        "finish_reason": "stop",
        "reward": 0.0,
        "correct": False,
        "response": "",
    }
    if "tokens_by_version" not in known:
        versions = usual | known
        span = versions["newest_version"] - versions["oldest_version"]
        usual["tokens_by_version"] = (response_length, *[0] * span)
    return SampleScored(
        group=group, sample=sample, prompt_length=prompt_length, response_length=response_length, **usual | known
    )


def sample_of(length: int, *, prompt_length: int = 2, first_token: int = 0) -> SampleBatch:
    """A sample of consecutive tokens; log-probabilities tell them apart, too."""
    made_T = np.arange(length) >= prompt_length
    return SampleBatch(
        lengths_S=np.array([length], dtype=np.int32),
        token_ids_T=np.arange(first_token, first_token + length, dtype=np.int32),
        loss_mask_T=made_T,
        generation_logprobs_T=np.where(made_T, -np.arange(length) / 8, 0).astype(np.float32),
        versions_T=np.where(made_T, 3, -1).astype(np.int32),
    )


def recorded(known: SampleScored, arrays: SampleBatch, **more: Any) -> RecordedSample:
    """A row of the record of samples."""
    usual: dict[str, Any] = {
        "step": 12,
        "rollout": "rollout-0",
        "command_id": 3,
        "problem_id": f"problem-{known.group}",
        "question": "2+2=",
        "answer": "4",
        "prompt": "<s>2+2=",
        "started_at": 1e9,
        "finished_at": 1e9 + 1.5,
    }
    return RecordedSample(scored=known, arrays=arrays, **usual | more)


def sequence_key(command_id: int, group: int, sample: int, branch: int = 0) -> SequenceKey:
    """How a sequence is asked for: of a sample that has no branches, its only one."""
    return command_id, group, sample, branch


def ask(store: Listener, frames: Frames, wait_s: float = WAIT_S) -> Any:
    """Send a request as it stands; return the answer with its arrays, None if there is none in time."""
    codec: MessageCodec[SamplesFetched | SamplesGone] = MessageCodec(FromSampleStore)
    callers = CallerConnections({"store": store}, MEMBER, max_bytes=1 << 28)
    deadline = time.monotonic() + wait_s
    try:
        while time.monotonic() < deadline:
            for _, answer in callers.receive(0.1):
                if answer is not None:
                    return codec.decode(answer)
                callers.send("store", frames)
    finally:
        callers.close()
    return None


def fetch(store: Listener, keys: Sequence[SampleKey | SequenceKey], run_id: str = RUN_ID) -> SampleBatch | str:
    """Return samples, or why they are not there."""
    wanted = tuple(sequence_key(*key) for key in keys)
    answer = ask(store, encode(FetchSamples(run_id=run_id, request_id=5, keys=wanted)))
    assert answer is not None
    assert answer.message.request_id == 5
    if isinstance(answer.message, SamplesGone):
        return answer.message.why
    sees = MEDIA[0] in answer.arrays
    return SampleBatch.parse_frames(answer.arrays, (*SAMPLES, *MEDIA) if sees else SAMPLES)


def finished(groups: tuple[PromptGroup, ...], step: int, purpose: Any) -> list[SamplesFinished]:
    """Answer each group with a token, which scores one for the first sample and zero for the others."""
    messages = []
    for group in groups:
        for sample in range(len(group.seeds)):
            first = {"reward": float(sample == 0), "correct": sample == 0}
            one = scored(group.group, sample, prompt_length=len(group.prompt_ids), **first)
            command_id = 10 + group.group % 2
            messages.append(SamplesFinished(command_id=command_id, step=step, purpose=purpose, samples=(one,)))
    return messages


def records_of(groups: Sequence[PromptGroup], messages: Sequence[SamplesFinished]) -> list[SampleRecord]:
    """Return what the scheduler's table keeps of the answers of two engines, which take the groups in turns."""
    table, step = GroupTable(), messages[0].step
    table.draw(step, "train", len(groups))
    sizes = [GroupSize(num_samples=len(group.seeds), num_tokens=1) for group in groups]
    waiting = table.add(step, "train", sizes)
    for engine in range(2):
        table.assign(waiting[engine::2], f"rollout-{engine}", 10 + engine)
    for message in messages:
        table.take_results(f"rollout-{message.command_id % 2}", message)
    of_step = table.of_step(step, "train")
    assert of_step is not None
    return of_step.records()
