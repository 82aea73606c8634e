"""The data of GRPO and PPO: prompt groups out, advantages in, or rewards for PPO.

The formulas are in `rewards` and `advantages`, the loss in `tandem.trainer.losses.policy_gradient`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.common.bounds import within
from tandem.common.errors import ConfigError, RewardError, nearest
from tandem.common.messages import PromptGroup, Purpose, SampleScored, SamplingParameters
from tandem.common.returned import beyond
from tandem.config import Config
from tandem.config.schema import Rollouts
from tandem.config.schema.columns import TEACHER
from tandem.coordinator.algorithms.advantages import advantages, clipped, decoupled_advantages
from tandem.coordinator.algorithms.rewards import (
    component_names,
    component_rewards,
    has_spread,
    is_truncated,
    training_rewards,
)
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples.assignment import NO_PROMPT
from tandem.samples.batch import Batch
from tandem.samples.data_sets import (
    EncodedProblem,
    LazyDataset,
    PromptEncoder,
    encode_now,
    left_out,
    load_problems,
    sample_seed,
    set_aside,
    steps_capped,
)
from tandem.samples.data_sets.step_size import check_step_size
from tandem.samples.images.markers import shown
from tandem.samples.images.rows import image_rows
from tandem.samples.tokenizer import Tokenizer


class _Sequence(NamedTuple):
    """The sizes of a sequence, with the names of `tandem.common.messages.Branch`."""

    prompt_length: int
    num_made: int
    num_tokens: int


class _Drawn(NamedTuple):
    """A problem, and the prompt group that asks engines for samples of it."""

    problem: EncodedProblem
    asked: PromptGroup


class GrpoAlgorithm:
    """GRPO and PPO, as the loop uses them (see `tandem.coordinator.algorithms.running.RunningAlgorithm`).

    A problem with too long a prompt is left out if it was read from a file or a hub. If it was generated, all others
    would be too long as well, and that is an error. Held-out problems are tokenised at once, the others when they are
    drawn.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self.images = image_rows(config, tokenizer)
        problems = load_problems(config, self.images)
        encoder = PromptEncoder(config, tokenizer, problems.all_views)
        # A run that only validates reads no training problems.
        train = [] if config.evaluates else problems.train_asked(config.data)
        most = config.rollout_section.max_val_samples
        parts = {name: part[:most] for name, part in problems.held_out_asked(config.data).items()}
        held_out = [problem for part in parts.values() for problem in part]
        check_step_size(config, len(train))
        for asked in {(asked.data.environment or "", asked.set_name): asked for asked in train}.values():
            self._teacher_of(asked.data.environment or "", asked.set_name)
        encoder.check_characters([*train, *held_out])
        sizes = () if config.evaluates else [source.num_problems for source in problems.sources]
        self._train = LazyDataset(config, train, encoder.encode, sizes)
        self._validation = [problem for part in parts.values() for problem in encode_now(part, encoder.encode)]
        self._groups: dict[tuple[int, Purpose, int], _Drawn] = {}
        """Groups drawn so far, by step, purpose and number, without those of steps before the last batch."""
        self._has_several = len(config.environments) > 1
        """Whether prompts say which environment scores their samples."""
        num_too_long = self._train.num_too_long + len(held_out) - len(self._validation)
        num_checked, num_items = self._train.num_checked + len(held_out), len(self._train) + len(held_out)
        too_long = left_out(num_too_long, num_checked, num_items)
        num_aside = 0 if config.evaluates else problems.num_set_aside
        num_rows = len(self._train) + len(problems.validation) + num_aside
        size = config.rollout_section.num_prompts_per_batch
        capped = steps_capped(config, self.num_steps, len(self._train), size)
        self.notices = tuple(filter(None, (too_long, set_aside(num_aside, num_rows), capped)))
        self.validated: Sequence[SampleScored] = ()
        """The samples of the validation, in a run that only validates."""
        self._stop_token_ids = (tokenizer.eos_id, *(config.policy.generation.stop_token_ids or ()))

    @property
    def num_validation(self) -> int:
        """Validation problems."""
        return len(self._validation)

    @property
    def validation_parts(self) -> dict[str, int]:
        """Nothing: one set is validated, by generating."""
        return {}

    @property
    def num_steps(self) -> int:
        """Steps of a whole run: the smaller of ``max_num_steps`` and ``max_num_epochs``."""
        section = self._config.rollout_section
        if section.max_num_epochs is None:
            return section.max_num_steps
        per_epoch = max(1, len(self._train) // section.num_prompts_per_batch)
        return min(section.max_num_steps, section.max_num_epochs * per_epoch)

    def sampling(self, purpose: Purpose) -> SamplingParameters:
        """Return the sampling parameters. Validation may have some of its own, and is otherwise like training."""
        generation = self._config.policy.generation
        validates = purpose == "validate"
        own = self._config.rollout_section.val_temperature if validates else None
        return SamplingParameters(
            temperature=generation.temperature if own is None else own,
            top_p=generation.validation_top_p if validates else generation.top_p,
            top_k=(generation.validation_top_k if validates else generation.top_k) or 0,
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            stop_strings=generation.stop_strings or (),
        )

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> tuple[PromptGroup, ...]:
        """Return these groups of `step`. Each sample's seed depends on the step, the group and its place there."""
        return tuple(self._drawn(step, purpose, group).asked for group in groups)

    def _drawn(self, step: int, purpose: Purpose, group: int) -> _Drawn:
        """Return the problem of a group of `step` and its prompt group. They are kept until the step has its batch."""
        # Every validation draws the same, so that two of them differ only by the weights.
        key = (step if purpose == "train" else 0), purpose, group
        if key not in self._groups:
            self._groups[key] = self._draw(*key)
        return self._groups[key]

    def _draw(self, step: int, purpose: Purpose, group: int) -> _Drawn:
        section = self._config.rollout_section
        if purpose == "validate":
            encoded, num_samples = self._validation[group], section.num_val_generations_per_prompt
            seed = section.seed if section.val_seed is None else section.val_seed
        else:
            # A step that may draw more has as many places of the stream to itself: its problems depend on no other
            # step.
            (encoded,) = self._train.draw((step - 1) * section.max_prompts_per_step + group, 1)
            num_samples, seed = section.num_generations_per_prompt, section.seed
        asked = PromptGroup(
            group=group,
            problem=encoded.problem,
            prompt_ids=encoded.prompt_ids,
            seeds=tuple(sample_seed(seed, step, purpose, group, place) for place in range(num_samples)),
            environment=encoded.environment if self._has_several else "",
            images=encoded.images,
        )
        return _Drawn(encoded, asked)

    def batch(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord] = ()
    ) -> tuple[Batch, dict[str, float]]:
        """Return the training batch of `step` and the metrics of its samples."""
        assert purpose == "train", "it validates by generating"
        groups = sorted({record.scored.group for record in records})
        drawn = {group: self._drawn(step, "train", group).problem for group in groups}
        # Groups of this step may be asked for again, if samples have been lost.
        self._groups = {key: each for key, each in self._groups.items() if key[1] == "validate" or key[0] >= step}
        prompts = {group: (encoded.prompt_ids, encoded.images) for group, encoded in drawn.items()}
        batch, metrics = batch_of_step(self._config, step, records, prompts)
        if self._config.num_of("teacher") > 1:
            batch = self._with_teachers(batch, drawn)
        return batch, metrics | self._by_origin("train", [record.scored for record in records], drawn)

    def _with_teachers(self, batch: Batch, drawn: Mapping[int, EncodedProblem]) -> Batch:
        """Return the batch with the teacher of each sequence."""
        numbers = {group: self._teacher_of(each.environment, each.set_name) for group, each in drawn.items()}
        teacher_S = np.array([numbers[group] for group in batch.group_S.tolist()], dtype=np.int32)
        return batch.replace(**{f"{TEACHER}_S": teacher_S})

    def _teacher_of(self, environment: str, set_name: str) -> int:
        """Return the index of the teacher for an environment and a data set. Raises `ConfigError` if there is none."""
        names = list(filter(None, (environment, set_name or self._config.data.dataset_name)))
        number = self._config.teacher_of(*names)
        if number is None:
            raise ConfigError(
                f"on_policy_distillation.teacher_model_by_agent_name: no teacher for {' or '.join(map(repr, names))}, "
                "and no default"
            )
        return number

    def describe(self, samples: Sequence[SampleScored]) -> list[str]:
        """Describe validation samples by prompt, response and reward."""
        return [
            f"validation: {_shown_question(self._validation[s.group])!r} -> {s.response!r} (reward {s.reward:g})"
            for s in samples
        ]

    def validation_metrics(self, samples: Sequence[SampleScored]) -> dict[str, float]:
        """Return the metrics of a validation's samples."""
        if not samples:
            return {}
        if self._config.evaluates:
            self.validated = samples
        counted = [sample for sample in samples if not sample.dropped]
        scores = {
            "val_reward": float(np.mean([sample.reward for sample in counted])),
            "val_accuracy": float(np.mean([sample.correct for sample in counted])),
        }
        if self._config.rollout_section.num_val_generations_per_prompt > 1 and counted:
            scores["val_pass_k"] = pass_k(counted)
        scores |= self._by_origin("validate", samples, dict(enumerate(self._validation)))
        others = {**turn_metrics(self._config, samples), **failure_metrics(samples)}
        return {
            **(scores if counted else {}),
            "val_mean_generation_length": float(np.mean([sample.response_length for sample in samples])),
            **{f"val_{name}": value for name, value in others.items()},
        }

    def _by_origin(
        self, purpose: Purpose, samples: Sequence[SampleScored], drawn: Mapping[int, EncodedProblem]
    ) -> dict[str, float]:
        """Return the rewards and accuracies of each data set and each environment, if there are several."""
        of_set, of_environment = ("train", "env") if purpose == "train" else ("val", "val_env")
        found: dict[str, list[SampleScored]] = {}
        for sample in samples:
            origin = drawn[sample.group]
            if origin.set_name:
                found.setdefault(f"{of_set}_{origin.set_name}", []).append(sample)
            if self._has_several:
                found.setdefault(f"{of_environment}_{origin.environment}", []).append(sample)
        metrics: dict[str, float] = {}
        for name, own in sorted(found.items()):
            if counted := [sample for sample in own if not sample.dropped]:
                metrics[f"{name}/reward"] = float(np.mean([sample.reward for sample in counted]))
                metrics[f"{name}/accuracy"] = float(np.mean([sample.correct for sample in counted]))
            if num_failed := sum(bool(sample.failure) for sample in own):
                metrics[f"{name}/environment_failures"] = float(num_failed)
        return metrics


