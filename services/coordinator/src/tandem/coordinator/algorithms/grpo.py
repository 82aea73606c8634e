"""The data of GRPO, PPO and distillation: prompt groups out, and batches of their samples in.

A step's samples become its batch in `step_batch`. The formulas are in `rewards` and `advantages`, the loss is in
`tandem.trainer.losses.policy_gradient`.

`validation_metrics` and `describe_validation` are of validation by generating.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tandem.common.errors import ConfigError, DataError
from tandem.common.messages import PromptGroup, Purpose, SampleScored, SamplingParameters
from tandem.common.values import question_text
from tandem.config import Config
from tandem.config.schema.columns import TEACHER
from tandem.coordinator.algorithms.curriculum import Levels, make_curriculum
from tandem.coordinator.algorithms.places import StreamPlaces
from tandem.coordinator.algorithms.step_batch import failure_metrics, metrics_by_origin, training_batch, turn_metrics
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.observe.run_folder.journal import StepRecord
from tandem.samples import data_sets
from tandem.samples.batch import SampleBatch
from tandem.samples.data_sets.item_checks import check_step_size
from tandem.samples.markers import shown
from tandem.samples.tokenizer import Tokenizer


def validation_metrics(
    config: Config, problems: Sequence[data_sets.EncodedProblem], samples: Sequence[SampleScored]
) -> dict[str, float]:
    """Return the metrics of a validation's samples of these problems."""
    if not samples:
        return {}
    counted = [sample for sample in samples if not sample.dropped]
    scores: dict[str, float] = {}
    if counted:
        scores["val_reward"] = float(np.mean([sample.reward for sample in counted]))
        scores["val_accuracy"] = float(np.mean([sample.correct for sample in counted]))
        if config.rollout_section.num_val_generations_per_prompt > 1:
            scores["val_pass_k"] = _pass_k(counted)
        drawn = dict(enumerate(problems))
        scores |= metrics_by_origin("validate", samples, drawn, by_environment=len(config.environments) > 1)
    extra_scores = turn_metrics(config, samples)
    if any(sample.failure for sample in samples):
        extra_scores |= failure_metrics(samples)
    return {
        **scores,
        "val_mean_generation_length": float(np.mean([sample.response_length for sample in samples])),
        **{f"val_{name}": value for name, value in extra_scores.items()},
    }


def describe_validation(problems: Sequence[data_sets.EncodedProblem], samples: Sequence[SampleScored]) -> list[str]:
    """Describe samples of these problems by prompt, response and reward."""
    return [f"validation: {_question(problems[s.group])!r} -> {s.response!r} (reward {s.reward:g})" for s in samples]


def _pass_k(samples: Sequence[SampleScored]) -> float:
    """Return the share of problems that any of their samples solves (pass@k for k samples of each)."""
    solved: dict[int, bool] = {}
    for sample in samples:
        solved[sample.group] = solved.get(sample.group, False) or sample.correct
    return float(np.mean([*solved.values()]))


def _question(encoded: data_sets.EncodedProblem) -> str:
    """Return the question of a problem, with labels for its markers."""
    question = question_text(encoded.problem.question)
    return question if encoded.media is None else shown(question)


class _Drawn(NamedTuple):
    """A problem, and the prompt group that asks engines for samples of it."""

    problem: data_sets.EncodedProblem
    prompt_group: PromptGroup
    place: int
    """Place of the problem in the stream; of held-out problems, the number."""
    levels: Levels | None
    """Levels of the step's tasks, if they change."""


