"""Adapters under every algorithm but SFT, on both backends: the numbers of plain loops with PEFT.

The model is a Phi-3, whose checkpoint fuses what Megatron-Core fuses: both backends train the same adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import transformers

from tandem.config import Config
from tandem.samples.batch import SampleBatch
from tests.harness.trainers import reference_ppo as ppo
from tests.harness.trainers.megatron_harness import OPTIMIZER, TP2, make, make_checkpoint
from tests.harness.trainers.reference_distillation import distillation_loss
from tests.harness.trainers.reference_lora import (
    ALPHA,
    RANK,
    Loss,
    Start,
    Trained,
    assert_same_training,
    grpo_loss,
    plain_steps,
    state_of,
    write_adapters,
)
from tests.harness.trainers.reference_preferences import BETA, SFT_WEIGHT, plain_dpo
from tests.harness.trainers.trainer_harness import make_config, make_groups, run_ranks, said_by, train_on

pytestmark = pytest.mark.usefixtures("rank_server")

BATCHES = [make_groups(2, 2, 2, 2, seed=seed) for seed in range(3)]
KL = 0.1
DISTANCE = {"kl_type": "jsd", "mixed_kl_weight": 0.3}
TOPK, TEMPERATURE = 5, 0.8
SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {
        "dpo": {"reference_policy_kl_penalty": BETA, "sft_loss_weight": SFT_WEIGHT, "sft_average_log_probs": True},
        "train_global_batch_size": 4,
    },
    "grpo": {"loss": {"reference_policy_kl_penalty": KL}},
    "distillation": {"loss": DISTANCE, "topk": TOPK, "temperature": TEMPERATURE},
    "ppo": {
        "loss": {
            "reference_policy_kl_penalty": KL,
            "reference_policy_kl_type": "k1",
            "use_kl_in_reward": True,
            "ratio_clip_min": ppo.CLIP,
            "ratio_clip_max": ppo.CLIP,
        },
        "ppo": {"ppo_epochs": 1, "adv_estimator": {"gae_gamma": ppo.GAMMA, "gae_lambda": ppo.LAMBDA}},
        "value_loss": {"scale": ppo.SCALE, "cliprange": ppo.VALUE_CLIP},
    },
}
BACKENDS = {
    "DTensor": {"dtensor_cfg": {"tensor_parallel_size": 2}},
    "Megatron-Core": {"megatron_cfg": {"enabled": True, **TP2}},
}


class Plain(NamedTuple):
    """What plain loops begin with and come to."""

    start: Start
    teacher: Path
    trained: dict[str, Trained]
    """Of each algorithm."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Three steps under each algorithm."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "phi3")
    teacher = make_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen2", seed=5)
    start = write_adapters(folder, tmp_path_factory.mktemp("adapters"))
    # As in TRL 1.16, whose reference is a copy of the adapters that training starts from (`DPOTrainer`, "ref").
    reference, teaches = start.load(), transformers.AutoModelForCausalLM.from_pretrained(teacher)
    losses: dict[str, Loss] = {
        "dpo": lambda model, batch: plain_dpo(model, reference, batch)[0],
        "grpo": partial(grpo_loss, reference=reference, kl=KL),
        "distillation": lambda model, batch: distillation_loss(
            model, [teaches], batch, DISTANCE, topk=TOPK, temperature=TEMPERATURE
        ),
    }
    found = {name: plain_steps(start, BATCHES, loss) for name, loss in losses.items()}
    by_ppo = ppo.plain_ppo(folder, BATCHES, size=8, epochs=1, kl=KL, policy=start.load())
    found["ppo"] = Trained(by_ppo.policy_steps, state_of(by_ppo.policy))
    return Plain(start, teacher, found)


def config_of(plain: Plain, algorithm: str, backend: str) -> Config:
    adapters = {"enabled": True, "dim": RANK, "alpha": ALPHA, "restore_from": str(plain.start.adapters)}
    sizes, settings = BACKENDS[backend], SETTINGS[algorithm]
    if algorithm == "distillation":
        settings = {**settings, "teacher": {"model_name": str(plain.teacher), **sizes}}
    if backend == "DTensor":
        kwargs = {} if algorithm != "ppo" else {"optimizer": {"name": "torch.optim.AdamW", "kwargs": ppo.OPTIMIZER}}
        policy: dict[str, Any] = {"dtensor_cfg": {**sizes["dtensor_cfg"], "lora_cfg": adapters}, **kwargs}
        value: dict[str, Any] = kwargs
    else:
        optimizer = OPTIMIZER if algorithm != "ppo" else OPTIMIZER | {"weight_decay": 0.0}
        policy = {"megatron_cfg": {**sizes["megatron_cfg"], "peft": adapters, "optimizer": optimizer}}
        value = {"megatron_cfg": {"optimizer": optimizer}}
    if algorithm == "ppo":
        settings = {**settings, "value": value}
    return make_config(plain.start.folder, algorithm=algorithm, trainers=2, **settings, **policy)


LN_2 = math.log(2)


def first_rank(rank: int, config: Config, folder: Path) -> Any:
    """Take a step and save; ask for the reference at the start, after the step, and of a backend that resumes."""
    backend = make(config)
    before = said_by(backend, BATCHES[0], config, "policy")
    metrics = train_on(backend, BATCHES[0], config).metrics
    references = [said_by(backend, BATCHES[0], config, "reference")]
    after = said_by(backend, BATCHES[0], config, "policy")
    backend.save(folder).num_bytes.result()
    backend.close()
    resumed = make(config, folder)
    references.append(said_by(resumed, BATCHES[0], config, "reference"))
    policy = said_by(resumed, BATCHES[0], config, "policy")
    resumed.close()
    return metrics["preference_loss"], before, references, (after, policy)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_loss_of_dpo_is_ln_2_also_with_restored_adapters(backend: str, plain: Plain, tmp_path: Path) -> None:
    """The policy is its own reference at first: the sigmoid of nothing is one half (arXiv:2305.18290, equation 7)."""
    for loss, before, references, (after, policy) in run_ranks(
        2, first_rank, config_of(plain, "dpo", backend), tmp_path / "step_1"
    ):
        assert loss == pytest.approx(LN_2, abs=1e-5)
        for reference in references:
            np.testing.assert_array_equal(reference, before)
        np.testing.assert_array_equal(policy, after)
        assert np.abs(after - before).max() > 1e-3


def rank(rank: int, config: Config, batches: Sequence[SampleBatch], folder: Path) -> list[tuple[float, float]]:
    """Train a step a batch, and save."""
    backend = make(config)
    metrics = [train_on(backend, batch, config).metrics for batch in batches]
    backend.save(folder).num_bytes.result()
    backend.close()
    return [(each["loss"], each["grad_norm"]) for each in metrics]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("algorithm", SETTINGS)
def test_three_steps_are_those_of_plain_peft(algorithm: str, backend: str, plain: Plain, tmp_path: Path) -> None:
    config = config_of(plain, algorithm, backend)
    ranks = run_ranks(2, rank, config, BATCHES, tmp_path)
    assert ranks[1] == ranks[0], "every rank reports the same"
    assert_same_training(ranks[0], tmp_path / "policy", plain.start, plain.trained[algorithm])
