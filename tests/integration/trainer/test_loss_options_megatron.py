"""Every option of the policy-gradient loss on Megatron-Core, tensor parallel, beside a plain Hugging Face loop.

The ranks build their model once and go through all options; nothing is learned, so that each starts from the same
weights. The formulas below know nothing of micro-batches, padding, or the project's losses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from tandem.config import Config
from tandem.config.schema.columns import PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS
from tandem.samples.batch import Float32s
from tandem.trainer.backends import make_backend
from tandem.trainer.losses import make_loss
from tandem.trainer.step import TrainingStep
from tests.harness.trainers.megatron_harness import make_checkpoint
from tests.harness.trainers.reference import logprobs_of, sequences_of
from tests.harness.trainers.trainer_harness import make_batch, make_config, run_ranks, share_of

pytestmark = pytest.mark.usefixtures("rank_server")

TOLERANCE = 1e-5
TEMPERATURE = 0.7
MEGATRON = {
    "enabled": True,
    "tensor_model_parallel_size": 2,
    "optimizer": {"optimizer": "adam", "lr": 0.0, "weight_decay": 0.0},
}
BATCH = make_batch()


class Sequence(NamedTuple):
    """The counted tokens of a sequence: their log-probabilities under four policies."""

    current_K: torch.Tensor
    previous_K: torch.Tensor
    generation_K: torch.Tensor
    reference_K: torch.Tensor
    advantage: torch.Tensor
    """Of the sequence, or of each counted token."""
    reward: float

    @property
    def ratio_K(self) -> torch.Tensor:
        return (self.current_K - self.previous_K).exp()

    @property
    def weight_K(self) -> torch.Tensor:
        return (self.previous_K - self.generation_K).exp()


Formula = Callable[[Sequence], torch.Tensor]
"""The loss of each counted token of a sequence."""


def clipped(of: Sequence, ratio_K: torch.Tensor, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    bounded_K = ratio_K.clamp(1 - low, 1 + high)
    return torch.maximum(-of.advantage * ratio_K, -of.advantage * bounded_K)


def ppo(of: Sequence) -> torch.Tensor:
    return clipped(of, of.ratio_K)


def dual_clip(of: Sequence) -> torch.Tensor:
    return ppo(of) if of.advantage >= 0 else torch.minimum(ppo(of), -of.advantage * 1.1)


def gspo(of: Sequence) -> torch.Tensor:
    ratio = (of.current_K - of.previous_K).mean().exp()
    return clipped(of, ratio, 0.05, 0.02).expand_as(of.current_K)


def weighted_gspo(of: Sequence) -> torch.Tensor:
    return gspo(of) * of.weight_K.prod().clamp(max=1.5)


def cispo(of: Sequence) -> torch.Tensor:
    return -of.advantage * of.ratio_K.detach().clamp(0.9, 1.2) * of.current_K


def reinforce(of: Sequence) -> torch.Tensor:
    return -of.advantage * of.current_K


def on_policy(of: Sequence) -> torch.Tensor:
    return clipped(of, (of.current_K - of.current_K.detach()).exp())


def tis(of: Sequence) -> torch.Tensor:
    return of.weight_K.clamp(0.8, 1.2) * ppo(of)


def icepop(of: Sequence) -> torch.Tensor:
    return torch.where((of.weight_K >= 0.7) & (of.weight_K <= 1.3), of.weight_K, 0.0) * ppo(of)


def masked_sequences(of: Sequence) -> torch.Tensor:
    mean = (of.previous_K - of.generation_K).mean().exp()
    return of.weight_K * ppo(of) * (0.8 <= mean <= 1.25)


def with_kl(estimate: Callable[[Sequence], torch.Tensor]) -> Formula:
    """Add a penalty of 0.3 times an estimate."""

    def formula(of: Sequence) -> torch.Tensor:
        return ppo(of) + 0.3 * estimate(of)

    return formula


def one(of: Sequence) -> torch.Tensor:
    """The gradient of it is that of the token's log-probability: of where the samples are drawn."""
    return (of.current_K - of.current_K.detach()).exp()


def bounded(weight_K: torch.Tensor, of: Sequence) -> torch.Tensor:
    """Past the bound on the log-ratio the weight has no gradient either."""
    return torch.where((of.reference_K - of.current_K).abs() <= 1.0, weight_K, weight_K.detach())


def k1(of: Sequence) -> torch.Tensor:
    return bounded(one(of), of) * (of.current_K - of.reference_K).clamp(-1.0, 1.0)


