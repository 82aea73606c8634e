"""What does `async_engine` save where samples take several turns and the environment takes 50 ms for each?

The real rollout service with the embedded engine, in a process of its own, gets the same command three ways in turns:

- ``async_engine``: samples go on as soon as they are answered;
- ``waits``: what the service does without it: the engine waits at every token at which somebody asks the environment;
- ``turn by turn``: the whole batch is generated, then all of it is answered, then the next turn, as a plain loop does.

Responses end at random, 32 tokens in the mean and 128 at most. Checked: each way makes the same samples.

``BENCHMARK_SAMPLES=2`` makes a quick run of the same.
"""

from __future__ import annotations

import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from measure import Turns, keep_ratios
from processes import TIMEOUT_S, Asked, Plane, Remote, started, take_samples
from pytest_benchmark.fixture import BenchmarkFixture
from refit_trainer import Trainer
from smoke import sized

from tandem.common.messages import BuildEngine, Generate, Generated, Problem, PromptGroup, SamplingParameters
from tandem.config import build_config, config_to_json
from tandem.config.schema import NewModel
from tandem.launch.service import ServiceContext
from tandem.refit import layout
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.environments import Score, Turn
from tandem.rollout.generating import RunningGenerations
from tandem.rollout.service import RolloutService
from tandem.samples.model_files import write_new_model

