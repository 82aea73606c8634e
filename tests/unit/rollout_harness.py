"""A rollout service with a real engine, and no coordinator: what it sends is kept."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_harness import make_model, sampling, shared_layout
from numpy.typing import NDArray
from own_environments import WAIT_S
from samples_harness import RUN_ID, TRAINERS, fetch

from tandem.common.curve import new_key_pair
from tandem.common.errors import TandemError
from tandem.common.messages import (
    BuildEngine,
    EngineBuilt,
    Generate,
    Generated,
    InstallProgram,
    Message,
    Problem,
    PromptGroup,
    Purpose,
    RecordedGroup,
    RecordSamples,
    Refit,
    Refitted,
    ReleaseSamples,
    RestoreSamples,
    RolloutCommand,
    SampleScored,
    SamplesFinished,
    SamplesRecorded,
)
from tandem.config import Config, build_config
from tandem.config.schema import NewModel
from tandem.coordinator.processes.replies import Replies, SampleLimits
from tandem.refit import layout, program
from tandem.refit.planner import plan
from tandem.rollout.service import RolloutService
from tandem.samples.batch import SampleBatch
from tandem.samples.model_files import load_tokenizer, write_new_model
from tandem.samples.sample_store import SampleStore

CHARACTERS = "0123456789au: \n"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'][0] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)


class Context:
    """Stands where the link to the coordinator would: keeps what the service sends."""

    name = "rollout-0"
    run_id = RUN_ID
    coordinator = "tcp://127.0.0.1:1"
    trainers = TRAINERS

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = new_key_pair()
        self.sent: list[tuple[Message, dict[str, NDArray[Any]]]] = []
        self.errors: list[BaseException] = []
        self.replies = Replies(SampleLimits.of(config))
        """What the coordinator would say of it."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    def reply(self, command_id: int, message: Message, arrays: dict[str, NDArray[Any]] | None = None) -> None:
        assert self.replies.take(self.name, message, arrays or {})  # type: ignore[arg-type]
        self.sent.append((message, arrays or {}))

    def fail(self, command_id: int, error: BaseException, *, aside: str = "") -> None:
        self.errors.append(error)

    def wake(self) -> None:
        """Whoever drives the service looks again and again."""