def k2(of: Sequence) -> torch.Tensor:
    return (one(of) * (of.reference_K - of.current_K).square() / 2).clamp(max=0.4)


def k3(of: Sequence) -> torch.Tensor:
    return (bounded(one(of), of) * unclamped_k3(of.reference_K - of.current_K)).clamp(max=0.4)


def reweighted_k3(of: Sequence) -> torch.Tensor:
    weight_K = bounded((of.current_K - of.generation_K).exp(), of)
    return (weight_K * unclamped_k3(of.reference_K - of.current_K)).clamp(max=0.4)


def with_positive_nll(of: Sequence) -> torch.Tensor:
    """Add 0.5 times the mean over the tokens of sequences with a reward above zero, as a part of that over all."""
    own = sequences_of(BATCH)
    share = sum(int(each["mask"].sum()) for each in own if each["reward"] > 0) / sum(
        int(each["mask"].sum()) for each in own
    )
    assert 0 < share < 1
    return ppo(of) - (0.5 / share * of.current_K if of.reward > 0 else 0.0)


def unclamped_k3(log_ratio_K: torch.Tensor) -> torch.Tensor:
    """The log-ratio is clamped all the same."""
    bounded_K = log_ratio_K.clamp(-1.0, 1.0)
    return bounded_K.exp() - 1 - bounded_K


def whitened(sequences: list[Sequence]) -> list[Sequence]:
    """Take 0.3 times the clamped k3 off each token's advantage, and normalise over all tokens: Reinforce++."""
    less = [of.advantage - 0.3 * k3(of._replace(current_K=of.previous_K)) for of in sequences]
    every_K = torch.cat(less)
    normalised = [(each_K - every_K.mean()) / every_K.std(correction=0) for each_K in less]
    return [of._replace(advantage=each_K) for of, each_K in zip(sequences, normalised, strict=True)]


INPUT_CLAMP, OUTPUT_CLAMP = {"kl_input_clamp_value": 1.0}, {"kl_output_clamp_value": 0.4}
KL: dict[str, Any] = {"reference_policy_kl_penalty": 0.3}
K3 = KL | INPUT_CLAMP | OUTPUT_CLAMP
GSPO = {
    "sequence_level_importance_ratios": True,
    "token_level_loss": False,
    "ratio_clip_min": 0.05,
    "ratio_clip_max": 0.02,
}
CORRECTION = {"use_importance_sampling_correction": True}


def bounds(kind: str, low: float | None, high: float) -> dict[str, Any]:
    names = {"type": kind, "ratio_min": low, "ratio": high}
    return CORRECTION | {f"truncated_importance_sampling_{name}": value for name, value in names.items()}


CASES: dict[str, tuple[dict[str, Any], Formula]] = {
    "token level": ({}, ppo),
    "sequence level": ({"token_level_loss": False}, ppo),
    "asymmetric clip": (
        {"ratio_clip_min": 0.1, "ratio_clip_max": 0.28},
        lambda of: clipped(of, of.ratio_K, 0.1, 0.28),
    ),
    "dual clip": ({"ratio_clip_c": 1.1}, dual_clip),
    "GSPO": (GSPO, gspo),
    "GSPO, corrected": (GSPO | bounds("tis", None, 1.5), weighted_gspo),
    "CISPO": ({"use_cispo": True, "ratio_clip_min": 0.1}, cispo),
    "REINFORCE": ({"disable_ppo_ratio": True}, reinforce),
    "forced on-policy ratio": ({"force_on_policy_ratio": True}, on_policy),
    "k1": (KL | INPUT_CLAMP | {"reference_policy_kl_type": "k1"}, with_kl(k1)),
    "k2": (KL | OUTPUT_CLAMP | {"reference_policy_kl_type": "k2"}, with_kl(k2)),
    "k3": (K3, with_kl(k3)),
    "k3 in the reward": (K3 | {"use_kl_in_reward": True}, ppo),
    "k3, reweighted": (K3 | {"use_on_policy_kl_approximation": True}, with_kl(reweighted_k3)),
    "positive examples": ({"positive_example_nll_weight": 0.5}, with_positive_nll),
    "correction without bounds": (CORRECTION, lambda of: of.weight_K * ppo(of)),
    "tis": (bounds("tis", 0.8, 1.2), tis),
    "icepop": (bounds("icepop", 0.7, 1.3), icepop),
    "seq-mask-tis": (bounds("seq-mask-tis", 0.8, 1.25), masked_sequences),
}


