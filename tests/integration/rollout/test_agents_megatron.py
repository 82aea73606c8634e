"""Episodes of agents in training by Megatron-Core: what it makes of recorded branches is what other trainers make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tandem.config.schema import NewModel
from tandem.samples.model_files import write_new_model
from tandem.samples.recorded_shards import read_step
from tests.harness.runs.agent_run_harness import branches_of, configure, model_after
from tests.harness.runs.running import TINY, coordinator, steps_of
from tests.harness.trainers.reference import logprobs_of

LR = 0.05
SGD: dict[str, Any] = {"optimizer": "sgd", "lr": LR, "sgd_momentum": 0.0, "weight_decay": 0.0}
PIPELINE: dict[str, Any] = {
    "grpo": {"max_num_steps": 2},
    "policy": {
        "new_model": None,
        "optimizer": None,
        "megatron_cfg": {
            "enabled": True,
            "pipeline_model_parallel_size": 2,
            "optimizer": {**SGD, "use_distributed_optimizer": False},
        },
    },
    "cluster": {"trainers": 2},
}
"""Two ranks of Megatron-Core, each with half of the layers."""


def write_model() -> None:
    """Write a model whose embedding has gradients of every token: transformers keeps them from one for padding."""
    folder = Path("model")
    write_new_model(folder, NewModel(**TINY["policy"]["new_model"]))
    settings = transformers.AutoConfig.from_pretrained(folder, pad_token_id=None)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(folder)


def test_megatron_trains_on_branches_as_other_trainers_do() -> None:
    write_model()
    ended = coordinator("up", configure(PIPELINE))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    model = model_after(1)
    for sample in read_step(Path("run/samples"), 2):  # generated after a refit from both ranks
        assert (len(sample.scored.branches), sample.scored.num_turns) == (2, 3)
        assert (sample.scored.oldest_version, sample.scored.newest_version) == (1, 1)
        for token_ids, mask, logprobs in branches_of(sample):
            with torch.no_grad():
                torch.testing.assert_close(logprobs[mask], logprobs_of(model, token_ids)[mask], atol=2e-5, rtol=0)
    # The same samples, trained on by another backend.
    other = ("policy.megatron_cfg.enabled=false", f"policy.optimizer={{name: torch.optim.SGD, kwargs: {{lr: {LR}}}}}")
    replayed = coordinator("replay", "run", *other, "cluster.trainers=1")
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    for mine, theirs in zip(steps_of("run"), steps_of("run-replay"), strict=True):
        for metric in ("loss", "grad_norm", "num_valid_samples", "avg_branches_per_sample", "token_mult_prob_error"):
            assert mine.metrics[metric] == pytest.approx(theirs.metrics[metric], rel=1e-4, abs=1e-6), metric
    for step in (1, 2):
        found, expected = (model_after(step, run).state_dict() for run in ("run", "run-replay"))
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    moved = [weight - model_after(1).state_dict()[name] for name, weight in model_after(2).state_dict().items()]
    assert max(float(change.abs().max()) for change in moved) > 1e-3
