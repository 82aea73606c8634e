"""How far are an engine and a trainer apart on a mixture of experts, with and without rollout routing replay?

A Qwen3-MoE of four layers with 16 experts each, two a token, whose experts say so much that it matters which of them a
token sees. An engine makes 32 samples of 48 tokens; then the model of a trainer, in float32, scores them, with its own
routes and with the engine's. Between the two there is noise of several kinds: an engine in bfloat16, weights that
differ by a small part of themselves, or nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture

from tandem.samples.batch import SampleBatch
from tandem.samples.routed_experts import COLUMN
from tandem.trainer.routing import RoutingReplay

sys.path.append(str(Path(__file__).parents[1]))
from tests.harness.runs.routing_harness import SHARP, generated, make_sharp_model

NOISES = {"none": ("float32", 0.0), "weights, 0.1%": ("float32", 1e-3), "engine in bfloat16": ("bfloat16", 0.0)}
"""Element type of the engine, and by what part of itself each of the trainer's weights differs."""


@pytest.mark.parametrize("noise", NOISES)
def test_with_replay_they_agree(noise: str, tmp_path: Path, benchmark: BenchmarkFixture) -> None:
    dtype, part = NOISES[noise]
    folder = make_sharp_model(tmp_path / "model")
    batch = generated(folder, dtype=dtype, num_samples=32, num_tokens=48, experts=SHARP)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + part * torch.randn_like(parameter))
    replay = RoutingReplay(model)
    own = errors(model, replay, batch, replays=False)
    replayed = benchmark.pedantic(lambda: errors(model, replay, batch, replays=True), rounds=1)
    benchmark.extra_info |= {
        f"{name}, {which}": round(float(number), 5)
        for which, values in (("own routes", own), ("replayed", replayed))
        for name, number in (
            ("token_mult_prob_error", values.mean()),
            ("99th percentile", np.quantile(values, 0.99)),
            ("largest", values.max()),
        )
    }
    if noise != "none":
        less = {"replayed": float((own.mean() - 1) / (replayed.mean() - 1))}
        keep_ratios(benchmark, "token_mult_prob_error above 1, times less than by own routes", less, aim=2)
    print(f"{noise}: {benchmark.extra_info}")
    if noise == "none":
        assert abs(replayed - own).max() < 1e-6
    else:
        assert replayed.mean() - 1 < (own.mean() - 1) / 2


@torch.no_grad()
def errors(model: torch.nn.Module, replay: RoutingReplay, batch: SampleBatch, *, replays: bool) -> np.ndarray:
    """Return by what factor both are apart on each token that was made."""
    found = []
    for end, length in zip(np.cumsum(batch.lengths_S), batch.lengths_S, strict=True):
        place = slice(end - length, end)
        token_ids = torch.from_numpy(batch.token_ids_T[place].astype(np.int64))
        replay.give(torch.from_numpy(SHARP.decode(batch.columns[COLUMN][place]))[None] if replays else None)
        logprobs_TV = model(input_ids=token_ids[None]).logits[0, :-1].log_softmax(dim=-1)
        logprobs_T = logprobs_TV.gather(1, token_ids[1:, None])[:, 0].numpy()
        gaps_T = np.abs(logprobs_T - batch.generation_logprobs_T[place][1:])
        found.append(np.exp(gaps_T[batch.loss_mask_T[place][1:]]))
    return np.concatenate(found)
