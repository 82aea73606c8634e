"""The batch of a step: its samples as columns, their metrics, and their advantages, or rewards for PPO.

Shapes: ``S`` samples, in ``G`` groups of ``N``; in a batch ``S`` sequences, of which an agent's episode has several.

A step leaves out groups that were drawn in vain, have equal rewards, or have impossible numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tandem.common.errors import RewardError, nearest
from tandem.common.messages import Purpose, SampleScored
from tandem.common.numeric import PHRASE, ROUNDING, find_outliers, find_usual_size
from tandem.common.user_code import line
from tandem.common.values import beyond
from tandem.config import Config
from tandem.config.schema import RolloutsConfig
from tandem.coordinator.algorithms.advantages import advantages, clip, compare_roles, decouple_advantages, within
from tandem.coordinator.algorithms.places import NUM_BATCHES
from tandem.coordinator.algorithms.rewards import component_names, component_rewards, has_spread, scale, shape
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import NO_PROMPT
from tandem.samples.data_sets import EncodedProblem


def dynamic_sampling(section: RolloutsConfig, samples: Sequence[SampleScored]) -> tuple[list[int], dict[str, float]]:
    """Return the rows of the samples to train on, and the counts of groups, under NeMo-RL's names.

    They are those of the first `num_prompts_per_step` informative groups, in the order in which the step drew them,
    whatever order they finished in.
    """
    size = section.num_generations_per_prompt
    firsts = range(0, len(samples), size)
    useful = [first for first in firsts if has_spread(section, samples[first : first + size])]
    used = useful[: section.num_prompts_per_step]
    assert len(used) == section.num_prompts_per_step, "the scheduler goes on until there are as many"
    return [row for first in used for row in range(first, first + size)], {
        NUM_BATCHES: len(firsts) / section.num_prompts_per_batch,
        "dynamic_sampling_num_dropped_groups": float(len(firsts) - len(useful)),
        "dynamic_sampling_num_discarded_valid_samples": float((len(useful) - len(used)) * size),
    }


def rows_of_equal_rewards(section: RolloutsConfig, samples: Sequence[SampleScored]) -> set[int]:
    """Return the rows of the samples in groups whose rewards are all equal."""
    size = section.num_generations_per_prompt
    firsts = range(0, len(samples), size)
    equal = [first for first in firsts if not has_spread(section, samples[first : first + size])]
    return {row for first in equal for row in range(first, first + size)}


def set_aside_note(
    samples: Sequence[SampleScored], rewards_S: NDArray[np.float64], advantages_S: NDArray[np.float32]
) -> str:
    """Name the first sample with a reward or advantage that no run can compute with."""
    place = int((~(within(rewards_S) & within(advantages_S))).argmax())
    quantity, value = (
        ("reward", rewards_S[place]) if not within(rewards_S)[place] else ("advantage", advantages_S[place])
    )
    sample = samples[place]
    return (
        f"group {sample.group}, sample {sample.sample}: its {quantity} is {beyond(float(value))}: "
        "groups with such a sample are set aside"
    )


def drop_outliers(
    section: RolloutsConfig, kept_S: NDArray[np.bool_], outlying_S: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], dict[str, float]]:
    """Return which samples to train on, without groups that have an outlier if these are set aside, and the counts."""
    counts = {"advantage_outliers": float(outlying_S.sum())}
    if not section.set_aside_outliers:
        return kept_S, counts
    is_outlying_G = outlying_S.reshape(-1, section.num_generations_per_prompt).any(axis=1)
    counts["groups_set_aside/advantages"] = float(is_outlying_G.sum())
    return kept_S & np.repeat(~is_outlying_G, section.num_generations_per_prompt), counts


def outlier_note(
    config: Config,
    samples: Sequence[SampleScored],
    advantages_S: NDArray[np.float32],
    outlying_S: NDArray[np.bool_],
    problem_of: Callable[[int], str] | None = None,
) -> str:
    """Name the sample with the largest advantage that is out of all proportion to the others of its step."""
    place = int((np.abs(advantages_S) * outlying_S).argmax())
    sample, value, usual = samples[place], abs(float(advantages_S[place])), find_usual_size(advantages_S)
    aside = "groups with such a sample are set aside"
    if not config.rollout_section.set_aside_outliers:
        aside = f"{config.algorithm}.set_aside_outliers sets such groups aside"
    rewards = [each.reward for each in samples if each.group == sample.group and not each.dropped]
    problem = "" if problem_of is None else f" (problem {line(problem_of(sample.group))})"
    return (
        f"group {sample.group}{problem}, sample {sample.sample}: an advantage of {float(advantages_S[place]):.4g} is "
        f"{PHRASE}: {value / usual:,.0f} times the usual {usual:.3g} of the step; its reward is "
        f"{sample.reward:.6g}, and those of its group are {min(rewards):.6g} to {max(rewards):.6g} ({aside})"
    )


_BRANCHES = attrgetter("scored.branches")
_FAILURE, _COMPONENTS, _SPENT = map(attrgetter, ("failure", "components", "spent"))


class SampleColumns(NamedTuple):
    """Samples as columns: a number, or a word, of each."""

    group_S: NDArray[np.int64]
    sample_S: NDArray[np.int64]
    prompt_lengths_S: NDArray[np.int64]
    response_lengths_S: NDArray[np.int64]
    num_tokens_S: NDArray[np.int64]
    rewards_S: NDArray[np.float64]
    is_correct_S: NDArray[np.bool_]
    is_dropped_S: NDArray[np.bool_]
    finish_reasons_S: NDArray[np.str_]
    rollouts_S: NDArray[np.str_]
    command_S: NDArray[np.int64]

    @classmethod
    def of(cls, records: Sequence[SampleRecord]) -> Self:
        """Return the columns of samples, in their order."""
        return cls(*map(np.array, zip(*map(_FIELDS, records), strict=True)))

    @property
    def is_truncated_S(self) -> NDArray[np.bool_]:
        """Whether a token limit cut the sample off."""
        return np.asarray(self.finish_reasons_S == "length")


class _Sequences(NamedTuple):
    """The sequences of samples: each whole, or an episode's branches."""

    place_S: NDArray[np.int64]
    """Place of the sample that each belongs to."""
    branch_S: NDArray[np.int64]
    prompt_lengths_S: NDArray[np.int64]
    num_made_S: NDArray[np.int64]
    lengths_S: NDArray[np.int64]


