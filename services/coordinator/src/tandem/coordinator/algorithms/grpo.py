"""GRPO's data: prompt groups out, advantages in.

`rewards` and `advantages` have their formulas, `tandem.trainer.losses.policy_gradient` the loss.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.common.batch import SampleArrays, TrainingBatch
from tandem.common.config import Config
from tandem.common.messages import PromptGroup, Purpose, SampleScored, SamplesFinished, SamplingParameters
from tandem.common.tokenizer import Tokenizer
from tandem.common.wire import Arrays
from tandem.coordinator.algorithms.advantages import advantages
from tandem.coordinator.algorithms.rewards import is_truncated, training_rewards
from tandem.coordinator.data import PromptEncoder, epoch_stream, load_problems, sample_seed
from tandem.coordinator.samples import SampleStore


class GrpoFeed:
    """What the loop asks of GRPO (see `tandem.coordinator.feed.Feed`)."""

    notices: tuple[str, ...] = ()

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        encoder = PromptEncoder(config, tokenizer)
        problems = load_problems(config)
        self._train = [encoder.encode(problem) for problem in problems.train]
        self._validation = [encoder.encode(p) for p in problems.validation[: config.grpo.max_val_samples]]
        self._stop_token_ids = (tokenizer.eos_id, *(config.policy.generation.stop_token_ids or ()))
        self._store = SampleStore()

    @property
    def num_validation(self) -> int:
        """Validation problems, each sampled once."""
        return len(self._validation)

    @property
    def num_steps(self) -> int:
        """Steps that a whole run takes."""
        return self._config.grpo.max_num_steps

    def sampling(self, purpose: Purpose) -> SamplingParameters:
        """Return how tokens are drawn: validation uses the same settings as training, as NeMo-RL does."""
        generation = self._config.policy.generation
        return SamplingParameters(
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k or 0,
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            stop_strings=generation.stop_strings or (),
        )

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> tuple[PromptGroup, ...]:
        """Return these groups of `step`; each sample's seed depends on the step, its group and its place there."""
        grpo = self._config.grpo
        if purpose == "validate":
            chosen = {group: self._validation[group] for group in groups}
            num_samples = 1
        else:
            first = (step - 1) * grpo.num_prompts_per_step
            order = epoch_stream(grpo.seed, len(self._train), first, grpo.num_prompts_per_step)
            chosen = {group: self._train[order[group]] for group in groups}
            num_samples = grpo.num_generations_per_prompt
        # The same draws at every validation, so that two of them differ by the weights alone.
        seed_step = step if purpose == "train" else 0
        return tuple(
            PromptGroup(
                group=group,
                problem=encoded.problem,
                prompt_ids=encoded.prompt_ids,
                seeds=tuple(sample_seed(grpo.seed, seed_step, purpose, group, i) for i in range(num_samples)),
            )
            for group, encoded in chosen.items()
        )

    def take_samples(self, finished: SamplesFinished, arrays: Arrays) -> None:
        """Keep finished samples."""
        self._store.add(finished, arrays)

    def discard_samples(self, step: int, purpose: Purpose, groups: Sequence[int]) -> None:
        """Forget the samples of these groups."""
        self._store.discard(step, purpose, groups)

    def batch(self, step: int, purpose: Purpose) -> tuple[TrainingBatch, dict[str, float]]:
        """Return the training batch of `step` and the metrics of its samples."""
        assert purpose == "train", "GRPO validates by generating"
        return training_batch(self._config, *self._store.peek(step, "train"))

    def validation_examples(self, step: int, count: int) -> list[str]:
        """Describe the first validation samples of `step`: what was asked, what came, what it was worth."""
        if not count or not self._store.count(step, "validate"):
            return []
        samples, _ = self._store.peek(step, "validate")
        return [
            f"validation: {self._validation[s.group].problem.question!r} -> {s.response!r} (reward {s.reward:g})"
            for s in samples[:count]
        ]

    def finish_step(self, step: int) -> dict[str, float]:
        """Forget the step's samples; return the metrics of its validation samples."""
        self._store.drop(step, "train")
        if not self._store.count(step, "validate"):
            return {}
        samples, _ = self._store.peek(step, "validate")
        self._store.drop(step, "validate")
        rewards = np.array([sample.reward for sample in samples])
        return {
            "val_reward": float(rewards.mean()),
            "val_accuracy": float(np.mean([sample.correct for sample in samples])),
            "val_mean_generation_length": float(np.mean([sample.response_length for sample in samples])),
            **{f"val_{name}": value for name, value in turn_metrics(self._config, samples).items()},
        }


def training_batch(
    config: Config, samples: Sequence[SampleScored], arrays: SampleArrays
) -> tuple[TrainingBatch, dict[str, float]]:
    """Turn a step's samples, ordered by group, into a batch with advantages; return also the samples' metrics."""
    num_samples = config.grpo.num_generations_per_prompt
    order = [(sample.group, sample.sample) for sample in samples]
    assert order == [divmod(i, num_samples) for i in range(len(samples))], "groups are whole and in order"
    rewards_GN = np.array([sample.reward for sample in samples], dtype=np.float64).reshape(-1, num_samples)
    trained_GN = training_rewards(samples, config.grpo).reshape(rewards_GN.shape)
    is_truncated_S = np.array([is_truncated(sample) for sample in samples])
    loss_mask_T = arrays.loss_mask_T
    if config.grpo.overlong_filtering:
        loss_mask_T = loss_mask_T & ~np.repeat(is_truncated_S, arrays.lengths_S)
    batch = TrainingBatch(
        lengths_S=arrays.lengths_S,
        token_ids_T=arrays.token_ids_T,
        loss_mask_T=loss_mask_T,
        generation_logprobs_T=arrays.generation_logprobs_T,
        advantages_S=advantages(trained_GN, config.grpo.adv_estimator).reshape(-1),
    )
    lengths = np.array([sample.response_length for sample in samples])
    metrics = {
        "reward": float(rewards_GN.mean()),
        "reward_std": float(rewards_GN.std()),
        "reward_min": float(rewards_GN.min()),
        "reward_max": float(rewards_GN.max()),
        "accuracy": float(np.mean([sample.correct for sample in samples])),
        "mean_generation_length": float(lengths.mean()),
        "max_generation_length": float(lengths.max()),
        "truncated_fraction": float(is_truncated_S.mean()),
        "groups_without_spread": float(np.mean(np.ptp(rewards_GN, axis=1) == 0)),
        **turn_metrics(config, samples),
    }
    if config.grpo.reward_scaling.enabled or config.grpo.reward_shaping.enabled:
        metrics["training_reward"] = float(trained_GN.mean())
    return batch, metrics


def turn_metrics(config: Config, samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return how many turns the samples took, where they may take more than one; under NeMo-RL's names."""
    if config.grpo.max_rollout_turns == 1:
        return {}
    return {
        "avg_turns_per_sample": float(np.mean([sample.num_turns for sample in samples])),
        "max_turns_reached_rate": float(np.mean([sample.finish_reason == "turns" for sample in samples])),
    }
