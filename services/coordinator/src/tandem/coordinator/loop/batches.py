"""The commands about a step's batch: trainers get its table, and rollouts record its samples; pure.

Ranks fetch the tokens of generated samples from the rollouts, so nothing here grows with tokens. Of a data set, each
rank is sent the tokens of its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from tandem.common.messages import (
    EngineBuilt,
    Evaluate,
    Listener,
    Purpose,
    RecordedGroup,
    RecordSamples,
    SamplesMissing,
    Train,
    TrainerBuilt,
)
from tandem.config import Config
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.scheduler.events import DispatchBatch, DispatchRecord, SampleRecord
from tandem.samples.assignment import Assignment, data_parallel_ranks
from tandem.samples.batch import IMAGES, TABLE, TOKENS, Batch, is_of_table

Place = tuple[str, int, int, int]
"""Place of a sample: its engine, its request, its group, and its index there."""


class Batches:
    """The commands that send a step's batch to the trainers, made once for all of them."""

    def __init__(self, config: Config, algorithm: RunningAlgorithm, sources: Mapping[str, Listener] = {}) -> None:
        """Take the configuration, the algorithm, and the addresses of samples outside rollouts, by source name."""
        self._ranks = data_parallel_ranks(config)
        """Data-parallel rank of each trainer that holds the policy, by its index."""
        self._config = config
        self._algorithm = algorithm
        self._shares_prompts = False
        self._listeners = dict(sources)
        """Address of each rollout's samples."""
        self._made: tuple[int, str] | None = None
        """The step and purpose of the fields below."""
        self._sources: dict[str, Listener] = {}
        self._table: dict[str, NDArray[Any]] = {}
        self._tokens: list[dict[str, NDArray[Any]]] = []
        """Tokens for each data-parallel rank."""
        self._notes: tuple[str, ...] = ()

    def take_reply(self, process: str, reply: EngineBuilt | TrainerBuilt | SamplesMissing) -> None:
        """Take from a reply what matters here."""
        match reply:
            case EngineBuilt(samples_at=listener):
                self._listeners[process] = listener
            case TrainerBuilt(shares_prompts=shares_prompts) if _index_of(process) < len(self._ranks):
                self._shares_prompts = shares_prompts
            case SamplesMissing():
                self._made = None  # other samples will come in the place of some
            case TrainerBuilt():  # it does not hold the policy
                pass

    def command(
        self, action: DispatchBatch, records: Callable[[], Sequence[SampleRecord]]
    ) -> tuple[Train | Evaluate, dict[str, NDArray[Any]], dict[str, float]]:
        """Return the command for one trainer, its arrays, and the metrics of the samples in the batch.

        `records` returns those samples, in order, or none for an algorithm over a data set. It is called once a batch.
        """
        metrics: dict[str, float] = {}
        if self._made != (action.step, action.purpose):
            metrics = self._make(action, records())
        common: Mapping[str, Any] = {
            "command_id": action.command_id,
            "deadline_s": action.deadline_s,
            "step": action.step,
            "sources": self._sources,
        }
        arrays = self._table
        if self._tokens:
            index = _index_of(action.process)
            # A trainer without the policy has no shard of the batch: the trainers of the policy send its model tokens.
            none = {name: array[:0] for name, array in self._tokens[0].items()}
            arrays = arrays | (self._tokens[self._ranks[index]] if index < len(self._ranks) else none)
        if action.purpose == "train":
            return Train(**common), arrays, metrics
        return Evaluate(**common, parts=self._algorithm.validation_parts), arrays, metrics

    def take_notes(self) -> tuple[str, ...]:
        """Return the notes on the last batch, once."""
        notes, self._notes = self._notes, ()
        return notes

    def advantages(self) -> dict[Place, float]:
        """Return the advantages of the samples in the last batch."""
        rollouts, table = sorted(self._sources), self._table
        names = "source_S", "command_S", "group_S", "sample_S", "advantages_S"
        source_S, *place_S, advantages_S = (table[name].tolist() for name in names)
        return dict(zip(zip(map(rollouts.__getitem__, source_S), *place_S, strict=True), advantages_S, strict=True))

    def _make(self, action: DispatchBatch, records: Sequence[SampleRecord]) -> dict[str, float]:
        batch, metrics = self._algorithm.batch(action.step, action.purpose, records)
        parts = [*self._algorithm.validation_parts.values()] if action.purpose == "validate" else []
        batch = Assignment.of(self._config, shares_prompts=self._shares_prompts).assign(batch, parts)
        self._made = action.step, action.purpose
        self._sources = {rollout: self._listeners[rollout] for rollout in batch.sources}
        self._table = {name: array for name, array in batch.columns.items() if is_of_table(name)}
        self._notes = batch.notes
        self._tokens = shards_of(batch, self._config.data_parallel_size) if "token_ids_T" in batch.columns else []
        return metrics


class RecordCommands:
    """The samples that steps were trained on and validated on, until they are recorded."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, Purpose], dict[str, tuple[RecordedGroup, ...]]] = {}
        """Groups by step and purpose, and by engine."""

    def keep(
        self,
        step: int,
        purpose: Purpose,
        records: Sequence[SampleRecord],
        advantages: Mapping[Place, float] = {},
    ) -> None:
        """Keep the samples of a step, with the advantages of those in its batch; or its validation samples."""
        of_step = self._groups[step, purpose] = {}
        found: dict[str, dict[tuple[int, int], list[float | None]]] = {}
        for record in records:
            scored = record.scored
            of_group = found.setdefault(record.rollout, {}).setdefault((record.command_id, scored.group), [])
            of_group.append(advantages.get((record.rollout, record.command_id, scored.group, scored.sample)))
        for rollout, groups in found.items():
            of_step[rollout] = tuple(
                RecordedGroup(command_id=command_id, group=group, advantages=tuple(of_group))
                for (command_id, group), of_group in groups.items()
            )

    def command(self, action: DispatchRecord) -> RecordSamples:
        """Return the request for a step's samples of one engine."""
        return RecordSamples(
            command_id=action.command_id,
            deadline_s=action.deadline_s,
            step=action.step,
            rollout=action.rollout,
            purpose=action.purpose,
            groups=self._groups[action.step, action.purpose][action.rollout],
        )

    def forget(self, step: int, purpose: Purpose) -> None:
        """Forget a step that is recorded."""
        self._groups.pop((step, purpose), None)


def shards_of(batch: Batch, num_ranks: int) -> list[dict[str, NDArray[Any]]]:
    """Return what each data-parallel rank is sent beside the table of a batch: the tokens of its own sequences."""
    names = (*TOKENS, *(name for name in IMAGES if name in batch.columns))
    shards = [batch.only(names).take(batch.rows_of(rank)).columns for rank in range(num_ranks)]
    return [{name: array for name, array in shard.items() if name not in TABLE} for shard in shards]


def _index_of(trainer: str) -> int:
    return int(trainer.rpartition("-")[2])
