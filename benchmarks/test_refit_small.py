"""What does one refit of a small model cost, end to end through a real run?

A run of the console command with a Qwen3 of 35 tensors and 14 MB, all processes on this machine; the journal's records
of its refits say what each took: `transfer`, from the coordinator's command until every engine is known to hold the
version, and within it `copy`, the engine's own copying. Each way to refit is a run of its own, and they take turns.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from measure import Turns, keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE, sized

from tandem.observe.run_folder.journal import RefitRecord, read_journal

NUM_STEPS = int(os.environ.get("BENCHMARK_STEPS", sized("25", "4")))
NUM_RUNS = sized(2, 1)
NUM_WARMUP = 3
"""Versions of each run that are left out, the initial one among them."""
NUM_TENSORS, NUM_BYTES = 35, 14e6

CONFIG: dict[str, Any] = {
    "grpo": {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "max_num_steps": NUM_STEPS,
        "val_period": 0,
        "val_at_start": False,
    },
    "loss_fn": {"reference_policy_kl_penalty": 0.0},
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": "0123456789+-= " + "".join(map(chr, range(0x100, 0x100 + 367))),
            "config": {
                "model_type": "qwen3",
                "hidden_size": 256,
                "intermediate_size": 1216,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": 32,
        "train_global_batch_size": 4,
        "train_micro_batch_size": 4,
        "generation": {"max_new_tokens": 8, "transformers_cfg": {"num_slots": 4}},
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-4, "weight_decay": 0.1}},
    },
    "data": {
        "dataset_name": "reasoning_gym",
        "task": "chain_sum",
        "task_params": {"min_terms": 3, "max_terms": 3, "min_digits": 1, "max_digits": 1},
        "num_train": 512,
        "num_validation": 16,
        "prompt_template": "{metadata[expression]}",
    },
    "checkpointing": {"enabled": False, "metric_name": "reward"},
    "logger": {"tensorboard_enabled": False},
    "cluster": {"threads_per_process": 1},
}
WAYS = {
    "copied": {"alias": "never"},
    "read in place": {"alias": "auto"},
    "copied, not verified": {"alias": "never", "verify": "off"},
}
if IS_SMOKE:  # a run each
    del WAYS["copied, not verified"], WAYS["copied"]


def records_of_a_run(folder: Path, refit: dict[str, str], num_rollouts: int) -> list[RefitRecord]:
    """Run Tandem; return the records of its refits after the first few."""
    path, run = folder / "config.yaml", folder / "run"
    cluster = {**CONFIG["cluster"], "rollouts": num_rollouts}
    path.write_text(yaml.safe_dump({**CONFIG, "refit": refit, "cluster": cluster, "logger": {"log_dir": str(run)}}))
    command = [str(Path(sys.executable).parent / "coordinator"), "up", str(path), "--restart"]
    done = subprocess.run(command, cwd=folder, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    with read_journal(run) as journal:
        return journal.refits()[NUM_WARMUP:]


def check(records: list[RefitRecord], way: str, num_rollouts: int) -> None:
    """Every version reached every engine, whole and once."""
    assert [record.version for record in records] == list(range(NUM_WARMUP, NUM_STEPS + 1))
    for record in records:
        assert len(record.engines) == num_rollouts
        assert not record.quarantined
        assert (record.digest != 0) == ("not verified" not in way)
        moved = sum(record.num_bytes.values())
        assert moved == 0 if way == "read in place" else abs(moved / num_rollouts / NUM_BYTES - 1) < 0.03


@pytest.mark.timeout(900)
@pytest.mark.long(minutes=2)
@pytest.mark.parametrize("num_rollouts", [1, 2])
def test_refit_of_a_small_model(benchmark: BenchmarkFixture, tmp_path: Path, num_rollouts: int) -> None:
    records: dict[str, list[RefitRecord]] = {way: [] for way in WAYS}

    def run(way: str) -> float:
        found = records_of_a_run(tmp_path, WAYS[way], num_rollouts)
        check(found, way, num_rollouts)
        records[way] += found
        return statistics.median(record.seconds["transfer"] for record in found)

    turns = Turns({way: (lambda way=way: run(way)) for way in WAYS})
    benchmark.pedantic(turns.round, rounds=NUM_RUNS)
    table: dict[str, dict[str, float]] = {}
    for way, found in records.items():
        by_phase: dict[str, list[float]] = {}
        for record in found:
            for phase, seconds in record.seconds.items():
                by_phase.setdefault(phase, []).append(1e3 * seconds)
            by_phase.setdefault("transfer less copy", []).append(
                1e3 * (record.seconds["transfer"] - record.seconds["copy"])
            )
        table[way] = {phase: round(statistics.median(times), 3) for phase, times in by_phase.items()}
        table[way]["transfer, 95%"] = round(statistics.quantiles(by_phase["transfer"], n=20)[-1], 3)
        table[way]["transfer, best"] = round(min(by_phase["transfer"]), 3)
    benchmark.extra_info.update({"median ms": table, "refits of each": len(found), "load": os.getloadavg()})
    first, *others = table
    keep_ratios(
        benchmark,
        f"transfer, times as long as {first}",
        {w: table[w]["transfer"] / table[first]["transfer"] for w in others},
    )
    print(f"\n{NUM_TENSORS} tensors, 14 MB, {num_rollouts} engines; {len(found)} refits of each way; medians in ms")
    for way, phases in table.items():
        print(f"{way:24}" + ", ".join(f"{phase} {ms:.2f}" for phase, ms in phases.items()))
