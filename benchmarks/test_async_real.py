"""What does asynchronous training gain with real generation and training, where some responses are long?

Whole runs through the console command, with one processor's thread for the trainer and one for the engine: synchronous,
with ages of 1, 2 and 4 and weights updated in flight, and also synchronous and with an age of 1 where trainers begin
with the groups that are there (`grpo.streaming_training`). One response in eight is eight times as long as the others,
so that an engine has little to do at the end of a step; how long it may be is what its prompt leaves of the longest
sequence. Sizes are such that generation and training take about as long.

No order of the same work ends sooner than the slower of generation and training: that is the bound, both as the
synchronous run took them. Generation for several steps at once may be faster than that, since long responses of several
steps are then generated together.

A reward is the share of a response's characters that are among some, which the policy learns within these steps. Each
seed runs every way in turns. What older samples cost is the reward by step beside that of the synchronous runs.

``BENCHMARK_STEPS=6`` makes a quick run of the same, and ``BENCHMARK_SEEDS=1`` of one seed.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE, sized

from tandem.observe.run_folder.journal import StepRecord, read_journal

NUM_STEPS = int(os.environ.get("BENCHMARK_STEPS", sized("18", "3")))
NUM_SEEDS = int(os.environ.get("BENCHMARK_SEEDS", sized("3", "1")))
NUM_WARMUP, NUM_LAST = sized(4, 1), sized(5, 1)
TIMEOUT_S = 400.0
NUM_PROMPTS, NUM_SAMPLES = sized((16, 4), (8, 2))
SHORT, LONG = sized((12, 96), (2, 16))
LETTERS = "".join(map(chr, range(0x100, 0x100 + 256)))
REWARDED = LETTERS[:64]
AGES = (1, 2, 4)
SYNCHRONOUS, STREAMING = "synchronous", "synchronous, streaming"
WAYS: dict[str, dict[str, Any]] = {
    SYNCHRONOUS: {},
    STREAMING: {"streaming_training": True},
    **{f"age {age}": {"async_grpo.enabled": True, "async_grpo.max_trajectory_age_steps": age} for age in AGES},
    "age 1, streaming": {"async_grpo.enabled": True, "streaming_training": True},
}
if IS_SMOKE:
    WAYS = {way: WAYS[way] for way in (SYNCHRONOUS, STREAMING)}
REWARDS = f"""
from tandem.rollout.environments import Score

class Among:
    runs_in = "threads"

    def score(self, problem, response):
        share = sum(character in "{REWARDED}" for character in response) / max(1, len(response))
        return Score(share, correct=share > 0.5)