class GrpoAlgorithm:
    """GRPO, PPO and distillation, as the loop uses them (see `tandem.coordinator.algorithms.running.RunningAlgorithm`).

    A problem with too long a prompt is left out if it was read from a file or a hub. If it was generated, all others
    would be too long as well, and that is an error. Held-out problems are tokenised at once, and so are the first
    of the others and all generated ones; the rest when they are drawn.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self._config = config
        self._reader = data_sets.make_row_reader(config, tokenizer)
        problems = data_sets.load_problems(config, self._reader)
        encoder = data_sets.PromptEncoder(config, tokenizer, problems.all_views)
        # A run that only validates reads no training problems.
        train = [] if config.evaluates else problems.list_train(config.data)
        max_samples = config.rollout_section.max_val_samples
        parts = {name: part[:max_samples] for name, part in problems.list_held_out(config.data).items()}
        held_out = [problem for part in parts.values() for problem in part]
        check_step_size(config, len(train))
        for problem in {(problem.data.environment or "", problem.set_name): problem for problem in train}.values():
            _find_teacher(config, problem.data.environment or "", problem.set_name)
        encoder.check_characters([*train, *held_out])
        data_sets.check_answers(config, [*train, *held_out])
        sizes = () if config.evaluates else [source.num_problems for source in problems.sources]
        lengths = encoder.lengths() if self._reader.is_text_only else None
        self._train = data_sets.LazyDataset(config, train, encoder.encode, sizes, lengths)
        self._validation = [
            problem for part in parts.values() for problem in data_sets.encode_now(part, encoder.encode)
        ]
        self.places = StreamPlaces(config) if config.rollout_section.use_dynamic_sampling else None
        """Places that dynamic sampling draws from; None where each step has those after the step before it."""
        self.curriculum = make_curriculum(config, encoder)
        """Curriculum that decides about the problems' levels; None where these stay."""
        self._groups: dict[tuple[int, Purpose, int], _Drawn] = {}
        """Groups drawn so far, by step, purpose and number, without those of steps before the last batch."""
        self._has_several = len(config.environments) > 1
        """Whether prompts say which environment scores their samples."""
        self._has_origins = self._has_several or any(problem.set_name for problem in train)
        """Whether metrics tell data sets or environments apart."""
        num_too_long = self._train.num_too_long + len(held_out) - len(self._validation)
        num_checked, num_items = self._train.num_checked + len(held_out), len(self._train) + len(held_out)
        too_long = data_sets.describe_left_out(num_too_long, num_checked, num_items)
        num_aside = 0 if config.evaluates else problems.num_set_aside
        num_rows = len(self._train) + len(problems.validation) + num_aside
        size = config.rollout_section.num_prompts_per_batch
        capped = data_sets.describe_capped_steps(config, self.num_steps, len(self._train), size)
        repeated = data_sets.describe_repeats(config, len(self._train))
        aside = data_sets.describe_set_aside(num_aside, num_rows)
        self.notices = (*filter(None, (too_long, aside, repeated, capped)), *encoder.notices)
        self.validated: Sequence[SampleScored] = ()
        """The samples of the validation, in a run that only validates."""
        self._bad_token_ids = _find_bad_token_ids(config, tokenizer)
        generation = config.policy.generation
        self._stop_token_ids, self._stop_strings = tokenizer.stop_conditions(
            generation.stop_token_ids or (), generation.stop_strings or ()
        )

    def keep_media(self) -> None:
        """Keep in the run's folder what the data has besides texts. Raises `RunFolderError`."""
        self._reader.keep()

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

    def resume(self, read_steps: Callable[[], Sequence[StepRecord]]) -> None:
        """Continue after the finished steps of a run, which decide what the next ones draw."""
        levels = None if self.curriculum is None else self.curriculum.levels
        if self.places is not None or levels is not None:
            steps = read_steps()
            for part in (self.places, levels):
                if part is not None:
                    part.resume(steps)

    def sampling(self, purpose: Purpose) -> SamplingParameters:
        """Return the sampling parameters. Validation may have some of its own, and is otherwise like training."""
        generation = self._config.policy.generation
        validates = purpose == "validate"
        val_temperature = self._config.rollout_section.val_temperature if validates else None
        return SamplingParameters(
            temperature=generation.temperature if val_temperature is None else val_temperature,
            top_p=generation.validation_top_p if validates else generation.top_p,
            top_k=(generation.validation_top_k if validates else generation.top_k) or 0,
            min_p=generation.min_p,
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=self._stop_token_ids,
            stop_strings=self._stop_strings,
            bad_token_ids=self._bad_token_ids,
        )

    def prompt_groups(self, step: int, purpose: Purpose, groups: Sequence[int]) -> tuple[PromptGroup, ...]:
        """Return these groups of `step`. Each sample's seed depends on the step, the group and its place there.

        Raise `PlaceUnknown` for a group whose problem depends on a step that still draws.
        """
        return tuple(self._drawn(step, purpose, group).prompt_group for group in groups)

    def _drawn(self, step: int, purpose: Purpose, group: int) -> _Drawn:
        """Return the problem of a group of `step` and its prompt group. They are kept until the step has its batch."""
        # Every validation draws the same, so that two of them differ only by the weights.
        key = (step if purpose == "train" else 0), purpose, group
        place = group
        if purpose == "train":
            size = self._config.rollout_section.num_prompts_per_step
            place = (step - 1) * size + group if self.places is None else self.places.of(step, group)
        levels = self.curriculum.levels.of(step) if self.curriculum is not None and purpose == "train" else None
        drawn = self._groups.get(key)
        # After a restart, earlier steps may draw more than before, or come to other levels.
        if drawn is not None and (drawn.place, drawn.levels) == (place, levels):
            return drawn
        step = key[0]
        section = self._config.rollout_section
        if purpose == "validate":
            encoded, num_samples = self._validation[group], section.num_val_generations_per_prompt
            seed = section.seed if section.val_seed is None else section.val_seed
        else:
            encoded = self._train.get_item(place)
            if self.curriculum is not None:
                encoded = self.curriculum.draw(step, encoded)
            num_samples, seed = section.num_generations_per_prompt, section.seed
        prompt_group = PromptGroup(
            group=group,
            problem=encoded.problem,
            prompt_ids=encoded.prompt_ids,
            seeds=tuple(data_sets.sample_seed(seed, step, purpose, group, place) for place in range(num_samples)),
            environment=encoded.environment if self._has_several else "",
            media=encoded.media,
            tools_field=encoded.tools_field,
        )
        self._groups[key] = _Drawn(encoded, prompt_group, place, levels)
        return self._groups[key]

    def batch(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord] = ()
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Return the training batch of `step` and the metrics of its samples."""
        assert purpose == "train", "it validates by generating"
        drawn = {r.scored.group: self._drawn(step, "train", r.scored.group).problem for r in records}
        if self.places is not None:
            self.places.finish(step, len(drawn))
        # Groups of this step may be asked for again, if samples have been lost.
        self._groups = {key: each for key, each in self._groups.items() if key[1] == "validate" or key[0] >= step}
        prompts = {group: (encoded.prompt_ids, encoded.media) for group, encoded in drawn.items()}
        batch, metrics = training_batch(
            self._config, step, records, prompts, lambda group: drawn[group].problem.problem_id
        )
        if self._config.has_routed_teachers:
            batch = _add_teachers(self._config, batch, drawn)
        if self._has_origins:
            samples = [record.scored for record in records]
            metrics |= metrics_by_origin("train", samples, drawn, by_environment=self._has_several)
        if self.curriculum is not None:
            metrics |= self.curriculum.levels.finish(step, metrics)
        return batch, metrics

    def batch_of_groups(self, step: int, records: Sequence[SampleRecord]) -> SampleBatch:
        """Return the batch of some whole groups of a step that is not over, as `batch` has them.

        That is, where the advantages of a group need no other group.
        """
        drawn = {r.scored.group: self._drawn(step, "train", r.scored.group).problem for r in records}
        prompts = {group: (encoded.prompt_ids, encoded.media) for group, encoded in drawn.items()}
        return training_batch(self._config, step, records, prompts)[0]

    def describe(self, samples: Sequence[SampleScored]) -> list[str]:
        """Describe validation samples by prompt, response and reward."""
        return describe_validation(self._validation, samples)

    def validation_metrics(self, samples: Sequence[SampleScored]) -> dict[str, float]:
        """Return the metrics of a validation's samples."""
        if self._config.evaluates and samples:
            self.validated = samples
        return validation_metrics(self._config, self._validation, samples)


