"""Training on the recorded samples of an earlier run: its batches, made again from its rollout log.

`RecordedAlgorithm` makes a step's batch as GRPO does, from the recorded rewards and the present configuration. It puts
the tokens into a store of its own, and trainers fetch them from it as from a rollout. A thread reads the next step
meanwhile, so that memory holds two steps: the one that is trained on, and the one after it.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tandem.common.curve import AdmittedKeys
from tandem.common.errors import SamplesError
from tandem.common.messages import Listener, Purpose, SampleScored
from tandem.common.numeric import bound
from tandem.config import Config
from tandem.coordinator.algorithms import rewards, running, step_batch
from tandem.coordinator.scheduler.events import SampleRecord
from tandem.samples import media, recorded_shards, routed_experts, sample_files, sample_store
from tandem.samples.batch import SampleBatch
from tandem.samples.sample_record import RecordedSample
from tandem.samples.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tandem.coordinator.algorithms.left_out import EditedSamples

SOURCE = "record"
"""The trainers' name for the store."""


class RecordedAlgorithm(running.WithoutGeneration):
    """An algorithm over a rollout log, with the interface `tandem.coordinator.algorithms.running.RunningAlgorithm`."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        assert config.replay is not None, "asked only where samples are recorded"
        several = len(config.data.train) > 1 or len(config.environments) > 1
        notice = (
            "replay: there are no metrics of each data set or environment: the record does not say whose a sample is"
        )
        self.notices: tuple[str, ...] = (notice,) if several else ()
        self._config = config
        self._tokenizer = tokenizer
        self._replay = config.replay
        self._steps: RecordedSteps | None = None
        self._store: sample_store.SampleStore | None = None
        self._step = 0
        """The step that the store has samples of."""
        self._records: list[SampleRecord] = []
        """The records of that step."""
        self._prompts: dict[int, Hashable] = {}
        """The prompt tokens of each group of that step."""

    def serve(self, coordinator: str, run_id: str, first_step: int, trainers: AdmittedKeys) -> dict[str, Listener]:
        """Begin to serve samples to these trainers, beside the run's coordinator. Return the addresses, by source."""
        self._steps, self._step = RecordedSteps(self._config), 0
        self._steps.read_ahead(first_step)
        host = str(urlsplit(coordinator).hostname)
        self._store = sample_store.SampleStore(host, run_id, max_tokens=sys.maxsize, trainers=trainers)
        if self._tokenizer.takes_media:
            self._store.give_media(media.answer_requests(self._config, run_id))
        return {SOURCE: self._store.at}

    def close(self) -> None:
        """Stop serving and reading."""
        if self._steps is not None:
            self._steps.close()
        if self._store is not None:
            self._store.close()

    @property
    def validation_parts(self) -> dict[str, int]:
        """Sequences of each named validation set: none, since nothing is validated."""
        return {}

    @property
    def num_steps(self) -> int:
        """The last step."""
        return self._replay.to_step

    def batch(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord] = ()
    ) -> tuple[SampleBatch, dict[str, float]]:
        """Return the training batch of `step` and the metrics of its samples. Raises `SamplesError`."""
        assert purpose == "train", "nothing is validated"
        if step != self._step:
            self._put(step)
        return step_batch.training_batch(self._config, step, self._records, self._prompts)

    def _put(self, step: int) -> None:
        """Let the store serve the samples of `step`, and of no other step."""
        assert self._store is not None, "served before anything is trained on"
        assert self._steps is not None, "likewise"
        self._store.release([self._step])
        samples = self._steps.take(step)
        _refuse_too_few(self._config, step, samples)
        self._records, self._prompts = [], {}
        for sample in samples:
            scored = bound(sample.scored)
            arrays = routed_experts.as_trained_on(
                sample.arrays,
                routed_experts.replayed_experts(self._config),
                keeps_masks=self._config.replays_sampling_masks,
            )
            self._store.put((step, scored.group, scored.sample), arrays)
            self._records.append(SampleRecord(scored, SOURCE, step))
            prompt = sample.arrays.token_ids_T[: scored.prompt_length]
            prompt_media = self._tokenizer.media_of_prompt(sample.arrays, scored.prompt_length)
            self._prompts[scored.group] = prompt.tobytes(), prompt_media
        self._step = step


class RecordedSteps:
    """The samples of one step after another. A thread reads each while the step before is trained on."""

    def __init__(self, config: Config) -> None:
        assert config.replay is not None, "asked only where samples are recorded"
        self._config = config
        self._replay = config.replay
        self._folder = Path(config.replay.run) / sample_files.FOLDER
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._ahead: tuple[int, Future[list[RecordedSample]]] | None = None
        self._edited: EditedSamples | None = None
        """Samples that the replay leaves out; None if all stay."""
        if config.replay.without is not None:
            from tandem.coordinator.algorithms.left_out import EditedSamples

            self._edited = EditedSamples(config.replay.without)

    def take(self, step: int) -> list[RecordedSample]:
        """Return the samples of a step, in order, and begin to read the next one's. Raises `SamplesError`."""
        if self._ahead is None or self._ahead[0] != step:
            self.read_ahead(step)
        assert self._ahead is not None, "it is being read"
        samples = self._ahead[1].result()
        self._ahead = None
        if step < self._replay.to_step:
            self.read_ahead(step + 1)
        return samples

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def read_ahead(self, step: int) -> None:
        """Begin to read the samples of a step."""
        self._ahead = step, self._thread.submit(self._samples_of, step)

    def _samples_of(self, step: int) -> list[RecordedSample]:
        samples = recorded_shards.read_step(self._folder, step, self._replay.run_id)
        keys = [(sample.scored.group, sample.scored.sample) for sample in samples]
        if not is_whole(self._config, keys):
            raise SamplesError(
                f"the samples of step {step} are not in {self._folder} any more: the run keeps as many as its "
                "logger.samples says"
            )
        return samples if self._edited is None else self._edited.apply(step, samples)


def is_whole(config: Config, keys: Sequence[tuple[int, int]]) -> bool:
    """Tell whether samples, given by group and place, form whole groups, and enough of them for a step."""
    grpo = config.rollout_section
    num_samples = grpo.num_generations_per_prompt
    num_groups, remainder = divmod(len(keys), num_samples)
    is_enough = (
        num_groups >= grpo.num_prompts_per_step
        if grpo.use_dynamic_sampling
        else (num_groups == grpo.num_prompts_per_step)
    )
    return is_enough and not remainder and sorted(keys) == [divmod(i, num_samples) for i in range(len(keys))]


def _refuse_too_few(config: Config, step: int, samples: Sequence[RecordedSample]) -> None:
    """Raise `SamplesError` if dynamic sampling finds fewer informative groups than it did with other rewards."""
    grpo = config.rollout_section
    if not grpo.use_dynamic_sampling:
        return
    groups: dict[int, list[SampleScored]] = {}
    for sample in samples:
        groups.setdefault(sample.scored.group, []).append(sample.scored)
    num_informative = sum(rewards.has_spread(grpo, group) for group in groups.values())
    if num_informative < grpo.num_prompts_per_step:
        raise SamplesError(
            f"step {step} needs {grpo.num_prompts_per_step} groups whose rewards differ, and of the {len(groups)} that "
            f"are recorded, {num_informative} do: grpo.adv_estimator and grpo.reward_scaling say which"
        )
