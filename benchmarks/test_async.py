"""What does asynchronous training gain where generation takes as long as training?

Whole runs through the console command: a coordinator, the refit service, a trainer and two rollouts, once synchronous
and once with an age of 1 and weights updated in flight. All else is the same: model, prompts, seeds, lengths.

The processes of a run share the cores here, which on a cluster they would not. So what takes long waits and computes
nothing: an environment of one's own that sleeps as long as a response is, as a judge behind a network would, and a loss
of one's own that sleeps as long as a training step of a larger model would take. What is measured is how much of
that the scheduler overlaps. Lengths end at random: the longest response of a step is several times as long as the mean.

No order of the same work ends sooner than the slower of generation and training: that is the bound, both as the
synchronous run took them. It is not one for what waits less: two steps that overlap wait for their longest responses
at once. Beside it stands what `coordinator plan` predicts from the synchronous run's journal.

``BENCHMARK_STEPS=6`` makes a quick run of the same.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized

from tandem.config import load_config
from tandem.coordinator.forecast.plan_ages import predict, rates_of, read_rates
from tandem.observe.run_folder.journal import StepRecord, read_journal

NUM_ROUNDS, NUM_WARMUP = 3, sized(3, 1)
NUM_STEPS = int(os.environ.get("BENCHMARK_STEPS", sized("14", "3")))
TIMEOUT_S = 400.0
NUM_PROMPTS, NUM_SAMPLES = 16, 4
NUM_NEW, MEAN_NEW = 24, 8
TRAINING_S, TOKEN_S = sized((2.5, 0.1), (0.05, 0.001))
CHARACTERS = "".join(map(chr, range(0x100, 0x100 + 448))) + "0123456789+ "
STOPS = list(range(100, 100 + len(CHARACTERS) // MEAN_NEW))
AGE = 1
SLOW = f"""
import asyncio, time

from tandem.rollout.environments import Score
from tandem.trainer.losses import aggregate

class Judge:
    async def score(self, problem, response):
        await asyncio.sleep({TOKEN_S} * len(response))
        return Score(float(len(set(response))), correct=False)

class Loss:
    def __init__(self, settings, counts, device):
        self.counts = counts

    def __call__(self, batch, scores):
        time.sleep({TRAINING_S})
        return aggregate(-batch.advantages_BT * scores.logprobs, batch.loss_mask_BT, self.counts, token_level=True)
"""
CONFIG: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": NUM_PROMPTS,
        "num_generations_per_prompt": NUM_SAMPLES,
        "max_num_steps": NUM_STEPS,
        "val_period": 0,
        "async_grpo": {"max_trajectory_age_steps": AGE, "in_flight_weight_updates": True},
    },
    "loss_fn": {"class": "slow.Loss", "reference_policy_kl_penalty": 0.0, "use_importance_sampling_correction": True},
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": CHARACTERS,
            "config": {
                "model_type": "qwen3",
                "hidden_size": 64,
                "intermediate_size": 192,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": 96,
        "train_global_batch_size": NUM_PROMPTS * NUM_SAMPLES,
        "train_micro_batch_size": NUM_PROMPTS * NUM_SAMPLES,
        "generation": {
            "async_engine": True,
            "max_new_tokens": NUM_NEW,
            "stop_token_ids": STOPS,
            "colocated": {"enabled": False},
            "transformers_cfg": {"num_slots": NUM_PROMPTS * NUM_SAMPLES // 2},
        },
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-7}},
    },
    "data": {"dataset_name": "jsonl", "train_data_path": "sums.jsonl", "num_train": 64, "num_validation": 16},
    "env": {"judge": {"class": "slow.Judge", "num_workers": 1}},
    "checkpointing": {"enabled": False},
    "logger": {"tensorboard_enabled": False},
    "cluster": {"rollouts": 2, "threads_per_process": 1},
}
VLLM: dict[str, Any] = {
    "policy": {
        "generation": {
            "backend": "vllm",
            "vllm_kwargs": {"kv_cache_memory_bytes": 2**26, "max_num_seqs": NUM_PROMPTS * NUM_SAMPLES},
        }
    },
    "cluster": {"rollouts": 1, "deadlines": {"build_s": 240.0}},
}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the settings of `over`, key by key."""
    result = dict(base)
    for key, value in over.items():
        result[key] = merged(base[key], value) if isinstance(value, dict) and key in base else value
    return result