def pass_k(samples: Sequence[SampleScored]) -> float:
    """Return the share of problems that any of their samples solves (pass@k for k samples of each)."""
    solved: dict[int, bool] = {}
    for sample in samples:
        solved[sample.group] = solved.get(sample.group, False) or sample.correct
    return float(np.mean([*solved.values()]))


def _shown_question(encoded: EncodedProblem) -> str:
    """Return the question of a problem, with labels for its images."""
    question = encoded.problem.question
    return question if encoded.images is None else shown(question)


def batch_of_step(
    config: Config, step: int, records: Sequence[SampleRecord], prompts: Mapping[int, Hashable]
) -> tuple[Batch, dict[str, float]]:
    """Return the batch of a step, and the metrics of its samples with their ages; see `training_batch`."""
    batch, metrics = training_batch(config, records, prompts)
    return batch, metrics | age_metrics(step, [record.scored for record in records], config.max_trajectory_age_steps)


def training_batch(
    config: Config, records: Sequence[SampleRecord], prompts: Mapping[int, Hashable]
) -> tuple[Batch, dict[str, float]]:
    """Turn a step's samples, ordered by group, into a batch with advantages; return also the samples' metrics.

    `prompts` has a key for each group, which is equal for equal prompts.
    """
    grpo, estimator = config.rollout_section, config.rollout_section.group_estimator
    num_samples = grpo.num_generations_per_prompt
    samples = [record.scored for record in records]
    order = [(sample.group, sample.sample) for sample in samples]
    assert order == [divmod(i, num_samples) for i in range(len(samples))], "groups are whole and in order"
    metrics = sample_metrics(config, samples)
    if grpo.use_dynamic_sampling:
        rows, counts = dynamic_sampling(grpo, samples)
        records, samples = [records[row] for row in rows], [samples[row] for row in rows]
        metrics |= counts | {"filtered_reward": float(np.mean([s.reward for s in samples if not s.dropped]))}
    counts_S = np.array([not sample.dropped for sample in samples])
    counts_GN = counts_S.reshape(-1, num_samples)
    rewards_S = training_rewards(samples, grpo)
    if (grpo.reward_scaling.enabled or grpo.reward_shaping.enabled) and counts_S.any():
        metrics["training_reward"] = float(rewards_S[counts_S].mean())
    rewards_GN = rewards_S.reshape(-1, num_samples)
    if estimator is None or estimator.name == "opd":  # trainers make the advantages, or learn without any
        advantages_GN = np.where(counts_GN, rewards_GN, 0.0).astype(np.float32)
    elif estimator.name == "gdpo":
        components_SC = _components(config, samples)
        components_GNC = components_SC.reshape(-1, num_samples, components_SC.shape[1])
        advantages_GN = decoupled_advantages(components_GNC, estimator, counts_GN)
    else:
        advantages_GN = advantages(rewards_GN, estimator, counts_GN)
    if estimator is not None and estimator.name != "opd":
        advantages_GN = clipped(advantages_GN, counts_GN, estimator, grpo.advantage_bounds)
    kept_S = np.repeat((within(rewards_GN) & within(advantages_GN)).all(axis=1), num_samples)
    of_equal_rewards: set[int] = set()
    if grpo.leaves_out_equal_rewards:
        of_equal_rewards = rows_of_equal_rewards(grpo, samples)
        metrics["groups_filtered"] = len(of_equal_rewards) / num_samples
    notes: tuple[str, ...] = ()
    if not kept_S.all():
        metrics["groups_set_aside/rewards"] = float((~kept_S).sum() / num_samples)
        notes = (_set_aside_note(samples, rewards_S, advantages_GN.reshape(-1)),)
    batch = batch_of(
        records,
        prompts,
        advantages_S=np.where(kept_S, advantages_GN.reshape(-1), 0).astype(np.float32),
        rewards_S=np.where(kept_S, rewards_S, 0).astype(np.float32),
        filters_overlong=grpo.overlong_filtering,
        columns=_columns(config, samples),
        set_aside=frozenset(np.flatnonzero(~kept_S).tolist()) | of_equal_rewards,
        notes=notes,
    )
    return batch, metrics


