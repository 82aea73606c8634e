"""Samples of older weights, trained on by the real loss: the engine's log-probabilities make up for their age.

Nothing here depends on time. Trainer and engine share a process, and a queue has each step train on samples that the
engine made with the weights of exactly so many steps before, as in an asynchronous run whose engines are as far ahead
as they may be. Asynchronous runs themselves, with processes, are the business of other tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import transformers
from numpy.typing import NDArray

from tandem.config import Config, build_config
from tandem.coordinator.algorithms.advantages import advantages
from tandem.rollout.engine import EngineCompletion
from tandem.rollout.engines.transformers import TransformersEngine
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends.dtensor import DTensorBackend
from tests.harness.trainers.trainer_harness import VOCABULARY, make_batch, make_model, run_ranks, train_on
from tests.unit.engine_harness import make_programs, reference_logprobs, request, run_all

pytestmark = pytest.mark.usefixtures("rank_server")

NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS, AGE = 20, 8, 60, 4
LEARNING_RATE = 0.015
"""So high that four steps make another policy of it: without any age the task is learned in twenty."""
SEEDS = range(5)
DEADLINE_S = 400.0
CORRECTION = {"use_importance_sampling_correction": True}
Prompts = Sequence[tuple[int, ...]]


def configure(model: Path, loss: dict[str, Any]) -> Config:
    """One optimizer step a batch, so that what is corrected is the age and nothing else."""
    size = NUM_PROMPTS * NUM_SAMPLES
    return build_config(
        {
            "grpo": {"num_prompts_per_step": NUM_PROMPTS, "num_generations_per_prompt": NUM_SAMPLES},
            "loss_fn": {"reference_policy_kl_penalty": 0.0, **loss},
            "policy": {
                "model_name": str(model),
                "precision": "float32",
                "max_total_sequence_length": 32,
                "train_global_batch_size": size,
                "train_micro_batch_size": size,
                "logprob_batch_size": size,
                "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
                "generation": {},
            },
            "data": {"dataset_name": "reasoning_gym", "task": "chain_sum"},
        }
    )


def make_engine(backend: DTensorBackend, config: Config) -> TransformersEngine:
    """Make an engine that takes its weights from the trainer's memory, but has none yet."""
    engine = TransformersEngine(
        Path(config.policy.model_name),
        num_slots=config.policy.train_global_batch_size,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        dtype="float32",
    )
    engine.install(make_programs(backend.weights().layout, engine))
    return engine


def as_batch(prompts: Prompts, made: Sequence[EngineCompletion], advantages_S: NDArray[np.float32]) -> SampleBatch:
    """Lay samples out as trainers get them."""
    masks = [np.arange(len(p) + len(m.token_ids_T)) >= len(p) for p, m in zip(prompts, made, strict=True)]
    logprobs = [
        np.concatenate([np.zeros(len(p), np.float32), m.logprobs_T]) for p, m in zip(prompts, made, strict=True)
    ]
    return SampleBatch(
        lengths_S=np.array([len(mask) for mask in masks], np.int32),
        token_ids_T=np.concatenate([[*p, *m.token_ids_T] for p, m in zip(prompts, made, strict=True)]).astype(np.int32),
        loss_mask_T=np.concatenate(masks),
        generation_logprobs_T=np.concatenate(logprobs),
        advantages_S=advantages_S,
        rewards_S=np.zeros(len(made), np.float32),
    )


class Rollouts(NamedTuple):
    """The samples of one step."""

    batch: SampleBatch
    version: int
    reward: float


def generate(engine: TransformersEngine, config: Config, step: int, seed: int) -> Rollouts:
    """Generate for a step: a digit is to be said again."""
    random = np.random.default_rng((seed, step))
    digits = np.repeat(random.integers(3, 13, NUM_PROMPTS), NUM_SAMPLES)
    prompts = [(int(digit),) for digit in digits]
    seeds = random.integers(2**60, size=len(prompts)).tolist()
    asked = [request(number, prompt, seed=seeds[number], max_new_tokens=1) for number, prompt in enumerate(prompts)]
    finished = run_all(engine, asked)
    made = [finished[number] for number in range(len(prompts))]
    rewards_GN = np.array([float(one.token_ids_T[0] == digit) for one, digit in zip(made, digits, strict=True)])
    rewards_GN = rewards_GN.reshape(NUM_PROMPTS, NUM_SAMPLES)
    advantages_GN = advantages(rewards_GN, config.grpo.adv_estimator, np.ones(rewards_GN.shape, np.bool_))
    (version,) = {int(one.versions_T[0]) for one in made}
    return Rollouts(as_batch(prompts, made, advantages_GN.reshape(-1)), version, float(rewards_GN.mean()))