NUM_ROUNDS = sized(3, 1, long=5)
NUM_GROUPS, NUM_TURNS = sized(8, 2), 4
NUM_SAMPLES = int(os.environ.get("BENCHMARK_SAMPLES", sized("8", "1")))
NUM_NEW, MEAN_NEW = 128, 32
ENVIRONMENT_S, NUM_WORKERS = sized(0.05, 0.001), 16
WAYS = ("async_engine", "waits", "turn by turn")
CHARACTERS = "".join(map(chr, range(0x100, 0x100 + 448))) + "1au: \n"
STOPS = tuple(range(100, 100 + len(CHARACTERS) // MEAN_NEW))
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}


class Slow:
    """Answers all turns but the last, after 50 ms."""

    runs_in = "threads"

    def step(self, problem: Problem, conversation: Any) -> Score | Turn:
        time.sleep(ENVIRONMENT_S)
        num_turns = sum(message["role"] == "assistant" for message in conversation)
        return Score(1.0, correct=True) if num_turns == NUM_TURNS else Turn([{"role": "user", "content": "1"}])


class HoldsBack(RunningGenerations):
    """The real one, which can also hand all responses to the environment at once when the last is there."""

    holds_back = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held: list[EngineCompletion] = []

    def choose(self, way: str) -> None:
        """Do what comes next this way."""
        self._parts.is_async = way == "async_engine"
        self.holds_back = way == "turn by turn"

    def _take(self, completion: EngineCompletion) -> None:
        self._held.append(completion)
        if not self.holds_back or not self._parts.engine.num_unfinished:
            held, self._held = self._held, []
            for one in held:
                super()._take(one)


def make(context: ServiceContext, connection: Connection, folder: str) -> tuple[Any, Asked]:
    """Be the trainer, who holds the weights, or the engine."""
    if context.name.startswith("trainer"):
        trainer = Trainer(context, folder)
        return trainer, {"layout": lambda: layout.encode(trainer.layout), "write": trainer.write}
    service = RolloutService(context)
    service.handle(BuildEngine(command_id=0, deadline_s=TIMEOUT_S), {})
    service._generating = generating = HoldsBack(context, service.parts, None)
    return service, {
        "layout": lambda: layout.encode(service.parts.engine.layouts()[0]),
        "choose": generating.choose,
        "take": lambda command_id: take_samples(service, command_id),
    }


def configuration(folder: str, num_slots: int) -> bytes:
    """Return what the processes need to know."""
    settings = {
        "grpo": {"max_rollout_turns": NUM_TURNS},
        "policy": {
            "model_name": folder,
            "max_total_sequence_length": 1024,
            "precision": "float32",
            "tokenizer": {"chat_template": TEMPLATE},
            "generation": {"max_new_tokens": NUM_NEW, "transformers_cfg": {"num_slots": num_slots}},
        },
        "data": {"dataset_name": "jsonl", "train_data_path": "none"},
        "env": {"slow": {"class": f"{__name__}.Slow", "num_workers": NUM_WORKERS}},
        "cluster": {"threads_per_process": 1},
        "refit": {"verify": "off"},
    }
    return config_to_json(build_config(settings))


class Rollouts:
    """Asks the engine for the same samples, one way or another."""

    def __init__(self, engine: Remote, plane: Plane) -> None:
        self._engine = engine
        self._plane = plane
        self.tokens: dict[str, dict[tuple[int, int], list[int]]] = {}
        """Of each sample, by way."""

    def seconds(self, way: str) -> float:
        """Make them all; return how long that took."""
        self._engine.ask("choose", way)
        command = self._command()
        begun = time.perf_counter()
        self._engine.command(command)
        while not isinstance((received := self._engine.receive_all())[0], Generated):
            assert all(sample.num_turns == NUM_TURNS for sample in received[0].samples)
        seconds = time.perf_counter() - begun
        taken = self._engine.ask("take", command.command_id)
        self.tokens[way] = {(group, sample): token_ids for group, sample, token_ids in taken}
        return seconds

    def _command(self) -> Generate:
        promise = self._plane.promise()
        groups = tuple(
            PromptGroup(
                group=number,
                problem=Problem(problem_id=str(number), question="", answer="", metadata={}),
                prompt_ids=tuple(range(64 + number, 80 + number)),
                seeds=tuple(number * NUM_SAMPLES + sample for sample in range(NUM_SAMPLES)),
            )
            for number in range(NUM_GROUPS)
        )
        sampling = SamplingParameters(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=NUM_NEW,
            stop_token_ids=STOPS,
            stop_strings=(),
        )
        return Generate(
            cancel_before=promise["command_id"], step=1, purpose="train", sampling=sampling, groups=groups, **promise
        )


@pytest.mark.timeout(900)
def test_async_rollouts(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    write_new_model(Path(folder), NewModel(config=MODEL, characters=CHARACTERS))
    num_slots = NUM_GROUPS * NUM_SAMPLES
    config = configuration(folder, num_slots)
    with started(make, config, {"trainer-0": (folder,), "rollout-0": (folder,)}) as remotes:
        engine = remotes["rollout-0"]
        engine.receive()  # it is built
        plane = Plane([remotes["trainer-0"]], [engine], config, alias=False)
        remotes["trainer-0"].ask("write", 1)
        plane.refit(1)
        rollouts = Rollouts(engine, plane)
        turns = Turns({way: (lambda way=way: rollouts.seconds(way)) for way in WAYS})
        turns.round()
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS)
        seconds = turns.last(NUM_ROUNDS)
    tokens = rollouts.tokens["async_engine"]
    for way in WAYS:
        same = [tokens[key] == made for key, made in rollouts.tokens[way].items()]
        assert len(same) == NUM_GROUPS * NUM_SAMPLES
        assert statistics.mean(same) > 0.95, way  # a last bit may turn a draw
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    ratios = {way: medians[way] / medians["async_engine"] for way in WAYS[1:]}
    num_tokens = sum(map(len, tokens.values()))
    benchmark.extra_info.update(
        {
            "samples": NUM_GROUPS * NUM_SAMPLES,
            "turns": NUM_TURNS,
            "tokens, prompts and answers included": num_tokens,
            "environment seconds": ENVIRONMENT_S,
            "environment workers": NUM_WORKERS,
            "seconds": {way: [round(s, 4) for s in times] for way, times in seconds.items()},
            "median seconds": medians,
            "times as long as async_engine, medians": ratios,
            "times as long as async_engine, best rounds": {
                way: min(seconds[way]) / min(seconds["async_engine"]) for way in WAYS[1:]
            },
            "load": os.getloadavg(),
        }
    )
    keep_ratios(benchmark, "times as long as async_engine", ratios)
    print(f"\n{num_slots} samples of {NUM_TURNS} turns, {num_tokens} tokens in all")
    for way in WAYS:
        print(f"{way:14}{medians[way]:8.2f} s{medians[way] / medians['async_engine']:7.2f} times as long")
    if NUM_SAMPLES >= 8:
        assert ratios["waits"] > 2
