"""The exchange between models that divide the ranks differently: tokens, and their scores.

A step has a `BatchExchange` only where models do. Where all share one division, nothing here is called.

Sequences come to the ranks as the policy divides them. A model with other parallel sizes has other replicas. The tokens
of its sequences come from the ranks that have them, and its scores go back. Each transfer is a sum over the replicas,
where one has the values and the others zeros. It is exact, and takes eight bytes for each number.

If some models have processes of their own (`tandem.config.placement`), one group spans all trainers of the run. Each
first does what it can by itself, so that all models score at the same time. Then all call the same methods of
`BatchExchange` in the same order, and wait there for each other, at most for the group's time-out. Numbers are sent
unchanged, from the one process that speaks for its replica to all others. Each of these keeps what it needs.

Shapes: ``S`` sequences of the whole batch; ``T`` tokens of a process's shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from tandem.config import Config
from tandem.config.placement import ModelGroup, find_model_group, list_model_groups
from tandem.config.schema.columns import SCORING_SECONDS, ColumnDeclaration, Model
from tandem.samples.batch import SampleBatch
from tandem.samples.batch_sharding import NO_RANK, BatchSharding, data_parallel_ranks, scoring_trainers
from tandem.trainer.backend import ModelReplicas, TrainerBackend
from tandem.trainer.batching.shard import BatchShard, RankBatch
from tandem.trainer.micro_batches import Columns
from tandem.trainer.rank_time import timed
from tandem.trainer.scorers.columns import Filled


def meet(config: Config, index: int, store: Store, address: str, timeout_s: float) -> RankExchange | None:
    """Create torch's default process group for the trainers of the same models, and connect all trainers.

    Args:
        config: configuration of the run.
        index: index of this trainer.
        store: a store that all trainers share.
        address: address of the network interface at which others reach this process.
        timeout_s: time-out of collective operations in the default group.

    Returns this trainer's end of the group of all trainers; None if all hold the same models. Collective.

    """
    model_group, deadlines = find_model_group(config, index), config.cluster.deadlines
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(model_group.name, store),
        rank=index - model_group.first,
        world_size=model_group.size,
        timeout=timedelta(seconds=timeout_s),
    )
    if model_group.size == config.num_trainers:
        return None
    return RankExchange(config, index, store, address, max(deadlines.train_s, deadlines.evaluate_s))


class RankExchange:
    """A trainer's end of the group that spans all of them."""

    def __init__(self, config: Config, index: int, store: Store, address: str, timeout_s: float) -> None:
        """Connect all trainers, over the network interface that has `address`. Collective."""
        self._config = config
        self.index = index
        self.model_groups = list_model_groups(config)
        self.model_group = find_model_group(config, index)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
        options._timeout = timedelta(seconds=timeout_s)
        prefixed = PrefixStore("exchange", store)
        self._group: Any = ProcessGroupGloo(prefixed, index, config.num_trainers, options)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Add a tensor over all trainers."""
        self._group.allreduce([values]).wait()
        return values

    def tell(self, values: NDArray[Any], index: int) -> NDArray[Any]:
        """Return the values of the trainer with this index. `values` are as large on every trainer."""
        array = values.copy() if index == self.index else np.empty_like(values)
        if array.nbytes:
            self._group.broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), index).wait()
        return array

    def close(self) -> None:
        """Leave the group. Processes that wait for this one then fail."""
        self._group = None


class BatchDivision(NamedTuple):
    """The division of a batch among the replicas of a model group, known to every trainer, and the speaker of each."""

    table: SampleBatch
    speakers: list[int]


class BatchExchange:
    """The exchange for one batch: between the policy's division of it and those of other models."""

    def __init__(
        self, exchange: RankExchange | None, backend: TrainerBackend, table: SampleBatch, config: Config
    ) -> None:
        """Take what is to be connected; `table` has the policy's division of the batch.

        `exchange` is None if all trainers hold the same models, some of which divide these ranks differently.
        """
        self._exchange, self._backend, self._config, self._table = exchange, backend, config, table
        model_groups = () if exchange is None else exchange.model_groups
        self._divisions = {model_group.name: self._division(model_group) for model_group in model_groups}
        self._elsewhere: list[Model] = [model_group.name for model_group in model_groups if not model_group.has_policy]
        """The model groups that do not hold the policy, by name, in the order in which all trainers exchange them."""

    def divided(self, samples: SampleBatch) -> dict[Model, tuple[SampleBatch, SampleBatch]]:
        """Return for each model held here, the policy first, a table of the batch and its sequences here. Collective.

        The policy's own sequences are `samples`.
        """
        exchange, replicas = self._exchange, self._backend.replicas
        first, *other_models = self._config.holds if exchange is None else exchange.model_group.models
        first_division = (self._table, samples) if exchange is None else self._shared(exchange, samples)
        by_sizes = {replicas(first).sizes: first_division}
        for model in other_models:
            if replicas(model).sizes not in by_sizes:
                by_sizes[replicas(model).sizes] = self._divided_again(*first_division, replicas(first), model)
        return {model: by_sizes[replicas(model).sizes] for model in (first, *other_models)}

    def gathered(
        self, batch: RankBatch, columns: Mapping[ColumnDeclaration, NDArray[Any]], seconds: dict[str, float]
    ) -> Filled:
        """Return the columns with models' scores, all for the tokens of this process's first model. Collective.

        `columns` are those of the models here, each for the tokens of its own shard.
        """
        gathered_columns = {}
        for column, values_T in columns.items():
            assert column.model is not None, "nothing else is filled yet"
            with timed(seconds, SCORING_SECONDS[column.model]):
                gathered_columns[column] = moved(values_T, batch.shards[column.model], batch.shard)
        for model in self._elsewhere:
            model_columns = [column for column in batch.read if column.model == model]
            with timed(seconds, SCORING_SECONDS[model]):
                gathered_columns |= self._columns(model, "policy", model_columns, gathered_columns, batch.shard)
        return gathered_columns

    def handed_out(
        self, batch: RankBatch, columns: Mapping[ColumnDeclaration, NDArray[Any]], seconds: dict[str, float]
    ) -> dict[Model, Columns]:
        """Return the loss inputs of each trained model held here, for the tokens of its shard. Collective."""
        config, all_columns = self._config, {**columns}
        trains = config.declaration.trains
        by_model: dict[Model, Columns] = {}
        for model in self._elsewhere:
            if model in trains:
                assert config.largest_logprob_error is None, "a run that leaves sequences out trains the policy alone"
                all_columns |= self._columns(
                    "policy", model, config.columns_of(batch.num_steps, model), all_columns, batch.shard
                )
        for model in trains:
            if model in batch.shards:
                read = config.columns_of(batch.num_steps, model)
                with timed(seconds, f"{model}_training"):
                    by_model[model] = {
                        each: moved(all_columns[each], batch.shard, batch.shards[model]) for each in read
                    }
        return by_model

    def _divided_again(
        self, table: SampleBatch, samples: SampleBatch, replicas: ModelReplicas, model: Model
    ) -> tuple[SampleBatch, SampleBatch]:
        """Return the table and the own sequences of a model that has other replicas on these ranks. Collective.

        These are its first model's: `samples` are the sequences that `table` assigns to this rank's replica.
        """
        model_replicas = self._backend.replicas(model)
        again = divided(table, model, model_replicas.size, self._config)
        rows = again.rows_of(model_replicas.rank)
        tokens = again.tokens_of(rows)
        token_ids_T, loss_mask_T = (
            _everywhere(values_T, table, replicas)[tokens] for values_T in (samples.token_ids_T, samples.loss_mask_T)
        )
        return again, _add_tokens(again, rows, token_ids_T, loss_mask_T)

    def _shared(self, exchange: RankExchange, batch: SampleBatch) -> tuple[SampleBatch, SampleBatch]:
        """Return the table and the sequences of the first model here. Collective.

        The policy's own sequences are `batch`.
        """
        model_group = exchange.model_group
        table = self._divisions[model_group.name].table
        replicas = None if model_group.has_policy else self._backend.replicas(model_group.name)
        rows = table.rows_of(NO_RANK if replicas is None else replicas.rank)
        token_indices = table.tokens_of(rows)
        token_ids_T, loss_mask_T = (
            self._moved("policy", values_T, token_indices) for values_T in (batch.token_ids_T, batch.loss_mask_T)
        )
        return (self._table, batch) if replicas is None else (table, _add_tokens(table, rows, token_ids_T, loss_mask_T))

    def _columns(
        self,
        source: Model,
        target: Model,
        names: Sequence[ColumnDeclaration],
        columns: Mapping[ColumnDeclaration, NDArray[Any]],
        shard: BatchShard,
    ) -> dict[ColumnDeclaration, NDArray[Any]]:
        """Bring columns of tokens from one model group to another. Return them there, and nothing elsewhere.
        Collective.

        `shard` is this process's, which has the columns if the process is in the source's group.
        """
        assert self._exchange is not None, "otherwise no model is elsewhere"
        is_target = self._exchange.model_group.name == target
        token_indices = shard.table.tokens_of(shard.rows) if is_target else np.zeros(0, dtype=np.int64)
        moved_columns = {}
        for column in names:
            rows = () if column.num_each is None else (column.num_each(self._config),)
            nothing = np.zeros((0, *rows), dtype=column.dtype)
            values_T = columns[column].astype(column.dtype) if self._exchange.model_group.name == source else nothing
            moved_columns[column] = self._moved(source, values_T, token_indices)
        return moved_columns if is_target else {}

    def _moved(self, source: Model, values_T: NDArray[Any], token_indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return numbers for the wanted tokens of the batch, from the speakers of a model group."""
        assert self._exchange is not None, "otherwise no model is elsewhere"
        division = self._divisions[source]
        moved_values = np.zeros((len(token_indices), *values_T.shape[1:]), dtype=values_T.dtype)
        place_of_T = np.full(int(self._table.lengths_S.sum(dtype=np.int64)), -1)
        for rank, speaker in enumerate(division.speakers):
            tokens = division.table.tokens_of(division.table.rows_of(rank))
            is_speaker = speaker == self._exchange.index
            nothing = np.empty((len(tokens), *values_T.shape[1:]), dtype=values_T.dtype)
            speaker_values = self._exchange.tell(values_T if is_speaker else nothing, speaker)
            place_of_T[:] = -1
            place_of_T[tokens] = np.arange(len(tokens))
            places = place_of_T[token_indices]
            moved_values[places >= 0] = speaker_values[places[places >= 0]]
        return moved_values

    def _division(self, model_group: ModelGroup) -> BatchDivision:
        config = self._config
        speakers = [model_group.first + place for place in scoring_trainers(config, model_group.name)]
        if model_group.has_policy:
            return BatchDivision(self._table, speakers)
        num_ranks, num_of_policy = (len({*data_parallel_ranks(config, name)}) for name in (model_group.name, "policy"))
        # With as many replicas, each gets the sequences of the policy's replica, as in the policy's own processes.
        is_same = num_ranks == num_of_policy
        return BatchDivision(
            self._table if is_same else divided(self._table, model_group.name, num_ranks, config), speakers
        )


def divided(table: SampleBatch, model: Model, num_ranks: int, config: Config) -> SampleBatch:
    """Return the table of a batch as this many replicas of a model divide it, by the model's section."""
    sharding, settings = BatchSharding.of(config, shares_prompts=False), config.settings_of(model)
    by_tokens = settings.sequence_packing.enabled or settings.dynamic_batching.enabled
    return msgspec.structs.replace(sharding, num_ranks=num_ranks, by_tokens=by_tokens).shard(table)


def moved(values_T: NDArray[Any], source: BatchShard, target: BatchShard) -> NDArray[Any]:
    """Return numbers for one shard's tokens as those of another shard of the same ranks. Collective if they differ."""
    if source.replicas.sizes == target.replicas.sizes:
        return values_T
    everywhere = _everywhere(values_T, source.table, source.replicas)
    return everywhere[target.table.tokens_of(target.rows)].astype(values_T.dtype)


def _everywhere(values_T: NDArray[Any], table: SampleBatch, replicas: ModelReplicas) -> NDArray[np.float64]:
    """Return numbers for all tokens of the batch from those that each rank has for its sequences of the table."""
    rank_values = np.zeros((int(table.lengths_S.sum(dtype=np.int64)), *values_T.shape[1:]))
    rank_values[table.tokens_of(table.rows_of(replicas.rank))] = values_T
    summed: NDArray[np.float64] = replicas.sum(torch.from_numpy(rank_values)).cpu().numpy()
    return summed


def _add_tokens(
    table: SampleBatch, rows: NDArray[np.int64], token_ids_T: NDArray[Any], loss_mask_T: NDArray[Any]
) -> SampleBatch:
    """Return some sequences of a table with their tokens. Other values of tokens come as columns."""
    return table.take(rows).replace(
        token_ids_T=token_ids_T.astype(np.int32),
        loss_mask_T=loss_mask_T.astype(np.bool_),
        generation_logprobs_T=np.zeros(len(token_ids_T), dtype=np.float32),
    )