class Runs:
    """Runs the same configuration one way or another, again and again."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        (folder / "slow.py").write_text(SLOW)
        lines = [{"input": f"{i % 10}+{i // 10}", "output": "1"} for i in range(80)]
        (folder / "sums.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        self._folder = folder
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(config))
        self.steps: dict[str, list[list[StepRecord]]] = {"synchronous": [], "asynchronous": []}
        """Of each run, those after the first ones."""

    def seconds(self, way: str) -> float:
        """Run; return the seconds of a step."""
        settings = [f"grpo.async_grpo.enabled={str(way == 'asynchronous').lower()}", f"logger.log_dir={way}"]
        words = [sys.executable, "-m", "tandem.coordinator.cli", "up", str(self._config), *settings, "--restart"]
        ended = subprocess.run(
            words, cwd=self._folder, timeout=TIMEOUT_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert ended.returncode == 0, ended.stdout
        with read_journal(self._folder / way) as journal:
            steps = journal.steps()
        assert [step.step for step in steps][-1] == NUM_STEPS
        self.steps[way].append(steps[-(NUM_STEPS - NUM_WARMUP) :])
        return (steps[-1].committed_at - steps[-1 - (NUM_STEPS - NUM_WARMUP)].committed_at) / (NUM_STEPS - NUM_WARMUP)

    def predicted(self) -> float:
        """Return the seconds of an asynchronous step that `coordinator plan` predicts from the synchronous run."""
        settings = [f"logger.log_dir={self._folder / 'synchronous'}", "grpo.async_grpo.enabled=true"]
        config = load_config(self._config, settings)
        return predict(rates_of(config, read_rates(config).rates), AGE, in_flight=True).period_s

    def median(self, way: str, *names: str) -> float:
        """Return the median of what some seconds of a step are together."""
        return statistics.median(
            sum(step.seconds.get(name, 0.0) for name in names) for run in self.steps[way] for step in run
        )

    def metric(self, way: str, name: str) -> float:
        """Return the mean of a metric over all steps."""
        return statistics.fmean(step.metrics[name] for run in self.steps[way] for step in run)


def compare(benchmark: BenchmarkFixture, folder: Path, config: Mapping[str, Any]) -> None:
    """Measure both ways in turns, and hold them against each other."""
    runs = Runs(folder, config)
    turns = Turns({way: (lambda way=way: runs.seconds(way)) for way in runs.steps})
    benchmark.pedantic(turns.round, rounds=NUM_ROUNDS)
    seconds = {way: statistics.median(times) for way, times in turns.seconds.items()}
    generation_s = runs.median("synchronous", "generation")
    training_s = runs.median("synchronous", "policy_training", "get_logprobs")
    bound_s = max(generation_s, training_s)
    times_as_fast = seconds["synchronous"] / seconds["asynchronous"]
    shares = {f"age {age}": runs.metric("asynchronous", f"token_share/age_{age}") for age in range(AGE + 1)}
    idle = {name: runs.metric("asynchronous", name) for name in ("engine_idle_s", "trainer_idle_s")}
    predicted_s = runs.predicted()
    benchmark.extra_info.update(
        {
            "samples a step": NUM_PROMPTS * NUM_SAMPLES,
            "tokens of a response, mean and longest": [
                runs.metric("synchronous", "mean_generation_length"),
                runs.metric("synchronous", "max_generation_length"),
            ],
            "seconds of a step, a run each": {way: [round(s, 4) for s in v] for way, v in turns.seconds.items()},
            "median seconds of a step": seconds,
            "samples a second": {way: NUM_PROMPTS * NUM_SAMPLES / s for way, s in seconds.items()},
            "synchronous: generation, training and refit seconds": [
                generation_s,
                training_s,
                runs.median("synchronous", "refit"),
            ],
            "times as fast": times_as_fast,
            "share of the bound": bound_s / seconds["asynchronous"],
            "predicted seconds of an asynchronous step": predicted_s,
            "share of tokens by age": shares,
            "idle seconds of an asynchronous step": idle,
            "load": os.getloadavg(),
        }
    )
    keep_ratios(benchmark, "times as fast as synchronous", {"asynchronous": times_as_fast}, aim=1.7)
    keep_ratios(benchmark, "share of the bound", {"asynchronous": bound_s / seconds["asynchronous"]}, aim=0.9)
    parts = f"generation {generation_s:.3f}, training {training_s:.3f}"
    print(f"\nsynchronous   {seconds['synchronous']:.3f} s a step: {parts}")
    print(f"asynchronous  {seconds['asynchronous']:.3f} s a step, predicted {predicted_s:.3f}; {idle}; {shares}")
    print(f"{times_as_fast:.2f} times as fast, {bound_s / seconds['asynchronous']:.2f} of the bound")
    if NUM_STEPS >= 14:
        assert times_as_fast > 1.7
        assert bound_s / seconds["asynchronous"] > 0.9


@pytest.mark.long(minutes=9)
@pytest.mark.timeout(2 * NUM_ROUNDS * TIMEOUT_S)
def test_async(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    compare(benchmark, tmp_path, CONFIG)


@pytest.mark.long(minutes=15)
@pytest.mark.timeout(2 * NUM_ROUNDS * TIMEOUT_S)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_async_vllm(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    compare(benchmark, tmp_path, merged(CONFIG, VLLM))