_FIELDS = attrgetter(
    "scored.group",
    "scored.sample",
    "scored.prompt_length",
    "scored.response_length",
    "scored.num_tokens",
    "scored.reward",
    "scored.correct",
    "scored.dropped",
    "scored.finish_reason",
    "rollout",
    "command_id",
)
"""Reads the columns of a record, in their order."""


def training_batch(
    config: Config,
    step: int,
    records: Sequence[SampleRecord],
    prompts: Mapping[int, Hashable],
    problem_of: Callable[[int], str] | None = None,
) -> tuple[SampleBatch, dict[str, float]]:
    """Turn a step's samples, ordered by group, into a batch with advantages; return also the samples' metrics.

    `prompts` has a key for each group, which is equal for equal prompts, and `problem_of` knows the id of its problem.
    Where trainers make the advantages themselves (PPO), or learn without any (distillation), the batch has rewards in
    their place.
    """
    grpo, estimator = config.rollout_section, config.rollout_section.group_estimator
    num_samples = grpo.num_generations_per_prompt
    columns, samples = SampleColumns.of(records), [record.scored for record in records]
    all_samples = samples  # dynamic sampling may leave some out
    place_S, is_next_S = np.arange(len(samples)) % num_samples, np.diff(columns.group_S, prepend=-1) > 0
    assert ((columns.sample_S == place_S) & (is_next_S == (place_S == 0))).all(), "groups are whole and in order"
    metrics = sample_metrics(config, columns, samples)
    if grpo.use_dynamic_sampling:
        rows, counts = dynamic_sampling(grpo, samples)
        records, samples = [records[row] for row in rows], [samples[row] for row in rows]
        columns = SampleColumns.of(records)
        metrics |= counts | {"filtered_reward": float(columns.rewards_S[~columns.is_dropped_S].mean())}
    counts_S, rewards_S = ~columns.is_dropped_S, columns.rewards_S.astype(np.float64)
    if grpo.reward_scaling.enabled or grpo.reward_shaping.enabled:
        rewards_S = scale(rewards_S, grpo.reward_scaling)
        rewards_S = shape(rewards_S, columns.response_lengths_S, columns.is_truncated_S, grpo.reward_shaping)
        if counts_S.any():
            metrics["training_reward"] = float(rewards_S[counts_S].mean())
    rewards_GN, counts_GN = rewards_S.reshape(-1, num_samples), counts_S.reshape(-1, num_samples)
    by_role = compare_roles(grpo, samples) if samples[0].role_rewards else None
    if by_role is not None:
        advantages_GN = by_role.largest_S.reshape(-1, num_samples)
    else:
        advantages_GN = _compare_samples(config, samples, rewards_GN, counts_GN)
    kept_S = np.repeat((within(rewards_GN) & within(advantages_GN)).all(axis=1), num_samples)
    of_equal_rewards: set[int] = set()
    if grpo.leaves_out_equal_rewards:
        of_equal_rewards = rows_of_equal_rewards(grpo, samples)
        metrics["groups_filtered"] = len(of_equal_rewards) / num_samples
    notes: tuple[str, ...] = ()
    if not kept_S.all():
        metrics["groups_set_aside/rewards"] = float((~kept_S).sum() / num_samples)
        notes = (set_aside_note(samples, rewards_S, advantages_GN.reshape(-1)),)
    advantages_S = np.where(kept_S, advantages_GN.reshape(-1), 0).astype(np.float32)
    if estimator is not None and (outlying_S := find_outliers(advantages_S)).any():
        notes += (outlier_note(config, samples, advantages_S, outlying_S, problem_of),)
        kept_S, counts = drop_outliers(grpo, kept_S, outlying_S)
        metrics |= counts
    if config.max_trajectory_age_steps:
        metrics |= age_metrics(step, all_samples, config.max_trajectory_age_steps)
    batch = batch_of_samples(
        records,
        prompts,
        advantages_S=np.where(kept_S, advantages_S, np.float32(0)),
        rewards_S=np.where(kept_S, rewards_S, 0).astype(np.float32),
        filters_overlong=grpo.overlong_filtering,
        columns=environment_columns(config, samples) if config.loss_fn.environment_columns else {},
        set_aside={*np.flatnonzero(~kept_S).tolist()} | of_equal_rewards,
        notes=notes,
    )
    return batch if by_role is None else by_role.put_into(batch, samples), metrics