def _find_bad_token_ids(config: Config, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of tokens that no response may contain."""
    try:
        words = [tokenizer.spellings(word) for word in config.policy.generation.bad_words or ()]
    except DataError as error:
        raise ConfigError(f"policy.generation.bad_words: {error}") from None
    return tuple(dict.fromkeys(sequence for sequences in words for sequence in sequences))


def _add_teachers(config: Config, batch: SampleBatch, drawn: Mapping[int, data_sets.EncodedProblem]) -> SampleBatch:
    """Return the batch with the teacher of each sequence; `drawn` are the problems by rollout group."""
    numbers = {group: _find_teacher(config, each.environment, each.set_name) for group, each in drawn.items()}
    teacher_S = np.array([numbers[group] for group in batch.group_S.tolist()], dtype=np.int32)
    return batch.replace(**{f"{TEACHER}_S": teacher_S})


def _find_teacher(config: Config, environment: str, set_name: str) -> int:
    """Return the index of the teacher for an environment and a data set. Raises `ConfigError` if there is none."""
    names = list(filter(None, (environment, set_name or config.data.dataset_name)))
    number = config.teacher_of(*names)
    if number is None:
        raise ConfigError(
            f"on_policy_distillation.teacher_model_by_agent_name: no teacher for {' or '.join(map(repr, names))}, "
            "and no default"
        )
    return number
