"""A step's batch, made once, and the commands that give each trainer its table; pure.

Ranks fetch the tokens of generated samples from the rollouts, so nothing here grows with tokens. Of a data set, each
rank is sent the tokens of its own shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tandem.common.messages import EngineBuilt, Evaluate, Listener, Train, TrainerBuilt
from tandem.config import Config
from tandem.coordinator.algorithms.running import RunningAlgorithm
from tandem.coordinator.scheduler.events import DispatchBatch, SampleRecord
from tandem.samples.batch import MEDIA, TABLE, TOKENS, SampleBatch, is_of_table
from tandem.samples.batch_sharding import BatchSharding, data_parallel_ranks


class MadeBatch(NamedTuple):
    """A step's batch, and what is sent of it."""

    batch: SampleBatch
    """Its sequences, each with the data-parallel rank that trains on it."""
    metrics: dict[str, float]
    """Metrics of its samples."""
    commands: list[tuple[str, Train | Evaluate, dict[str, NDArray[Any]]]]
    """The command of each trainer, with its arrays."""


class StepBatches:
    """The batches of a run's steps, as trainers get them."""

    def __init__(self, config: Config, algorithm: RunningAlgorithm, sources: Mapping[str, Listener] = {}) -> None:
        """Take the configuration, the algorithm, and the addresses of samples outside rollouts, by source name."""
        self._ranks = data_parallel_ranks(config)
        """Data-parallel rank of each trainer that holds the policy, by its index."""
        self._config = config
        self._algorithm = algorithm
        self._sharding = BatchSharding.of(config, shares_prompts=False)
        self._listeners = dict(sources)
        """Address of each rollout's samples."""

    def take_reply(self, process: str, reply: EngineBuilt | TrainerBuilt) -> None:
        """Take from a reply what matters here."""
        match reply:
            case EngineBuilt(samples_at=listener):
                self._listeners[process] = listener
            case TrainerBuilt(shares_prompts=shares_prompts) if _index_of(process) < len(self._ranks):
                self._sharding = BatchSharding.of(self._config, shares_prompts=shares_prompts)
            case TrainerBuilt():  # it does not hold the policy
                pass

    def make(self, action: DispatchBatch, records: Sequence[SampleRecord]) -> MadeBatch:
        """Make the batch of a step, and each trainer's command.

        `records` are the samples in it, in order; none for an algorithm over a data set.
        """
        batch, metrics = self._algorithm.batch(action.step, action.purpose, records)
        parts = self._algorithm.validation_parts if action.purpose == "validate" else {}
        batch = self._sharding.shard(batch, [*parts.values()])
        sources = {rollout: self._listeners[rollout] for rollout in batch.sources}
        table = {name: array for name, array in batch.columns.items() if is_of_table(name)}
        tokens = shards_of(batch, self._config.data_parallel_size) if "token_ids_T" in batch.columns else []
        commands: list[tuple[str, Train | Evaluate, dict[str, NDArray[Any]]]] = []
        for trainer, fields in action.commands.items():
            command: Train | Evaluate
            if action.purpose == "train":
                command = Train(**fields, step=action.step, sources=sources)
            else:
                command = Evaluate(**fields, step=action.step, sources=sources, parts=parts)
            token_columns: dict[str, NDArray[Any]] = {}
            if tokens and (index := _index_of(trainer)) < len(self._ranks):
                token_columns = tokens[self._ranks[index]]
            elif tokens:  # it has no shard without the policy: the trainers of the policy send its model tokens
                token_columns = {name: array[:0] for name, array in tokens[0].items()}
            commands.append((trainer, command, table | token_columns))
        return MadeBatch(batch, metrics, commands)


def shards_of(batch: SampleBatch, num_ranks: int) -> list[dict[str, NDArray[Any]]]:
    """Return what each data-parallel rank is sent beside the table of a batch: the tokens of its own sequences."""
    names = (*TOKENS, *(name for name in MEDIA if name in batch.columns))
    shards = [batch.only(names).take(batch.rows_of(rank)).columns for rank in range(num_ranks)]
    return [{name: array for name, array in shard.items() if name not in TABLE} for shard in shards]


def _index_of(trainer: str) -> int:
    return int(trainer.rpartition("-")[2])
