"""What do the coordinator and the services add to a training step of 512 samples x 512 tokens?

A real run of SFT over sockets, of one trainer with one thread, that is as any run is but for stop-watches within the
trainer. Between the beginnings of two steps of training, all that a step takes passes: the batch is made from
conversations, sent, dealt out and padded into micro-batches; the loss and the metrics are added up, sent back, and
committed to the journal on disk and to TensorBoard. What the backend needs for forward, backward and optimizer is the
training itself; all else is overhead, and the goal is 5% of it at most.

The model is a small one, of 0.2M parameters, though the overhead does not depend on the model: one for which anybody
would take so large a batch makes its share smaller by orders of magnitude.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import sized
from stop_watches import WATCHED, noted, spans_in

from tandem.common.keys import write_run_keys
from tandem.launch.admission import new_run_keys

NUM_SAMPLES, LENGTH, PROMPT = sized((512, 512, 112), (16, 64, 16))
NUM_STEPS = 5
TIMEOUT_S = 550.0
CONFIG: dict[str, Any] = {
    "algorithm": "sft",
    "sft": {"max_num_steps": NUM_STEPS, "max_num_epochs": NUM_STEPS, "val_period": 0, "val_at_start": False},
    "policy": {
        "model_name": "model",
        "new_model": {
            "characters": "01b",
            "config": {
                "model_type": "qwen3",
                "hidden_size": 96,
                "intermediate_size": 288,
                "num_hidden_layers": 2,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "head_dim": 32,
                "tie_word_embeddings": True,
            },
        },
        "precision": "float32",
        "max_total_sequence_length": LENGTH,
        "train_global_batch_size": NUM_SAMPLES,
        "train_micro_batch_size": 8,
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1.0e-5}},
    },
    "data": {"dataset_name": "jsonl", "train_data_path": "lines.jsonl", "num_train": NUM_SAMPLES, "num_validation": 1},
    "checkpointing": {"enabled": False},
    "logger": {"log_dir": "run"},
    "cluster": {"launch": "none", "threads_per_process": 1},
}


def watched_trainer() -> int:
    """Be the ``trainer`` command, and note when the backend begins and ends an optimizer step."""
    from tandem.trainer import cli
    from tandem.trainer.backends.dtensor import DTensorBackend

    DTensorBackend.train_step = noted(DTensorBackend.train_step)  # type: ignore[method-assign]
    return cli.main()


def run(folder: Path) -> list[tuple[float, float]]:
    """Run all steps; return when each optimizer step began and ended."""
    from tests.harness.ports import free_port  # here: as a trainer's program, this file does not find tests

    output = "b" * (LENGTH - PROMPT - 2)  # and the beginning and the end of a text
    lines = [json.dumps({"input": f"{i:0{PROMPT}b}", "output": output}) for i in range(NUM_SAMPLES + 1)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    address = f"tcp://127.0.0.1:{free_port()}"
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"cluster": CONFIG["cluster"] | {"address": address}}))
    watched = folder / "watched"
    command = [str(Path(sys.executable).parent / "coordinator"), "up", str(path)]
    key_file = write_run_keys(folder / CONFIG["logger"]["log_dir"], new_run_keys())
    trainer = [sys.executable, __file__, "--coordinator", address, "--key-file", str(key_file)]
    with (
        subprocess.Popen(command, cwd=folder) as coordinator,
        subprocess.Popen(trainer, cwd=folder, env={**os.environ, WATCHED: str(watched)}) as process,
    ):
        try:
            assert coordinator.wait(TIMEOUT_S) == 0
            assert process.wait(TIMEOUT_S) == 0
        finally:
            coordinator.kill()
            process.kill()
    return spans_in(watched)


@pytest.mark.long(minutes=1)
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_overhead_of_a_training_step(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    from tandem.observe.run_folder.journal import read_journal

    times = benchmark.pedantic(run, args=(tmp_path,), rounds=1)
    with read_journal(tmp_path / "run") as journal:
        tokens = {record.metrics["num_valid_tokens"] for record in journal.steps()}
    assert tokens == {NUM_SAMPLES * (LENGTH - PROMPT - 1)}
    assert len(times) == NUM_STEPS
    # The first step has much to set up.
    steps = [after[0] - before[0] for before, after in pairwise(times[1:])]
    training = [ended - began for began, ended in times[1:-1]]
    overhead = [step - trained for step, trained in zip(steps, training, strict=True)]
    shares = [added / trained for added, trained in zip(overhead, training, strict=True)]
    benchmark.extra_info.update(
        {
            "samples x tokens": [NUM_SAMPLES, LENGTH],
            "load average of the machine": os.getloadavg(),
            "seconds of training": training,
            "seconds of overhead": overhead,
            "overhead, share of training, median": statistics.median(shares),
        }
    )
    keep_ratios(
        benchmark, "seconds of all else, share of training (at most)", {"tandem": statistics.median(shares)}, aim=0.05
    )
    print(f"\n{NUM_SAMPLES} x {LENGTH} tokens: {statistics.median(training):.2f} s of forward, backward and optimizer,")
    print(f"{1e3 * statistics.median(overhead):.0f} ms of everything else: {statistics.median(shares):.2%} more")


if __name__ == "__main__":
    sys.exit(watched_trainer())