"""
CONFIG: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": NUM_PROMPTS,
        "num_generations_per_prompt": NUM_SAMPLES,
        "max_num_steps": NUM_STEPS,
        "val_period": 0,
        "async_grpo": {"in_flight_weight_updates": True},
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True},
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": LETTERS,
            "config": {
                "model_type": "qwen3",
                "hidden_size": sized(192, 32),
                "intermediate_size": sized(576, 64),
                "num_hidden_layers": sized(4, 2),
                "num_attention_heads": sized(3, 2),
                "num_key_value_heads": 1,
                "head_dim": sized(64, 16),
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": SHORT + LONG,
        "train_global_batch_size": NUM_PROMPTS * NUM_SAMPLES,
        "train_micro_batch_size": NUM_SAMPLES,
        "generation": {
            "async_engine": True,
            "max_new_tokens": LONG,
            "colocated": {"enabled": False},
            "transformers_cfg": {"num_slots": NUM_PROMPTS * NUM_SAMPLES},
        },
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 2.0e-3}},
    },
    "data": {"dataset_name": "jsonl", "train_data_path": "prompts.jsonl", "num_validation": 8, "shuffle": False},
    "env": {"among": {"class": "among.Among", "num_workers": 2}},
    "checkpointing": {"enabled": False},
    "logger": {"tensorboard_enabled": False, "page": "off"},
    "cluster": {"rollouts": 1, "threads_per_process": 1},
}


def write_prompts(path: Path) -> None:
    """Write prompts of which each eighth leaves room for a long response, and the others for a short one."""
    dice = random.Random(0)
    num = 8 + NUM_PROMPTS * NUM_STEPS
    lengths = [SHORT if row % 8 == 0 else LONG for row in range(num)]
    rows = [{"input": "".join(dice.choices(LETTERS, k=length)), "output": "1"} for length in lengths]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


class RealRuns:
    """Runs of one configuration in several ways, with one seed after another."""

    def __init__(self, folder: Path) -> None:
        (folder / "among.py").write_text(REWARDS)
        write_prompts(folder / "prompts.jsonl")
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
        self._folder = folder
        self.steps: dict[str, list[list[StepRecord]]] = {way: [] for way in WAYS}
        """The steps of each way's runs, by seed."""

    def run_seconds(self, way: str) -> float:
        """Run with the next seed; return the seconds of a step once engines are ahead."""
        seed = len(self.steps[way])
        settings = [f"grpo.{key}={str(value).lower()}" for key, value in WAYS[way].items()]
        settings += [f"grpo.seed={seed}", f"policy.new_model.seed={seed}", f"policy.model_name=model-{seed}"]
        words = [sys.executable, "-m", "tandem.coordinator.cli", "up", "config.yaml", *settings]
        run = f"{way}-{seed}".replace(" ", "").replace(",", "-")
        ended = subprocess.run(
            [*words, f"logger.log_dir={run}", "--restart"],
            cwd=self._folder,
            timeout=TIMEOUT_S,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout
        with read_journal(self._folder / run) as journal:
            steps = journal.steps()
        assert [step.step for step in steps] == [*range(1, NUM_STEPS + 1)]
        self.steps[way].append(steps)
        return (steps[-1].committed_at - steps[NUM_WARMUP - 1].committed_at) / (NUM_STEPS - NUM_WARMUP)

    def median_s(self, way: str, *names: str) -> float:
        """Return the median of what some seconds of a step are together, after the first steps."""
        steps = [step for run in self.steps[way] for step in run[NUM_WARMUP:]]
        return statistics.median(sum(step.seconds.get(name, 0.0) for name in names) for step in steps)

    def mean(self, way: str, name: str) -> float:
        """Return the mean of a metric after the first steps."""
        return statistics.fmean(step.metrics.get(name, 0.0) for run in self.steps[way] for step in run[NUM_WARMUP:])

    def rewards(self, way: str) -> list[list[float]]:
        """Return the reward of each step, by seed."""
        return [[step.metrics["reward"] for step in run] for run in self.steps[way]]


def describe_last(rewards: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean reward of the last steps over all seeds, and that of the worst and the best seed."""
    means = [statistics.fmean(run[-NUM_LAST:]) for run in rewards]
    return [statistics.fmean(means), min(means), max(means)]


def print_ways(runs: RealRuns, seconds: Mapping[str, float], bound_s: float, last: Mapping[str, list[float]]) -> None:
    """Print a row for each way."""
    print(f"\n{'way':20}{'s a step':>10}{'times as fast':>15}{'of the bound':>14}   reward of the last steps")
    for way, step_s in seconds.items():
        mean, least, most = last[way]
        times, share = seconds[SYNCHRONOUS] / step_s, bound_s / step_s
        print(f"{way:20}{step_s:10.3f}{times:15.2f}{share:14.2f}   {mean:.3f} ({least:.3f} to {most:.3f})")
    for way in WAYS:
        curve = [statistics.fmean(step) for step in zip(*runs.rewards(way), strict=True)]
        print(f"{way:20} reward by step: {' '.join(f'{reward:.2f}' for reward in curve)}")


@pytest.mark.long(minutes=14)
@pytest.mark.timeout(6 * 3 * TIMEOUT_S)
def test_async_real(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    runs = RealRuns(tmp_path)
    turns = Turns({way: (lambda way=way: runs.run_seconds(way)) for way in WAYS})
    benchmark.pedantic(turns.round, rounds=NUM_SEEDS)
    seconds = {way: statistics.median(turns.seconds[way]) for way in WAYS}
    generation_s = runs.median_s(SYNCHRONOUS, "generation")
    training_s = runs.median_s(SYNCHRONOUS, "policy_training", "get_logprobs")
    bound_s = max(generation_s, training_s)
    times = {way: seconds[SYNCHRONOUS] / step_s for way, step_s in seconds.items() if way != SYNCHRONOUS}
    shares = {way: bound_s / step_s for way, step_s in seconds.items() if way != SYNCHRONOUS}
    last = {way: describe_last(runs.rewards(way)) for way in WAYS}
    ages = {way: runs.mean(way, "avg_trajectory_age") for way in WAYS}
    benchmark.extra_info.update(
        {
            "samples a step": NUM_PROMPTS * NUM_SAMPLES,
            "tokens of a response, mean and longest": [
                runs.mean(SYNCHRONOUS, "mean_generation_length"),
                runs.mean(SYNCHRONOUS, "max_generation_length"),
            ],
            "seconds of a step, a seed each": {way: [round(s, 4) for s in v] for way, v in turns.seconds.items()},
            "synchronous: generation, training and refit seconds": [
                generation_s,
                training_s,
                runs.median_s(SYNCHRONOUS, "refit"),
            ],
            "share of tokens streamed": {way: runs.mean(way, "streamed_share") for way in WAYS if "streaming" in way},
            "mean age of samples": ages,
            "idle seconds of engines and trainers": {
                way: [runs.mean(way, name) for name in ("engine_idle_s", "trainer_idle_s")] for way in times
            },
            "reward of the last steps: mean, worst and best seed": last,
            "reward by step, a seed each": {
                way: [[round(r, 4) for r in run] for run in runs.rewards(way)] for way in WAYS
            },
            "load": os.getloadavg(),
        }
    )
    keep_ratios(benchmark, "times as fast as synchronous", times, aim=1.7)
    keep_ratios(benchmark, "share of the bound", shares, aim=0.9)
    base = last[SYNCHRONOUS][0] or 1.0  # tiny runs may have no reward
    rewards = {way: mean / base for way, (mean, _, _) in last.items() if way != SYNCHRONOUS}
    keep_ratios(benchmark, "reward of the last steps, share of synchronous", rewards)
    print(f"\ngeneration {generation_s:.3f} s, training {training_s:.3f} s of a synchronous step")
    print_ways(runs, seconds, bound_s, last)
    if NUM_STEPS >= 18:
        assert min(rewards["age 1"], rewards[STREAMING]) > 0.85, "they teach nearly as much"
