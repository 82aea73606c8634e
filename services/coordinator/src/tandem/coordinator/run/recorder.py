"""Record a run: journal, checkpoints, metric writers, the live display."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.config import Config, config_to_json, fingerprint
from tandem.common.messages import SampleScored
from tandem.common.telemetry import MetricWriters
from tandem.common.texts import shortened
from tandem.coordinator.run.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.coordinator.run.health import Health
from tandem.coordinator.run.held_out_accuracy import LowStart
from tandem.coordinator.run.journal import Journal, RefitRecord, StepRecord
from tandem.coordinator.run.members import Registry
from tandem.coordinator.run.metrics import RefitMetrics, StepMetrics
from tandem.coordinator.run.onlookers import Onlookers
from tandem.coordinator.run.progress import Progress
from tandem.coordinator.run.resuming import refuse_other_weights
from tandem.coordinator.run.sample_folder import SampleFolder
from tandem.coordinator.scheduler import Scheduler
from tandem.coordinator.scheduler.events import CommitStep, DiscardSamples, DropKept, RecordRefit, StepRecorded


class Recorder:
    """Where the loop's results go."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        checkpoints: CheckpointFolder,
        samples: SampleFolder,
        writers: MetricWriters,
        progress: Progress,
        onlookers: Onlookers,
    ) -> None:
        self.onlookers = onlookers
        self._samples = samples
        self._config = config
        self._journal = journal
        self._checkpoints = checkpoints
        self._writers = writers
        self._progress = progress
        self._num_failures = 0
        """Of environments, in all samples that came."""
        self._health = Health(config)
        self._low_start = LowStart((record.step, record.metrics) for record in journal.steps())

    def examples(self, step: int, validated: Sequence[SampleScored]) -> list[SampleScored]:
        """Return the validation samples to show: each time those after the ones that were shown before."""
        count = min(self._config.logger.num_val_samples_to_print, len(validated))
        if not count:
            return []
        period = self._config.rollout_section.val_period
        first = (-(-step // period) if period else 0) * count  # there may be one more at the end, and one at the start
        return [validated[(first + index) % len(validated)] for index in range(count)]

    def note_failures(self, samples: Sequence[SampleScored]) -> None:
        """Say of the first sample that its environment failed on, of the tenth, the hundredth, and so on."""
        for sample in samples:
            if sample.failure:
                self.onlookers.live.fail()
                self._num_failures += 1
                if str(self._num_failures).strip("0") == "1":  # a power of ten
                    self.note(failure_note(sample, self._num_failures))

    def record_discarded(self, action: DiscardSamples) -> None:
        """Write to the journal that groups are generated again."""
        self.onlookers.live.drop(len(action.groups))
        groups = ", ".join(map(str, action.groups))
        self._journal.record_event("coordinator", f"step {action.step} ({action.purpose}): groups {groups} again")

    def note(self, text: str) -> None:
        """Show a line, and keep it in the journal; what a process said of itself may be anything."""
        text = shortened(text)
        self._journal.record_event("coordinator", text)
        self._progress.note(text)
        self.onlookers.live.note(text)

    def show(self, scheduler: Scheduler, registry: Registry) -> None:
        """Bring the live display up to date, and what others see."""
        self._progress.show(scheduler, registry)
        self.onlookers.show(scheduler, registry)
        for line in self.onlookers.take_news():
            self.note(line)

    def take_recorded(self, action: StepRecorded) -> None:
        """Keep the record of samples as small as it may be."""
        self._samples.take_recorded(action.step, action.rollouts, action.num_bytes, action.purpose)

    def drop_kept(self, action: DropKept) -> None:
        """Note that groups are generated again that were kept from before the run was resumed."""
        self._samples.drop_from(action.version)
        self.note(
            f"{action.num_groups} groups that had been generated are generated again: a group of step {action.version} "
            "is, so that its weights may differ"
        )

    def publish_checkpoint(self, step: int) -> None:
        """Give a written checkpoint of a step that is done its final name.

        It is ranked by the step's own metric, if it was measured.
        """
        name = self._config.checkpointing.metric_name
        record = CheckpointRecord(
            step=step,
            version=step,
            metric_name=name,
            metric=self._journal.step(step).metrics.get(name),
            config_json=config_to_json(self._config).decode(),
        )
        folder = self._checkpoints.publish(record, fingerprint(self._config))
        self._journal.record_checkpoint(step, str(folder))

    def commit(self, action: CommitStep, step_metrics: StepMetrics) -> None:
        """Write a step to the journal: then it is done. Then write its metrics where people look, and what is wrong."""
        seconds = step_metrics.breakdown(action.seconds)
        record = StepRecord(
            step=action.step,
            version=action.version,
            metrics=dict(step_metrics.metrics),
            seconds=seconds,
        )
        record = self._journal.commit_step(record)
        self._writers.write(record.step, record.metrics, record.seconds)
        self._progress.commit(record)
        self.onlookers.commit(record)
        for line in self._health.warnings(record.metrics):
            self.note(line)
        if self._config.declaration.rolls_out and (said := self._low_start.warning(record.step, record.metrics)):
            self.note(said)

    def record_refit(self, action: RecordRefit, refit_metrics: RefitMetrics) -> None:
        """Write to the journal that a version has reached engines, and is attested.

        Raises `DamagedCheckpoint` if it is not what it was before the run was resumed.
        """
        verify = self._config.refit.verify
        refuse_other_weights(self._journal, self._checkpoints, action.version, action.digest, verify)
        for engine, why in action.quarantined.items():
            self.note(f"{engine} was quarantined and refitted to version {action.version}: {why}")
        record = RefitRecord(
            version=action.version,
            engines=action.engines,
            num_bytes=refit_metrics.num_bytes,
            seconds={**action.seconds, **refit_metrics.seconds},
            predicted_s=action.predicted_s,
            bound_s=action.bound_s,
            digest=action.digest,
            verify=verify,
            quarantined=action.quarantined,
        )
        self._journal.record_refit(record)
        self.onlookers.refitted(record)


def failure_note(sample: SampleScored, count: int) -> str:
    """Say that the environment failed on a sample, and on how many so far."""
    became = "is dropped" if sample.dropped else "is worth nothing"
    which = "the first" if count == 1 else f"number {count}"
    return f"{sample.failure}; the sample {became}, {which} so far; all are in the rollout's log"
