"""How many tokens a second does `rl_loop` of `tinker-cookbook` train on, beside our own GRPO on the same machine?

The recipe is unchanged, and asks a server with one trainer and one engine, each of one thread, for LoRA of rank 32. The
run of GRPO has the same processes, model, prompts, groups and limits. Both run one after the other, several times. The
learning rate is next to nothing, so that the model stays what it is: the recipe leaves out groups of equal rewards, of
which there would be more and more. Tokens are those that are generated; seconds are those of steps after the first two.
The goal is 0.8.

The SDK and the cookbook have to be installed, as for ``benchmarks/test_tinker.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from tinker_server import TIMEOUT_S, await_server
from tokenizers import Tokenizer

from tandem.observe.run_folder.calls import calls_of
from tandem.observe.run_folder.journal import read_journal
from tests.harness.hub_server import hub_server
from tests.harness.runs.of_hub import set_environment
from tests.harness.tinker import cookbook

WIDTH, NUM_LAYERS = sized((256, 4), (64, 2))
NUM_PROMPTS, NUM_SAMPLES = sized((16, 16), (2, 4))
NUM_NEW = sized(64, 8)
NUM_STEPS = sized(8, 3)
NUM_WARMING = 2
NUM_ROUNDS = sized(3, 1)
RATE = 1e-12
RL_LOOP, OWN = "rl_loop", "coordinator up"
AIM = 0.8
COMMON: dict[str, Any] = {
    "policy": {
        "model_name": cookbook.MODEL,
        "precision": "float32",
        "max_total_sequence_length": 512,
        "train_micro_batch_size": NUM_SAMPLES,
        "logprob_batch_size": NUM_SAMPLES,
        "dtensor_cfg": {"lora_cfg": {"enabled": True, "dim": 32}},  # the rank that the recipe asks for
        "generation": {"transformers_cfg": {"num_slots": NUM_PROMPTS * NUM_SAMPLES}},
    },
    "cluster": {"trainers": 1, "rollouts": 1, "threads_per_process": 1},
    "logger": {"page": "off", "tensorboard_enabled": False},
}
GRPO: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": NUM_PROMPTS,
        "num_generations_per_prompt": NUM_SAMPLES,
        "max_num_steps": NUM_STEPS,
        "val_period": 0,
        "val_at_start": False,
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "data": {"train": {"data_path": "train.jsonl", "env_name": "math"}, "num_validation": 0},
    "env": {"math": {}},
    "checkpointing": {"enabled": False},
}


def measured_own(folder: Path) -> float:
    """Run GRPO; return tokens a second."""
    config = {**COMMON, **GRPO, "logger": {**COMMON["logger"], "log_dir": "own"}}
    policy = {**COMMON["policy"], "train_global_batch_size": NUM_PROMPTS * NUM_SAMPLES}
    policy["optimizer"] = {"name": "torch.optim.AdamW", "kwargs": {"lr": RATE}}
    policy["generation"] = {**policy["generation"], "max_new_tokens": NUM_NEW, "stop_strings": ["\n\nUser:"]}
    (folder / "own.yaml").write_text(yaml.safe_dump({**config, "policy": policy}))
    rows = [{"input": cookbook.prompt_of(each), "output": "4"} for each in cookbook.questions(256)]
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = Path(sys.executable).parent / "coordinator"
    subprocess.run([command, "up", "own.yaml"], cwd=folder, timeout=TIMEOUT_S, check=True)
    with read_journal(folder / "own") as journal:
        steps = [step for step in journal.steps() if step.step > NUM_WARMING]
    seconds = sum(step.seconds["total"] for step in steps)
    return sum(step.metrics["num_valid_tokens"] for step in steps) / seconds


def measured_loop(folder: Path) -> float:
    """Serve, and run the recipe; return tokens a second."""
    config = {**COMMON, "logger": {**COMMON["logger"], "log_dir": "run"}}
    (folder / "tinker.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = Path(sys.executable).parent / "coordinator"
    keys = [command, "tinker", "keys", "me"]
    key = subprocess.run(keys, cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    words = [sys.executable, "-W", "ignore", "-m", "tinker_cookbook.recipes.rl_loop", "log_path=recipe"]
    words += [f"base_url=http://127.0.0.1:{port}", f"model_name={cookbook.MODEL}", "loss_fn=importance_sampling"]
    words += [f"batch_size={NUM_PROMPTS}", f"group_size={NUM_SAMPLES}", f"max_tokens={NUM_NEW}"]
    words += [f"learning_rate={RATE}", "save_every=0", f"max_steps={NUM_STEPS}"]
    with subprocess.Popen([command, "tinker", "tinker.yaml", "--port", str(port)], cwd=folder, text=True) as served:
        try:
            await_server(port, served)
            environment = {**os.environ, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}
            subprocess.run(words, cwd=folder, env=environment, timeout=TIMEOUT_S, check=True)
            served.send_signal(signal.SIGINT)
            assert served.wait(TIMEOUT_S) == 0
        finally:
            served.kill()
    lines = (folder / "recipe" / "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["time/total"] for line in lines]
    tokenizer = Tokenizer.from_file(str(next((folder.parent / "hf").rglob("tokenizer.json"))))
    (of_prompt,) = {len(tokenizer.encode(cookbook.prompt_of(each)).ids) for each in cookbook.questions(256)}
    with read_journal(folder / "run") as journal:
        calls = [call for call in calls_of(journal) if call.kind == "sample"]
    assert len(calls) == NUM_PROMPTS * len(seconds) == NUM_PROMPTS * NUM_STEPS
    made = [call.num_tokens - call.num_sequences * of_prompt for call in calls]
    assert min(made) >= NUM_SAMPLES
    return sum(made[NUM_PROMPTS * NUM_WARMING :]) / sum(seconds[NUM_WARMING:])


@pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="tinker-cookbook is not installed")
@pytest.mark.long(minutes=5)
@pytest.mark.timeout(3 * TIMEOUT_S * NUM_ROUNDS)
def test_tokens_of_a_loop(benchmark: BenchmarkFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {RL_LOOP: measured_loop, OWN: measured_own}
    numbers = iter(range(2 * NUM_ROUNDS))

    def in_own_folder(name: str) -> float:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return ways[name](folder)

    with hub_server() as hub:
        cookbook.fill(hub, width=WIDTH, num_layers=NUM_LAYERS)
        set_environment(monkeypatch, hub, tmp_path / "hf")
        turns = Turns({name: lambda name=name: in_own_folder(name) for name in ways})  # type: ignore[misc]
        benchmark.pedantic(turns.round, rounds=NUM_ROUNDS)
    rates = turns.last(NUM_ROUNDS)
    medians = {name: statistics.median(rates[name]) for name in ways}
    share = medians[RL_LOOP] / medians[OWN]
    benchmark.extra_info.update(
        {
            "samples a step": NUM_PROMPTS * NUM_SAMPLES,
            "tokens a second": rates,
            "load average of the machine": os.getloadavg(),
        }
    )
    keep_ratios(benchmark, f"tokens a second, share of {OWN}", {RL_LOOP: share}, aim=AIM)
    print("\n" + "; ".join(f"{name}: {rate:,.0f} tokens a second" for name, rate in medians.items()))
    print(f"{RL_LOOP} has {share:.2f} of the tokens a second of {OWN}")