def rows_of_equal_rewards(section: Rollouts, samples: Sequence[SampleScored]) -> set[int]:
    """Return the rows of the samples in groups whose rewards are all equal."""
    size = section.num_generations_per_prompt
    firsts = range(0, len(samples), size)
    equal = [first for first in firsts if not has_spread(section, samples[first : first + size])]
    return {row for first in equal for row in range(first, first + size)}


def _set_aside_note(
    samples: Sequence[SampleScored], rewards_S: NDArray[np.float64], advantages_S: NDArray[np.float32]
) -> str:
    """Name the first sample with a reward or advantage that no run can compute with."""
    place = int((~(within(rewards_S) & within(advantages_S))).argmax())
    what, value = ("reward", rewards_S[place]) if not within(rewards_S)[place] else ("advantage", advantages_S[place])
    sample = samples[place]
    return (
        f"group {sample.group}, sample {sample.sample}: its {what} is {beyond(float(value))}: "
        "groups with such a sample are set aside"
    )


def batch_of(
    records: Sequence[SampleRecord],
    prompts: Mapping[int, Hashable],
    *,
    advantages_S: NDArray[np.float32],
    rewards_S: NDArray[np.float32],
    filters_overlong: bool,
    columns: Mapping[str, NDArray[np.float32]] | None = None,
    set_aside: Collection[int] = (),
    notes: Sequence[str] = (),
) -> Batch:
    """Return the batch of these samples, in this order. Each branch of an agent's episode is a sequence.

    No token counts if the sample was dropped, is to be set aside or, with `filters_overlong`, was truncated. A sample's
    values are those of each of its sequences.
    """
    rollouts = tuple(sorted({record.rollout for record in records}))
    rows = [
        (place, record, branch, sequence)
        for place, record in enumerate(records)
        for branch, sequence in enumerate(_sequences(record.scored))
    ]
    counted = [
        0
        if record.scored.dropped or place in set_aside or (filters_overlong and is_truncated(record.scored))
        # Nothing predicts the first token of a sequence, so that it does not count even if the policy made it.
        else sequence.num_made - (sequence.prompt_length == 0)
        for place, record, _, sequence in rows
    ]
    first_rows: dict[Hashable, int] = {}
    numbers = [
        first_rows.setdefault(prompts[record.scored.group], row)
        if num_valid and not record.scored.branches
        else NO_PROMPT
        for row, ((_, record, *_), num_valid) in enumerate(zip(rows, counted, strict=True))
    ]

    def column(values: Sequence[int]) -> NDArray[np.int32]:
        return np.array(values, dtype=np.int32)

    places = [place for place, *_ in rows]
    return Batch(
        lengths_S=column([sequence.num_tokens for *_, sequence in rows]),
        num_valid_S=column(counted),
        prompt_S=column(numbers),
        prompt_lengths_S=column([sequence.prompt_length for *_, sequence in rows]),
        rank_S=column([0] * len(rows)),
        advantages_S=advantages_S[places],
        rewards_S=rewards_S[places],
        source_S=column([rollouts.index(record.rollout) for _, record, *_ in rows]),
        command_S=np.array([record.command_id for _, record, *_ in rows], dtype=np.int64),
        group_S=column([record.scored.group for _, record, *_ in rows]),
        sample_S=column([record.scored.sample for _, record, *_ in rows]),
        branch_S=column([branch for _, _, branch, _ in rows]),
        **{name: values[places] for name, values in (columns or {}).items()},
    ).with_sources(rollouts, notes)


