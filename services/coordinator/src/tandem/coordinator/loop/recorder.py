"""The recorder of a run: journal, checkpoints, rollout log. It tells observers what was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem.common.messages import Purpose, RecordedGroup, RecordSamples, SampleScored
from tandem.common.texts import shorten
from tandem.config import Config, config_to_json, fingerprint
from tandem.coordinator.loop.metrics import RefitMetrics, StepMetrics
from tandem.coordinator.observers.observer import ObserverGroup
from tandem.coordinator.preparing.resuming import refuse_other_weights
from tandem.coordinator.scheduler.events import (
    CommitStep,
    DiscardSamples,
    DispatchRecord,
    DropRestored,
    RecordRefit,
    SampleRecord,
    StepRecorded,
)
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.batch import SampleBatch
from tandem.samples.sample_files import SampleFolder


class ResultRecorder:
    """The destination of the loop's results."""

    def __init__(
        self,
        config: Config,
        journal: Journal,
        checkpoints: CheckpointFolder,
        samples: SampleFolder,
        observers: ObserverGroup,
    ) -> None:
        self.observers = observers
        self._samples = samples
        self._config = config
        self.journal = journal
        self._checkpoints = checkpoints
        self._known = next(reversed(journal.refits()), None)
        """The refit to the version that a resumed run begins with, from when it was trained."""
        self._has_noted_unranked = False
        """Whether a checkpoint without the metric that ranks it has been reported."""
        self._num_failures = 0
        """Number of failures of environments, over all samples."""
        self._to_log: dict[tuple[int, Purpose], dict[str, tuple[RecordedGroup, ...]]] = {}
        """Groups of steps and of their validations that are not in the rollout log yet, by rollout."""

    def examples(self, step: int, validated: Sequence[SampleScored]) -> list[SampleScored]:
        """Return the validation samples to show: each time those after the ones shown before."""
        count = min(self._config.logger.num_val_samples_to_print, len(validated))
        if not count:
            return []
        period = self._config.rollout_section.val_period
        first = (-(-step // period) if period else 0) * count  # the first and the last validation may be off it
        return [validated[(first + index) % len(validated)] for index in range(count)]

    def note_failures(self, samples: Sequence[SampleScored]) -> None:
        """Report the first sample that its environment failed on, the tenth, the hundredth, and so on."""
        for sample in samples:
            if sample.failure:
                self.observers.sample_failed()
                self._num_failures += 1
                if str(self._num_failures).strip("0") == "1":  # a power of ten
                    self.note(failure_note(sample, self._num_failures))

    def record_discarded(self, action: DiscardSamples) -> None:
        """Write to the journal that groups are generated again."""
        self.observers.discarded(len(action.groups))
        groups = ", ".join(map(str, action.groups))
        self.journal.record_event("coordinator", f"step {action.step} ({action.purpose}): groups {groups} again")

    def note(self, text: str) -> None:
        """Show a line, and keep it in the journal; a process's own text may be anything."""
        text = shorten(text)
        self.journal.record_event("coordinator", text)
        self.observers.noted(text)

    def keep_samples(
        self, step: int, purpose: Purpose, records: Sequence[SampleRecord], batch: SampleBatch | None = None
    ) -> None:
        """Keep the samples of a step until they are logged, with the advantages of those in its batch."""
        advantages: dict[tuple[str, int, int, int], float] = {}
        if batch is not None:
            names = "source_S", "command_S", "group_S", "sample_S", "advantages_S"
            source_S, *place_S, advantages_S = (batch.columns[name].tolist() for name in names)
            rollout_S = map(batch.sources.__getitem__, source_S)
            advantages = dict(zip(zip(rollout_S, *place_S, strict=True), advantages_S, strict=True))
        by_rollout: dict[str, dict[tuple[int, int], list[float | None]]] = {}
        for record in records:
            scored = record.scored
            of_group = by_rollout.setdefault(record.rollout, {}).setdefault((record.command_id, scored.group), [])
            of_group.append(advantages.get((record.rollout, record.command_id, scored.group, scored.sample)))
        of_step = self._to_log[step, purpose] = {}
        for rollout, groups in by_rollout.items():
            of_step[rollout] = tuple(
                RecordedGroup(command_id=command_id, group=group, advantages=tuple(of_group))
                for (command_id, group), of_group in groups.items()
            )

    def record_command(self, action: DispatchRecord) -> RecordSamples:
        """Return the request to log a step's samples of one rollout."""
        return RecordSamples(
            command_id=action.command_id,
            deadline_s=action.deadline_s,
            step=action.step,
            rollout=action.rollout,
            purpose=action.purpose,
            groups=self._to_log[action.step, action.purpose][action.rollout],
        )

    def take_recorded(self, action: StepRecorded) -> None:
        """Forget a step's samples that are logged, and keep the rollout log within its limits."""
        self._to_log.pop((action.step, action.purpose), None)
        self._samples.take_recorded(action.step, action.rollouts, action.num_bytes, action.purpose)

    def drop_restored(self, action: DropRestored) -> None:
        """Note that restored groups are generated again after all."""
        self._samples.drop_from(action.version)
        self.note(
            f"{action.num_groups} restored groups are generated again: a group of step {action.version} "
            "is, so that its weights may differ"
        )

    def publish_checkpoint(self, step: int) -> None:
        """Give a step's written checkpoint its final name.

        It is ranked by the step's own metric. The first without one is reported, since it is among the first to be
        deleted.
        """
        settings = self._config.checkpointing
        name = settings.metric_name
        metric = self.journal.step(step).metrics.get(name)
        if metric is not None and not math.isfinite(metric):
            metric = None
        if metric is None and settings.keep_top_k is not None and not self._has_noted_unranked:
            self._has_noted_unranked = True
            self.note(
                f"the checkpoint of step {step} has no {name} (checkpointing.metric_name): such checkpoints rank below "
                f"all others, and only {settings.keep_top_k} (keep_top_k) and the newest are kept"
            )
        record = CheckpointRecord(
            step=step,
            version=step,
            metric_name=name,
            metric=metric,
            config_json=config_to_json(self._config).decode(),
        )
        with self.journal.reserve.lend_descriptors():
            folder = self._checkpoints.publish(record, fingerprint(self._config))
        self.journal.record_checkpoint(step, str(folder))

    def commit(self, action: CommitStep, step_metrics: StepMetrics) -> None:
        """Write a step to the journal: then it is done, and observers are told."""
        seconds = step_metrics.breakdown(action.seconds)
        record = StepRecord(
            step=action.step,
            version=action.version,
            metrics=dict(step_metrics.metrics),
            seconds=seconds,
        )
        self.observers.committed(self.journal.commit_step(record))

    def record_refit(self, action: RecordRefit, refit_metrics: RefitMetrics) -> None:
        """Write to the journal that a version has reached engines, and is verified.

        Raise `DamagedCheckpoint` if its weights differ from those before the run was resumed.
        """
        verify = self._config.refit.verify
        if self._known is not None and self._known.version == action.version:
            refuse_other_weights(self._known, self._checkpoints, action.digest, verify)
        for engine, reason in action.quarantined.items():
            self.note(f"{engine} was quarantined and refitted to version {action.version}: {reason}")
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
        self.journal.record_refit(record)
        self.observers.refitted(record)


def failure_note(sample: SampleScored, count: int) -> str:
    """Describe a sample that the environment failed on, and how many there are so far."""
    became = "is dropped" if sample.dropped else "is worth nothing"
    which = "the first" if count == 1 else f"number {count}"
    return f"{sample.failure}; the sample {became}, {which} so far; all are in the rollout's log"