class Curve(NamedTuple):
    """What a run came to, by step."""

    rewards: list[float]
    """Mean reward of samples that the newest weights make, before the step."""
    ages: list[int]
    """Steps that the weights lay behind that the step's samples were made with."""
    ratios: list[float]
    """The metric `sampling_importance_ratio`."""


def learn(config: Config, seed: int, age: int) -> Curve:
    """Train on samples of exactly this age; the first steps have nothing older than what a run begins with.

    In an asynchronous run the engine makes, with version v, what step v + 1 + age trains on.
    """
    backend = DTensorBackend(config, checkpoint=None)
    engine = make_engine(backend, config)
    engine.apply(0, 60.0)
    waiting = deque(generate(engine, config, step, seed) for step in range(1, age + 1))
    curve = Curve([], [], [])
    for step in range(1, NUM_STEPS + 1):
        engine.apply(step - 1, 60.0)
        waiting.append(generate(engine, config, step + age, seed))
        curve.rewards.append(waiting[-1].reward)
        rollouts = waiting.popleft()
        curve.ages.append(step - 1 - rollouts.version)
        curve.ratios.append(train_on(backend, rollouts.batch, config).metrics["sampling_importance_ratio"])
    engine.close()
    return curve


def learn_by_seed(rank: int, configs: Sequence[Config], age: int) -> list[Curve]:
    return [learn(config, seed, age) for seed, config in enumerate(configs)]


@pytest.fixture(scope="module")
def curves(rank_server: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Curve]]:
    """Return the curves of each seed: of samples without age, and of age 4 with and without the correction."""
    folder = tmp_path_factory.mktemp("models")
    models = [make_model(folder / str(seed), seed=seed, num_hidden_layers=1) for seed in SEEDS]
    kinds = {"synchronous": (0, {}), "corrected": (AGE, CORRECTION), "uncorrected": (AGE, {})}
    found = {}
    for name, (age, loss) in kinds.items():
        configs = [configure(model, loss) for model in models]
        (found[name],) = run_ranks(1, learn_by_seed, configs, age, deadline_s=DEADLINE_S)
    return found


def mean_reward(curves: Sequence[Curve], steps: slice) -> float:
    return float(np.mean([curve.rewards[steps] for curve in curves]))