def _compare_samples(
    config: Config,
    samples: Sequence[SampleScored],
    rewards_GN: NDArray[np.float64],
    counts_GN: NDArray[np.bool_],
) -> NDArray[np.float32]:
    """Return the advantages of samples, or their rewards where trainers make the advantages, or learn without any."""
    grpo, estimator = config.rollout_section, config.rollout_section.group_estimator
    if estimator is None or estimator.name == "opd":
        return np.where(counts_GN, rewards_GN, 0.0).astype(np.float32)
    if estimator.name == "gdpo":
        components_SC = gdpo_components(config, samples)
        components_GNC = components_SC.reshape(*counts_GN.shape, components_SC.shape[1])
        advantages_GN = decouple_advantages(components_GNC, estimator, counts_GN)
    else:
        advantages_GN = advantages(rewards_GN, estimator, counts_GN)
    if grpo.advantage_bounds is not None:
        advantages_GN = clip(advantages_GN, counts_GN, estimator, grpo.advantage_bounds)
    return advantages_GN


def sample_metrics(config: Config, columns: SampleColumns, samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the metrics of all samples of a step, whether they are trained on or not; `columns` are theirs.

    Dropped samples have no reward. If all were dropped, the step has none.
    """
    counted_S, rewards_S = ~columns.is_dropped_S, columns.rewards_S
    counted_GN = counted_S.reshape(-1, config.rollout_section.num_generations_per_prompt)
    rewards_GN = rewards_S.reshape(counted_GN.shape)
    least_G = np.where(counted_GN, rewards_GN, np.inf).min(axis=1)
    most_G = np.where(counted_GN, rewards_GN, -np.inf).max(axis=1)
    size_G = np.where(counted_GN, np.abs(rewards_GN), 0.0).max(axis=1)
    metrics: dict[str, float] = {}
    if counted_S.any():
        counted = rewards_S[counted_S]
        metrics |= {
            "reward": float(counted.mean()),
            "reward_std": float(counted.std()),
            "reward_min": float(counted.min()),
            "reward_max": float(counted.max()),
            "accuracy": float(columns.is_correct_S[counted_S].mean()),
        }
        if any(map(_COMPONENTS, samples)) or any(map(_SPENT, samples)):
            metrics |= name_metrics([sample for sample in samples if not sample.dropped])
    share_without_spread = float((most_G - least_G <= ROUNDING * size_G).mean())
    if samples[0].role_rewards:
        share_without_spread = len(rows_of_equal_rewards(config.rollout_section, samples)) / len(samples)
    metrics |= {
        "mean_generation_length": float(columns.response_lengths_S.mean()),
        "max_generation_length": float(columns.response_lengths_S.max()),
        "truncated_fraction": float(columns.is_truncated_S.mean()),
        "groups_without_spread": share_without_spread,
    }
    if config.agent is not None or config.rollout_section.max_rollout_turns > 1:
        metrics |= turn_metrics(config, samples)
    if any(map(_FAILURE, samples)):
        metrics |= failure_metrics(samples)
    return metrics


def batch_of_samples(
    records: Sequence[SampleRecord],
    prompts: Mapping[int, Hashable],
    *,
    advantages_S: NDArray[np.float32],
    rewards_S: NDArray[np.float32],
    filters_overlong: bool,
    columns: Mapping[str, NDArray[np.float32]] = {},
    set_aside: Collection[int] = (),
    notes: Sequence[str] = (),
) -> SampleBatch:
    """Return the batch of these samples, in this order. Each branch of an agent's episode is a sequence.

    No token counts if the sample was dropped, is to be set aside or, with `filters_overlong`, was truncated. A sample's
    values are those of each of its sequences.
    """
    sample_columns = SampleColumns.of(records)
    counts_S = ~sample_columns.is_dropped_S
    counts_S[[*set_aside]] = False
    if filters_overlong:
        counts_S &= ~sample_columns.is_truncated_S
    of = _Sequences(
        place_S=np.arange(len(records)),
        branch_S=np.zeros(len(records), dtype=np.int64),
        prompt_lengths_S=sample_columns.prompt_lengths_S,
        num_made_S=sample_columns.response_lengths_S,
        lengths_S=sample_columns.num_tokens_S,
    )
    if any(map(_BRANCHES, records)):
        of = _split_branches(of, records)
    # Nothing predicts the first token of a sequence, so that it does not count even if the policy made it.
    num_valid_S = np.where(counts_S[of.place_S], of.num_made_S - (of.prompt_lengths_S == 0), 0)
    prompt_S, first_rows = np.full(len(num_valid_S), NO_PROMPT), dict[Hashable, int]()
    for row in np.flatnonzero(num_valid_S).tolist():
        scored = records[of.place_S[row]].scored
        if not scored.branches:
            prompt_S[row] = first_rows.setdefault(prompts[scored.group], row)
    rollouts, source_S = np.unique(sample_columns.rollouts_S, return_inverse=True)
    return SampleBatch(
        lengths_S=of.lengths_S.astype(np.int32),
        num_valid_S=num_valid_S.astype(np.int32),
        prompt_S=prompt_S.astype(np.int32),
        prompt_lengths_S=of.prompt_lengths_S.astype(np.int32),
        rank_S=np.zeros(len(num_valid_S), dtype=np.int32),
        advantages_S=advantages_S[of.place_S],
        rewards_S=rewards_S[of.place_S],
        source_S=source_S[of.place_S].astype(np.int32),
        command_S=sample_columns.command_S[of.place_S].astype(np.int64),
        group_S=sample_columns.group_S[of.place_S].astype(np.int32),
        sample_S=sample_columns.sample_S[of.place_S].astype(np.int32),
        branch_S=of.branch_S.astype(np.int32),
        **{name: values[of.place_S] for name, values in columns.items()},
    ).attach_sources(rollouts.tolist(), notes)


def _split_branches(samples: _Sequences, records: Sequence[SampleRecord]) -> _Sequences:
    """Return the sequences of samples of which some, or all, are episodes with branches."""
    sequences: list[tuple[int, ...]] = []
    for place, sequence in enumerate(zip(*samples[1:], strict=True)):
        branches = records[place].scored.branches
        sequences += [
            (place, number, branch.prompt_length, branch.num_made, branch.num_tokens)
            for number, branch in enumerate(branches)
        ] or [(place, *sequence)]
    return _Sequences(*map(np.array, zip(*sequences, strict=True)))


def environment_columns(config: Config, samples: Sequence[SampleScored]) -> dict[str, NDArray[np.float32]]:
    """Return the columns of a custom loss that come from environments."""
    columns = {}
    for name in config.loss_fn.environment_columns:
        column = config.loss_fn.custom_columns[name.removesuffix("_S")]
        if not any(column.name in sample.components for sample in samples):
            names = component_names(samples)
            raise RewardError(
                f"loss_fn.columns.{column.name}: environment {_environments(config)} gave no such component, but "
                f"{', '.join(names) or 'none'}{nearest(column.name, names)}"
            )
        values = [sample.components.get(column.name, column.fill) for sample in samples]
        columns[name] = np.array(values, dtype=column.dtype)
    return columns


def gdpo_components(config: Config, samples: Sequence[SampleScored]) -> NDArray[np.float64]:
    """Return the components of the rewards, as many as GDPO and its weights need."""
    names, estimator = component_names(samples), config.rollout_section.group_estimator
    weights = None if estimator is None else estimator.reward_weights
    provided = f"environment {_environments(config)} gave {', '.join(names) or 'none'}"
    if len(names) < 2:
        raise RewardError(f"grpo.adv_estimator.name: gdpo needs rewards of at least two components, {provided}")
    if weights is not None and len(weights) != len(names):
        raise RewardError(f"grpo.adv_estimator.reward_weights: {len(weights)} weights, but {provided}")
    return component_rewards(samples, config.rollout_section, names)


def _environments(config: Config) -> str:
    return ", ".join(map(repr, config.environments))


def name_metrics(samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the means of the rewards' components, and the cost of scoring, under the environment's own names."""
    spent = sorted({name for sample in samples for name in sample.spent})
    return {
        f"reward/{name}": float(np.mean([sample.components.get(name, 0.0) for sample in samples]))
        for name in component_names(samples)
    } | {f"spent/{name}": float(sum(sample.spent.get(name, 0.0) for sample in samples)) for name in spent}


def age_metrics(step: int, samples: Sequence[SampleScored], oldest_age: int) -> dict[str, float]:
    """Return the ages of the weights that made a step's samples, where they may be older than the newest.

    The age of a weight version is the number of training steps between it and the version that the step begins with. A
    sample is as old as the weights it was begun with (NeMo-RL's ``avg_trajectory_age``). Tokens have their own ages.
    """
    ages_S = np.array([step - 1 - sample.oldest_version for sample in samples])
    num_tokens = np.zeros(oldest_age + 1)
    for age, sample in zip(ages_S.tolist(), samples, strict=True):
        for newer, count in enumerate(sample.tokens_by_version):
            num_tokens[age - newer] += count
    shares = num_tokens / max(1.0, num_tokens.sum())  # failed agents may have asked for no token
    return {
        "avg_trajectory_age": float(ages_S.mean()),
        "max_trajectory_age": float(ages_S.max()),
        **{f"token_share/age_{age}": float(share) for age, share in enumerate(shares)},
    }


def turn_metrics(config: Config, samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the numbers of turns of the samples, if they may take more than one, under NeMo-RL's names."""
    if config.agent is not None:
        return {
            "avg_turns_per_sample": float(np.mean([sample.num_turns for sample in samples])),
            "avg_branches_per_sample": float(np.mean([len(sample.branches) for sample in samples])),
        }
    if config.rollout_section.max_rollout_turns == 1:
        return {}
    return {
        "avg_turns_per_sample": float(np.mean([sample.num_turns for sample in samples])),
        "max_turns_reached_rate": float(np.mean([sample.finish_reason == "turns" for sample in samples])),
    }


def failure_metrics(samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the number of samples that the environment failed on, including those that took too long."""
    failed = [sample for sample in samples if sample.failure]
    return {
        "environment_failures": float(len(failed)),
        "environment_timeouts": float(sum(sample.timed_out for sample in failed)),
        "environment_dropped": float(sum(sample.dropped for sample in failed)),
    }


def metrics_by_origin(
    purpose: Purpose, samples: Sequence[SampleScored], drawn: Mapping[int, EncodedProblem], *, by_environment: bool
) -> dict[str, float]:
    """Return the rewards and accuracies of each data set that problems name, and of each environment."""
    of_set, of_environment = ("train", "env") if purpose == "train" else ("val", "val_env")
    by_origin: dict[str, list[SampleScored]] = {}
    for sample in samples:
        origin = drawn[sample.group]
        if origin.set_name:
            by_origin.setdefault(f"{of_set}_{origin.set_name}", []).append(sample)
        if by_environment:
            by_origin.setdefault(f"{of_environment}_{origin.environment}", []).append(sample)
    metrics: dict[str, float] = {}
    for name, origin_samples in sorted(by_origin.items()):
        if counted := [sample for sample in origin_samples if not sample.dropped]:
            metrics[f"{name}/reward"] = float(np.mean([sample.reward for sample in counted]))
            metrics[f"{name}/accuracy"] = float(np.mean([sample.correct for sample in counted]))
        if num_failed := sum(bool(sample.failure) for sample in origin_samples):
            metrics[f"{name}/environment_failures"] = float(num_failed)
    return metrics