class Rollout:
    """A rollout service with the weights of a tiny random model."""

    template: str = TEMPLATE

    def __init__(
        self,
        folder: Path,
        environment: str | None,
        *,
        turns: int = 3,
        total: int = 64,
        model: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        async_grpo: Mapping[str, Any] | None = None,
        samples_folder: Path | None = None,
        data: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`environment` is the path of its class, None where settings name an agent.

        `model` and `generation` are settings beside the usual ones.

        With `async_grpo`, settings as well, it generates beside training.
        """
        self.model = self._make_model(folder, **(model or {}))
        self.config = build_config(
            {
                "grpo": {
                    "max_rollout_turns": turns,
                    "async_grpo": {"enabled": async_grpo is not None, **(async_grpo or {})},
                },
                "policy": {
                    "model_name": str(folder / "model"),
                    "max_total_sequence_length": total,
                    "precision": "float32",
                    "tokenizer": {"chat_template": self.template},
                    "generation": {
                        "transformers_cfg": {"num_slots": 5},
                        "colocated": {"enabled": async_grpo is None},
                        **(generation or {}),
                    },
                },
                "data": data or {"dataset_name": "jsonl", "train_data_path": "train.jsonl"},
                "env": {"mine": settings | ({} if environment is None else {"class": environment})},
                "cluster": {"threads_per_process": 1},
                "logger": {"log_dir": str(folder / "run")},
            }
        )
        self.tokenizer = load_tokenizer(self.config)
        self.context = Context(self.config)
        self.service = RolloutService(self.context)  # type: ignore[arg-type]
        self._samples_folder = "" if samples_folder is None else str(samples_folder)
        self._command_ids = itertools.count(1)
        self._generated: list[int] = []
        self.build()

    def _make_model(self, folder: Path, **changes: Any) -> Any:
        write_new_model(folder / "model", NewModel(config={"model_type": "qwen3"}, characters=CHARACTERS))
        return make_model("qwen3", folder / "model", vocab_size=len(CHARACTERS) + 3, **changes)

    def build(self) -> None:
        """Have the engine built, or begin anew, and give it the weights."""
        command = BuildEngine(
            command_id=next(self._command_ids), deadline_s=WAIT_S, samples_folder=self._samples_folder
        )
        self.command(command)
        deadline = time.monotonic() + WAIT_S
        while not self.context.sent or not isinstance(self.context.sent[-1][0], EngineBuilt):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        built, _ = self.context.sent.pop()
        assert isinstance(built, EngineBuilt)
        self.samples_at = built.samples_at
        self.external_requests = built.external_requests
        wanted = layout.decode(built.layouts[0])
        planned = plan({"trainer-0": shared_layout(self.model)}, {"rollout-0": wanted}, allow_alias=False)
        encoded = program.encode(planned.programs["rollout-0"])
        self.command(InstallProgram(command_id=next(self._command_ids), deadline_s=WAIT_S, programs=(encoded,)))
        self.refit(0)

    def command(self, command: RolloutCommand) -> None:
        """Give the service a command."""
        self.context.replies.expect(self.context.name, command)
        self.service.handle(command, {})

    def refit(self, version: int) -> None:
        """Bring the engine to what `model` holds now."""
        self.command(Refit(command_id=next(self._command_ids), deadline_s=WAIT_S, version=version))
        refitted, _ = self.context.sent.pop()
        assert isinstance(refitted, Refitted)

    def group(self, number: int, seeds: Sequence[int], problem: Problem | None = None) -> PromptGroup:
        prompt = [{"role": "user", "content": f"{number}{number + 1}"}]
        return PromptGroup(
            group=number,
            problem=problem or Problem(problem_id=f"p{number}", question="", answer="", metadata={"number": number}),
            prompt_ids=tuple(self.tokenizer.encode_chat(prompt, add_generation_prompt=True)),
            seeds=tuple(seeds),
        )

    def start(
        self,
        *groups: PromptGroup,
        max_new_tokens: int = 5,
        cancel_before: int | None = None,
        ends: bool = True,
        purpose: Purpose = "train",
    ) -> int:
        """Have it generate; return the id. `ends`: whether the end-of-sequence token ends a response."""
        stops = (self.tokenizer.eos_id,) if ends else ()
        how = sampling(max_new_tokens=max_new_tokens, stop_token_ids=stops)
        command_id = next(self._command_ids)
        command = Generate(
            command_id=command_id,
            deadline_s=WAIT_S,
            cancel_before=command_id if cancel_before is None else cancel_before,
            step=1,
            purpose=purpose,
            sampling=how,
            groups=groups,
        )
        self.command(command)
        self._generated.append(command_id)
        return command_id

    def finish(self) -> dict[tuple[int, int], tuple[SampleScored, SampleBatch]]:
        """Work to the end; return each sample with its own arrays."""
        deadline = time.monotonic() + WAIT_S
        while self.service.work():
            assert time.monotonic() < deadline
        samples: dict[tuple[int, int], tuple[SampleScored, SampleBatch]] = {}
        for message, frames in self.context.sent:
            if isinstance(message, SamplesFinished):
                assert not frames, "the tokens stay"
                arrays, row = self.fetch(message), 0
                for sample in message.samples:
                    assert (sample.group, sample.sample) not in samples
                    rows = range(row, row + max(1, len(sample.branches)))
                    samples[sample.group, sample.sample] = (sample, arrays.take(rows))
                    row = rows.stop
        return samples

    def record(
        self, rollout: str, *groups: RecordedGroup, step: int = 1, purpose: Purpose = "train"
    ) -> SamplesRecorded:
        """Have what a step had of a rollout recorded."""
        command = RecordSamples(
            command_id=next(self._command_ids),
            deadline_s=WAIT_S,
            step=step,
            rollout=rollout,
            purpose=purpose,
            groups=groups,
        )
        (recorded,) = self.answers(command, SamplesRecorded)
        assert isinstance(recorded, SamplesRecorded)
        return recorded

    def restore(self, files: dict[str, tuple[tuple[int, int], ...]], num_samples: int, step: int = 1) -> list[Message]:
        """Have groups taken from disk; return the answers."""
        command = RestoreSamples(
            command_id=next(self._command_ids), deadline_s=WAIT_S, step=step, files=files, num_samples=num_samples
        )
        return self.answers(command, Generated)

    def answers(self, command: RecordSamples | RestoreSamples, last: type[Message]) -> list[Message]:
        """Give a command about the record; return the answers, up to the last one or a failure."""
        self.context.sent.clear()
        self.command(command)
        deadline = time.monotonic() + WAIT_S
        while not any(isinstance(message, last) for message, _ in self.context.sent) and not self.context.errors:
            self.service.work()
            assert time.monotonic() < deadline
        return [message for message, _ in self.context.sent]

    def fetch(self, message: SamplesFinished) -> SampleBatch:
        """Return the arrays of samples as a trainer gets them."""
        keys = [
            (message.command_id, sample.group, sample.sample, branch)
            for sample in message.samples
            for branch in range(max(1, len(sample.branches)))
        ]
        arrays = fetch(self.samples_at, keys)
        assert isinstance(arrays, SampleBatch), arrays
        return arrays

    def run(self, *groups: PromptGroup, **how: Any) -> dict[tuple[int, int], tuple[SampleScored, SampleBatch]]:
        self.start(*groups, **how)
        samples = self.finish()
        assert not self.context.errors, self.context.errors
        done, _ = self.context.sent[-1]
        assert isinstance(done, Generated)
        assert done.num_samples == len(samples) == sum(len(group.seeds) for group in groups)
        assert done.num_tokens == sum(sample.response_length for sample, _ in samples.values())
        self.context.sent.clear()
        return samples

    def release(self, number: int) -> None:
        """Release what was made for one command: the first, the second and so on."""
        released = ReleaseSamples(
            command_id=next(self._command_ids), deadline_s=WAIT_S, command_ids=(self._generated[number],)
        )
        self.service.handle(released, {})

    def texts(self, *groups: PromptGroup) -> dict[tuple[int, int], str]:
        """Make samples for validation; return what was said in each."""
        stored = self.store.num_tokens
        self.start(*groups, purpose="validate")
        while self.service.work():
            pass
        assert self.store.num_tokens == stored, "those for validation are not kept"
        said = [sample for message, _ in self.context.sent for sample in getattr(message, "samples", ())]
        self.context.sent.clear()
        return {(sample.group, sample.sample): sample.response for sample in said}

    @property
    def store(self) -> SampleStore:
        """Where the service keeps its samples."""
        return self.service.parts.store

    def error(self, *groups: PromptGroup) -> str:
        self.start(*groups)
        self.finish()
        (error,) = self.context.errors
        assert isinstance(error, TandemError)
        assert not self.service.work()
        return str(error)


def tokens_of(samples: dict[tuple[int, int], tuple[SampleScored, SampleBatch]]) -> dict[tuple[int, int], list[int]]:
    return {key: arrays.token_ids_T.tolist() for key, (_, arrays) in samples.items()}