class Found(NamedTuple):
    """What an optimizer step reports."""

    loss: float
    grad_norm: float


@pytest.fixture(scope="module")
def other_policies() -> tuple[Float32s, Float32s]:
    """Log-probabilities of the batch's tokens before the step, and under the reference, both far from those now."""
    random = np.random.default_rng(5)
    previous_T, reference_T = (
        BATCH.generation_logprobs_T + random.normal(-0.2, scale, len(BATCH.token_ids_T)) for scale in (0.3, 0.8)
    )
    return previous_T.astype(np.float32), reference_T.astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3 tied")


@pytest.fixture(scope="module")
def found(folder: Path, other_policies: tuple[Float32s, Float32s]) -> dict[str, Found]:
    configs = {name: config_of(folder, options) for name, (options, _) in CASES.items()}
    first, second = run_ranks(2, step_each, folder, configs, other_policies)
    assert first == second, "every rank reports the same"
    return {name: Found(*numbers) for name, numbers in first.items()}


def config_of(folder: Path, loss: dict[str, Any]) -> Config:
    estimator = "reinforce_plus_plus" if "use_kl_in_reward" in loss else "grpo"
    return make_config(
        folder, loss=loss, estimator=estimator, temperature=TEMPERATURE, trainers=2, megatron_cfg=MEGATRON
    )


def step_each(
    rank: int, folder: Path, configs: dict[str, Config], others: tuple[Float32s, Float32s]
) -> dict[str, tuple[float, float]]:
    os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = f"{folder}-converted"
    backend = make_backend(next(iter(configs.values())), checkpoint=None)
    done = {}
    for name, config in configs.items():
        table, share = share_of(backend, BATCH, config)
        own_T = np.repeat(table.rank_S == backend.data_parallel_rank, table.lengths_S)
        previous_T, reference_T = (each_T[own_T] for each_T in others)
        step = TrainingStep(backend, table, share, config)
        said: Any = {"policy": previous_T, "reference": reference_T}
        columns: Any = {column: said[column.model] for column in step.read if column.model}
        columns |= step.finished(columns)
        columns |= {PREVIOUS_LOGPROBS: previous_T, REFERENCE_LOGPROBS: reference_T}
        (rows,) = step.global_batches
        loss = make_loss(config, step.counts(rows), backend.device)
        taken = backend.train_step(step.micro_batches(rows, columns), loss)
        done[name] = (taken.loss, taken.grad_norm)
    return done


@pytest.fixture(scope="module")
def plain(folder: Path, other_policies: tuple[Float32s, Float32s]) -> dict[str, Found]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    previous, reference = (sequences_of(BATCH.replace(generation_logprobs_T=each_T)) for each_T in other_policies)
    sequences = []
    for own, before, origin in zip(sequences_of(BATCH), previous, reference, strict=True):
        logprobs_of_three = (own["generation"], before["generation"], origin["generation"])
        generation_K, previous_K, reference_K = (values[own["mask"]] for values in logprobs_of_three)
        current_K = logprobs_of(model, own["token_ids"], TEMPERATURE)[own["mask"]]
        sequences.append(
            Sequence(current_K, previous_K, generation_K, reference_K, own["advantage"], float(own["reward"]))
        )
    parameters = list(model.parameters())
    done = {}
    for name, (options, formula) in CASES.items():
        losses = [formula(of) for of in (whitened(sequences) if "use_kl_in_reward" in options else sequences)]
        by_token = options.get("token_level_loss", True)
        loss = torch.cat(losses).mean() if by_token else torch.stack([each_K.mean() for each_K in losses]).mean()
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        done[name] = Found(float(loss.detach()), float(torch.nn.utils.get_total_norm(gradients)))
    return done


@pytest.mark.parametrize("name", CASES)
def test_an_option_is_its_formula(name: str, found: dict[str, Found], plain: dict[str, Found]) -> None:
    assert found[name].loss == pytest.approx(plain[name].loss, abs=TOLERANCE)
    assert found[name].grad_norm == pytest.approx(plain[name].grad_norm, rel=TOLERANCE)


def test_no_two_options_are_the_same_here(plain: dict[str, Found]) -> None:
    """Bounds and clips decide some tokens of the batch."""
    numbers = list(plain.values())
    for index, one in enumerate(numbers):
        for other in numbers[:index]:
            assert max(abs(one.loss - other.loss), abs(one.grad_norm - other.grad_norm)) > 100 * TOLERANCE