def _sequences(sample: SampleScored) -> Sequence[_Sequence]:
    """Return the sequences of a sample: its branches, or itself."""
    whole = (sample.prompt_length, sample.response_length, sample.num_tokens)
    of_agent = ((branch.prompt_length, branch.num_made, branch.num_tokens) for branch in sample.branches)
    return [_Sequence(*sizes) for sizes in of_agent] or [_Sequence(*whole)]


def sample_metrics(config: Config, samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the metrics of all samples of a step, whether they are trained on or not.

    Dropped samples have no reward. If all were dropped, the step has none.
    """
    size = config.rollout_section.num_generations_per_prompt
    counted = [sample for sample in samples if not sample.dropped]
    spreads = [
        np.ptp(rewards) if len(rewards := [s.reward for s in samples[first : first + size] if not s.dropped]) else 0.0
        for first in range(0, len(samples), size)
    ]
    lengths = np.array([sample.response_length for sample in samples])
    return {
        **(_reward_metrics(counted) if counted else {}),
        "mean_generation_length": float(lengths.mean()),
        "max_generation_length": float(lengths.max()),
        "truncated_fraction": float(np.mean([is_truncated(sample) for sample in samples])),
        "groups_without_spread": float(np.mean(np.array(spreads) == 0)),
        **turn_metrics(config, samples),
        **failure_metrics(samples),
    }


def age_metrics(step: int, samples: Sequence[SampleScored], oldest_age: int) -> dict[str, float]:
    """Return the ages of the weights that made a step's samples, if they may be older than the newest.

    The age of a weight version is the number of training steps between it and the version that the step begins with. A
    sample is as old as the weights it was begun with (NeMo-RL's ``avg_trajectory_age``). Tokens have their own ages.
    """
    if not oldest_age:
        return {}
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


def _reward_metrics(samples: Sequence[SampleScored]) -> dict[str, float]:
    rewards_S = np.array([sample.reward for sample in samples])
    return {
        "reward": float(rewards_S.mean()),
        "reward_std": float(rewards_S.std()),
        "reward_min": float(rewards_S.min()),
        "reward_max": float(rewards_S.max()),
        "accuracy": float(np.mean([sample.correct for sample in samples])),
        **{
            f"reward/{name}": float(np.mean([sample.components.get(name, 0.0) for sample in samples]))
            for name in component_names(samples)
        },
        **spent_metrics(samples),
    }


def spent_metrics(samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the cost of scoring the samples, under the environment's own names."""
    names = sorted({name for sample in samples for name in sample.spent})
    return {f"spent/{name}": float(sum(sample.spent.get(name, 0.0) for sample in samples)) for name in names}


def failure_metrics(samples: Sequence[SampleScored]) -> dict[str, float]:
    """Return the number of samples that the environment failed on, if any, including those that took too long."""
    failed = [sample for sample in samples if sample.failure]
    return (
        {}
        if not failed
        else {
            "environment_failures": float(len(failed)),
            "environment_timeouts": float(sum(sample.timed_out for sample in failed)),
            "environment_dropped": float(sum(sample.dropped for sample in failed)),
        }
    )


def dynamic_sampling(section: Rollouts, samples: Sequence[SampleScored]) -> tuple[list[int], dict[str, float]]:
    """Return the rows of the samples to train on, and the counts of groups, under NeMo-RL's names.

    They are those of the first `num_prompts_per_step` informative groups, in the order in which the step drew them,
    whatever order they finished in.
    """
    size = section.num_generations_per_prompt
    firsts = range(0, len(samples), size)
    useful = [first for first in firsts if has_spread(section, samples[first : first + size])]
    kept = useful[: section.num_prompts_per_step]
    assert len(kept) == section.num_prompts_per_step, "the scheduler goes on until there are as many"
    return [row for first in kept for row in range(first, first + size)], {
        "dynamic_sampling_num_gen_batches": len(firsts) / section.num_prompts_per_batch,
        "dynamic_sampling_num_dropped_groups": float(len(firsts) - len(useful)),
        "dynamic_sampling_num_discarded_valid_samples": float((len(useful) - len(kept)) * size),
    }


def _columns(config: Config, samples: Sequence[SampleScored]) -> dict[str, NDArray[np.float32]]:
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


def _components(config: Config, samples: Sequence[SampleScored]) -> NDArray[np.float64]:
    """Return the components of the rewards, as many as GDPO and its weights need."""
    names, estimator = component_names(samples), config.rollout_section.group_estimator
    weights = None if estimator is None else estimator.reward_weights
    given = f"environment {_environments(config)} gave {', '.join(names) or 'none'}"
    if len(names) < 2:
        raise RewardError(f"grpo.adv_estimator.name: gdpo needs rewards of at least two components, {given}")
    if weights is not None and len(weights) != len(names):
        raise RewardError(f"grpo.adv_estimator.reward_weights: {len(weights)} weights, but {given}")
    return component_rewards(samples, config.rollout_section, names)


def _environments(config: Config) -> str:
    return ", ".join(map(repr, config.environments))


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
