"""The recorder of a run: journal, checkpoints, rollout log, and a step's metrics till it is committed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from tandem.common import messages
from tandem.common.texts import shorten
from tandem.config import Config, config_to_json, fingerprint
from tandem.coordinator.observers.observer import ObserverGroup
from tandem.coordinator.preparing.resuming import refuse_other_weights
from tandem.coordinator.scheduler import events
from tandem.observe.run_folder.checkpoints import CheckpointFolder, CheckpointRecord
from tandem.observe.run_folder.journal import RefitRecord, StepRecord
from tandem.observe.run_folder.journal_writer import Journal
from tandem.samples.batch import SampleBatch
from tandem.samples.sample_files import SampleFolder

Number = TypeVar("Number", int, float)

_OF_OTHERS = {
    "values": "value_inference",
    "value_training": "value_training",
    "teacher_logprobs": "teacher_logprob_inference",
}
"""A trainer's seconds for a value model or a teacher, and their names beside those of NeMo-RL's table."""


class StepMetrics:
    """Metrics and seconds of one step."""

    _num_drafted = _num_accepted = 0
    """Tokens that were drafted, and those of them that were accepted."""

    def __init__(self, *, is_asynchronous: bool = False, without_policy: Collection[str] = ()) -> None:
        """`is_asynchronous`: whether engines generate while trainers train. `without_policy`: trainers without one."""
        self.metrics: dict[str, float] = {}
        self._is_asynchronous = is_asynchronous
        self._without_policy = without_policy
        self._training_seconds: dict[str, float] = {}
        self._rewards_s = 0.0
        self._num_generated_tokens = 0
        self._memory: dict[str, int] = {}
        """Peak bytes of a process of a kind in a phase, named ``training_engine``."""
        self._compute_s: dict[int, float] = {}
        """Seconds of each trainer rank's own work, and below of its waits."""
        self._waited_s: dict[int, float] = {}
        self._queued_s: dict[int, float] = {}
        self._gpus: dict[str, list[float]] = {}
        """GPU readings of processes, named ``gpu_power_w_trainer``."""

    def trained(self, process: str, reply: messages.Trained) -> None:
        """Add a rank's training step; the slowest rank counts."""
        self.metrics.update(reply.metrics)
        if process not in self._without_policy:  # one with another model has other work to do
            rank = int(process.rpartition("-")[2])
            self._compute_s[rank], self._waited_s[rank] = reply.compute_s, reply.waited_s
            self._queued_s[rank] = reply.queued_s
        _keep_maxima(self._training_seconds, reply.seconds)
        self._note_memory("training", "generation", "trainer", reply.memory)
        if reply.gpus:
            self._note_gpus("trainer", reply.gpus)

    def evaluated(self, reply: messages.Evaluated) -> None:
        """Add the loss on validation data."""
        self.metrics.update({f"val_{name}": value for name, value in reply.metrics.items()})

    def generated(self, reply: messages.Generated) -> None:
        """Add an engine's finished prompts; only training samples count in the breakdown."""
        if not reply.num_tokens:  # they come from disk
            return
        self._note_memory("generation", "training", "engine", reply.memory)
        if reply.gpus:
            self._note_gpus("engine", reply.gpus)
        if reply.drafts is not None:
            self._note_drafts(*reply.drafts)
        if reply.purpose == "train":
            self._num_generated_tokens += reply.num_tokens
            self._rewards_s = max(self._rewards_s, reply.seconds.get("rewards", 0.0))

    def refitted(self, process: str, reply: messages.Refitted) -> None:
        """Add the memory that a refit took; `RefitMetrics` keeps the rest."""
        kind = "trainer" if process.startswith("trainer") else "engine"
        _keep_maxima(self._memory, {f"refit_{kind}": reply.memory.peak})

    def _note_memory(self, works: str, waits: str, kind: str, use: messages.MemoryUse) -> None:
        """Add the memory of a process that works in one phase, and in another waits with what it holds."""
        _keep_maxima(self._memory, {f"{works}_{kind}": use.peak, f"{waits}_{kind}": use.held})
        if use.reserved:
            _keep_maxima(self._memory, {f"{works}_{kind}_reserved": use.reserved})

    def _note_drafts(self, num_drafted: int, num_accepted: int) -> None:
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        if self._num_drafted:
            self.metrics["draft_acceptance_rate"] = self._num_accepted / self._num_drafted

    def _note_gpus(self, kind: str, gpus: Mapping[str, float]) -> None:
        for name, value in gpus.items():
            self._gpus.setdefault(f"gpu_{name}_{kind}", []).append(value)

    def breakdown(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Return the step's seconds by the names of NeMo-RL's published table.

        `phases` are the scheduler's wall seconds by phase. ``training`` there is all time between the batch and the new
        weights. Separately computed log-probabilities, and the time of a value model or a teacher, are taken out of it,
        so that the parts add up.
        """
        seconds = dict(phases)
        training = seconds.pop("training", None)
        if training is not None:
            spent = self._training_seconds
            logprobs = spent.get("logprobs", 0.0) + spent.get("reference_logprobs", 0.0)
            seconds["get_logprobs"], policy_s = logprobs, training - logprobs
            for name, phase in _OF_OTHERS.items():
                if name in spent:
                    seconds[phase] = spent[name]
                    policy_s -= spent[name]
            seconds["policy_training"] = policy_s
        if self._num_generated_tokens:
            self.metrics["tokens_per_s"] = self._num_generated_tokens / seconds["total"]
            if seconds.get("generation") and not self._is_asynchronous:  # else it is the trainers' wait for it
                self.metrics["generation_tokens_per_s"] = self._num_generated_tokens / seconds["generation"]
        else:
            self._memory.pop("generation_trainer", None)  # no process waits for generation
        for name, values in self._gpus.items():
            self.metrics[name] = sum(values) / len(values)
        for name, num_bytes in self._memory.items():
            self.metrics[f"memory_{name}_gb"] = num_bytes / 1e9
        self.metrics |= self._of_ranks()
        return seconds

    def _of_ranks(self) -> dict[str, float]:
        """Return the metrics that tell a slow trainer rank from the others, and from a busy machine."""
        slowest = max(self._compute_s, key=self._compute_s.__getitem__, default=0)
        own_s, queued_s = self._compute_s.get(slowest, 0.0), self._queued_s.get(slowest, 0.0)
        busy = {"trainer_queued_per_s": min(1.0, queued_s / own_s)} if queued_s and own_s else {}
        if len(self._compute_s) < 2:
            return busy
        return busy | {
            "slowest_trainer": slowest,
            "trainer_compute_max_s": self._compute_s[slowest],
            "trainer_compute_median_s": statistics.median_low(self._compute_s.values()),  # of two ranks, the faster
            "trainer_compute_min_s": min(self._compute_s.values()),
            "trainer_waited_max_s": max(self._waited_s.values()),
            "trainer_waited_min_s": min(self._waited_s.values()),
        }


class RefitMetrics(msgspec.Struct):
    """Measurements of a refit, until it is recorded."""

    num_bytes: dict[str, int] = {}
    """Bytes on each link, named ``trainer-0>rollout-1``; a stream is counted at both ends, and is one link."""
    seconds: dict[str, float] = {}
    """Seconds of the slowest process, by phase: ``copy`` and ``digest``."""

    def refitted(self, reply: messages.Refitted) -> None:
        """Add a process's finished transfer."""
        self.num_bytes |= reply.num_bytes
        _keep_maxima(self.seconds, {"copy": reply.seconds})

    def verified(self, reply: messages.DigestsReported) -> None:
        """Add a process's computed digests."""
        _keep_maxima(self.seconds, {"digest": reply.seconds})


def _keep_maxima(into: dict[str, Number], values: Mapping[str, Number]) -> None:
    for name, value in values.items():
        into[name] = max(into.get(name, value), value)


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
        self._to_log: dict[tuple[int, messages.Purpose], dict[str, tuple[messages.RecordedGroup, ...]]] = {}
        """Groups of steps and of their validations that are not in the rollout log yet, by rollout."""

    def examples(self, step: int, validated: Sequence[messages.SampleScored]) -> list[messages.SampleScored]:
        """Return the validation samples to show: each time those after the ones shown before."""
        count = min(self._config.logger.num_val_samples_to_print, len(validated))
        if not count:
            return []
        period = self._config.rollout_section.val_period
        first = (-(-step // period) if period else 0) * count  # the first and the last validation may be off it
        return [validated[(first + index) % len(validated)] for index in range(count)]

    def note_failures(self, samples: Sequence[messages.SampleScored]) -> None:
        """Report the first sample that its environment failed on, the tenth, the hundredth, and so on."""
        for sample in samples:
            if sample.failure:
                self.observers.sample_failed()
                self._num_failures += 1
                if str(self._num_failures).strip("0") == "1":  # a power of ten
                    self.note(failure_note(sample, self._num_failures))

    def record_discarded(self, action: events.DiscardSamples) -> None:
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
        self,
        step: int,
        purpose: messages.Purpose,
        records: Sequence[events.SampleRecord],
        batch: SampleBatch | None = None,
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
            recorded: list[messages.RecordedGroup] = []
            for (command_id, number), of_group in groups.items():
                recorded.append(messages.RecordedGroup(command_id=command_id, group=number, advantages=tuple(of_group)))
            of_step[rollout] = tuple(recorded)

    def record_command(self, action: events.DispatchRecord) -> messages.RecordSamples:
        """Return the request to log a step's samples of one rollout."""
        return messages.RecordSamples(
            command_id=action.command_id,
            deadline_s=action.deadline_s,
            step=action.step,
            rollout=action.rollout,
            purpose=action.purpose,
            groups=self._to_log[action.step, action.purpose][action.rollout],
        )

    def take_recorded(self, action: events.StepRecorded) -> None:
        """Forget a step's samples that are logged, and keep the rollout log within its limits."""
        self._to_log.pop((action.step, action.purpose), None)
        self._samples.take_recorded(action.step, action.rollouts, action.num_bytes, action.purpose)

    def drop_restored(self, action: events.DropRestored) -> None:
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
        is_unranked = metric is None and settings.keep_top_k is not None and not self._checkpoints.awaits_metric(step)
        if is_unranked and not self._has_noted_unranked:
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

    def commit(self, action: events.CommitStep, step_metrics: StepMetrics) -> None:
        """Write a step to the journal: then it is done, and observers are told."""
        seconds = step_metrics.breakdown(action.seconds)
        record = StepRecord(
            step=action.step,
            version=action.version,
            metrics=dict(step_metrics.metrics),
            seconds=seconds,
        )
        self.observers.committed(self.journal.commit_step(record))

    def record_refit(self, action: events.RecordRefit, refit_metrics: RefitMetrics) -> None:
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


def failure_note(sample: messages.SampleScored, count: int) -> str:
    """Describe a sample that the environment failed on, and how many there are so far."""
    became = "is dropped" if sample.dropped else "is worth nothing"
    which = "the first" if count == 1 else f"number {count}"
    return f"{sample.failure}; the sample {became}, {which} so far; all are in the rollout's log"
