"""How much memory does a training step on one long sequence take, with a vocabulary of 150,000 tokens?

A Mistral of 29M parameters in float32, each layer computed again in the backward pass, AdamW, every token but the first
trained on. `train` of each backend, the plain loop over the Hugging Face model, and TRL's SFTTrainer, each in a process
of its own (`long_context`): the peak of memory beyond what the process held before the step.

All logits of 16,384 tokens are 9.2 GiB. The plain loop holds them three times, so it runs where that fits. TRL computes
them in tiles, by torch's operations: Liger's kernels need Triton, which has no CPUs. With a window its model makes a
mask of all pairs of tokens: 64 GiB of 262,144 tokens, so it is left out there. There attention slides over 4,096
tokens, since all of it would take 2 x 10^14 operations more.

The plan's prediction is of a GPU, where twice as many logits exist at once and slices are of 256 MiB.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import long_context
import pytest
import torch
import transformers
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture
from smoke import IS_SMOKE, sized

VOCABULARY = sized(150_000, 1_000)
LONGEST_LOOP = 4096
"""Tokens of which the plain loop's logits fit into the memory of a small machine."""
WINDOW_FROM = 2**18
WINDOW = 4096
AIM = 2.0
"""Peaks of TRL over Tandem's."""
TOLERANCE = 1e-5
ROUNDED = 1e-3
"""To which TRL reports a loss."""
TIMEOUT_S = 5400
MODEL: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 288,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, length: int) -> Path:
    """Write a random model for sequences of this length."""
    torch.manual_seed(0)
    window = WINDOW if length >= WINDOW_FROM else None
    settings = transformers.MistralConfig(**MODEL, max_position_embeddings=length, sliding_window=window)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder)
    return folder


def plan_bytes(way: str, folder: Path, length: int) -> float:
    """Return what the plan says of the passes on a GPU, and the gradients, which a process does not hold before."""
    from tandem.config import build_config
    from tandem.coordinator.forecast.memory import memory_of
    from tandem.coordinator.forecast.sides import model_shape, sides

    config = build_config(long_context.settings_of(way, folder, length))
    shape = model_shape(config)
    assert not isinstance(shape, str), shape
    memory = memory_of(config, sides(config, shape)[0])
    parts = next(phase.parts for phase in memory.phases if phase.name == "forward and backward passes")
    gradients = parts["gradients"] if way == "dtensor" else 0.0  # Megatron-Core's have one buffer for good
    return parts["activations"] + parts["buffers"] + gradients


def run_way(way: str, length: int, folder: Path) -> dict[str, float]:
    """Measure a way in a process of its own."""
    command = [sys.executable, long_context.__file__, way, str(length), str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr[-4000:]
    measured: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return measured


def list_ways(length: int) -> tuple[list[str], dict[str, str]]:
    """Return the ways that run at a length, and why others do not."""
    left_out = {}
    if length > LONGEST_LOOP:
        gigabytes = 3 * 4 * length * VOCABULARY / 2**30
        left_out["hugging face"] = f"its logits, their logarithms and gradients would take {gigabytes:.0f} GiB"
    if importlib.util.find_spec("trl") is None:
        left_out["trl"] = "pip install -e '.[bench]' to compare with TRL"
    elif length >= WINDOW_FROM:
        left_out["trl"] = f"masks of all pairs of tokens would take {length**2 / 2**30:.0f} GiB"
    ways = [way for way in ("dtensor", "megatron", "trl", "hugging face") if way not in left_out]
    return ways, left_out


LENGTHS = [
    pytest.param(sized(4096, 512)),
    pytest.param(2**14),
    pytest.param(2**16, marks=pytest.mark.long(minutes=30)),
    pytest.param(2**18, marks=pytest.mark.long(minutes=60)),
]


@pytest.mark.timeout(3 * TIMEOUT_S)
@pytest.mark.parametrize("length", LENGTHS)
def test_peak_of_a_long_step(benchmark: BenchmarkFixture, tmp_path: Path, length: int) -> None:
    folder = write_model(tmp_path, length)
    ways, left_out = list_ways(length)
    measured: dict[str, dict[str, float]] = {}

    def run_all() -> None:
        measured.update({way: run_way(way, length, folder) for way in ways})

    benchmark.pedantic(run_all, rounds=1)
    plans = {way: plan_bytes(way, folder, length) for way in ("dtensor", "megatron")}
    peaks = {way: of["peak bytes"] for way, of in measured.items()}
    benchmark.extra_info.update(
        {
            "load average of the machine": os.getloadavg(),
            "tokens": length,
            "vocabulary": VOCABULARY,
            "all logits, bytes": 4 * length * VOCABULARY,
            "measured": measured,
            "the plan's prediction, bytes": plans,
            "left out": left_out,
        }
    )
    for way in ("trl", "hugging face"):
        if way in peaks:
            ratios = {name: peaks[way] / peaks[name] for name in plans}
            keep_ratios(benchmark, f"peak of {way} at {length} tokens, over that of", ratios, aim=AIM)
    print(f"\n{length} tokens, all logits {4 * length * VOCABULARY / 2**20:.0f} MiB; left out: {left_out or 'nothing'}")
    print(f"{'way':14}{'peak MiB':>10}{'plan MiB':>10}{'seconds':>10}{'of the processor':>18}")
    for way, of in measured.items():
        plan = f"{plans[way] / 2**20:.0f}" if way in plans else ""
        print(f"{way:14}{of['peak bytes'] / 2**20:10.0f}{plan:>10}{of['seconds']:10.1f}{of['processor seconds']:18.1f}")
        tolerance = ROUNDED if way == "trl" else TOLERANCE
        assert of["loss"] == pytest.approx(measured["dtensor"]["loss"], abs=tolerance)
    if not IS_SMOKE:
        assert max(peaks["dtensor"], peaks["megatron"]) < 4 * length * VOCABULARY, "the logits never all exist"