WHOLE, LAST_THIRD = slice(None), slice(-NUM_STEPS // 3, None)


def test_samples_are_as_old_as_they_should_be(curves: dict[str, list[Curve]]) -> None:
    for name, age in (("synchronous", 0), ("corrected", AGE), ("uncorrected", AGE)):
        for curve in curves[name]:
            assert curve.ages == [min(step, age) for step in range(NUM_STEPS)]
    for curve in curves["synchronous"]:
        assert curve.ratios == pytest.approx([1.0] * NUM_STEPS, abs=1e-4)
    for curve in curves["corrected"]:
        assert max(abs(ratio - 1) for ratio in curve.ratios) > 0.01, "weights differ from one"


def test_corrected_old_samples_teach_as_well_as_new_ones(curves: dict[str, list[Curve]]) -> None:
    new, old = curves["synchronous"], curves["corrected"]
    assert mean_reward(new, slice(1)) < 0.15, "there is something to learn"
    assert mean_reward(new, LAST_THIRD) > 0.98
    assert mean_reward(old, LAST_THIRD) == pytest.approx(mean_reward(new, LAST_THIRD), abs=0.05)
    assert mean_reward(old, WHOLE) == pytest.approx(mean_reward(new, WHOLE), abs=0.02)


def test_uncorrected_old_samples_teach_less(curves: dict[str, list[Curve]]) -> None:
    """They push on in the direction of four steps before: past the goal, and learning comes apart."""
    old, corrected = curves["uncorrected"], curves["corrected"]
    assert mean_reward(old, LAST_THIRD) < mean_reward(corrected, LAST_THIRD)
    assert mean_reward(old, WHOLE) < mean_reward(corrected, WHOLE) - 0.03


class Mixed(NamedTuple):
    """Samples whose tokens are of two versions, and what a trainer of a third says of them."""

    prompts: Prompts
    made: list[EngineCompletion]
    advantages_S: NDArray[np.float32]
    metrics: dict[str, float]


def train_on_mixed_versions(rank: int, config: Config, folder: Path) -> Mixed:
    """Refit an engine between two tokens of its samples; save each version to ``folder / version``."""
    backend = DTensorBackend(config, checkpoint=None)
    engine = make_engine(backend, config)
    random = np.random.default_rng(3)
    prompts = [tuple(random.integers(3, VOCABULARY, 1 + number % 4).tolist()) for number in range(8)]
    finished: dict[int, EngineCompletion] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(request(number, prompt, max_new_tokens=3 + number % 3))
    for version in range(3):
        backend.save(folder / str(version)).num_bytes.result()
        if version == 2:
            break
        engine.apply(version, 60.0)
        engine.recompute_caches()  # so that each token is what plain transformers make of its version
        for _ in range(2 if version == 0 else 3):
            finished |= {one.request_id: one for one in engine.step()}
        train_on(backend, make_batch(seed=version), config)
    engine.close()
    made = [finished[number] for number in range(len(prompts))]
    advantages_S = random.normal(0.0, 1.0, len(made)).astype(np.float32)
    metrics = train_on(backend, as_batch(prompts, made, advantages_S), config).metrics
    return Mixed(prompts, made, advantages_S, metrics)


HIGH, LOW = 1.2, 0.8
BOUNDED = {
    **CORRECTION,
    "truncated_importance_sampling_type": "icepop",
    "truncated_importance_sampling_ratio": HIGH,
    "truncated_importance_sampling_ratio_min": LOW,
}


@pytest.mark.parametrize("loss", [CORRECTION, BOUNDED], ids=["unbounded", "icepop"])
def test_each_token_is_weighted_by_the_version_that_made_it(tmp_path: Path, loss: dict[str, Any]) -> None:
    """Against plain transformers with the weights of each version: the loss, and the metrics that show the weights."""
    config = configure(make_model(tmp_path / "model"), loss)
    config = msgspec.structs.replace(
        config,
        policy=msgspec.structs.replace(config.policy, train_global_batch_size=8, train_micro_batch_size=3),
    )
    (mixed,) = run_ranks(1, train_on_mixed_versions, config, tmp_path)
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(v) / "policy") for v in range(3)]
    weights, losses = [], []
    for prompt, made, advantage in zip(mixed.prompts, mixed.made, mixed.advantages_S, strict=True):
        assert set(made.versions_T.tolist()) == {0, 1}
        by_version_VT = np.stack([reference_logprobs(model, prompt, made.token_ids_T) for model in models])
        maker_T = by_version_VT[made.versions_T, np.arange(len(made.versions_T))]
        weights.append(np.exp(by_version_VT[2] - maker_T))
        losses.append(np.full(len(maker_T), -advantage))
    weights_K, losses_K = np.concatenate(weights), np.concatenate(losses)
    is_outside_K = (weights_K < LOW) | (weights_K > HIGH)
    assert 0 < is_outside_K.mean() < 1
    if "truncated_importance_sampling_type" in loss:
        weights_K = np.where(is_outside_K, 0.0, weights_K)
    assert mixed.metrics["sampling_importance_ratio"] == pytest.approx(weights_K.mean(), rel=1e-4)
    assert mixed.metrics["is_oob_ratio"] == (is_outside_K.mean() if loss is BOUNDED else 0.0)
    assert mixed.metrics["loss"] == pytest.approx((weights_K * losses_K).mean(), abs=1e-5)
