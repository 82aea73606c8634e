"""What passes between trainers that hold different models: tokens there, and what is said of them back.

Where some models have processes of their own (`tandem.common.worlds`), one group spans all trainers of the run. Each
does first what it can by itself, so that all models score at the same time, and then all call the same methods of
`BatchExchange` in the same order. They wait there for each other, at most for the group's time-out. Numbers travel as
they are, from the one process that speaks for its replica to all others, each of which keeps what it needs.

Shapes: ``S`` sequences of the whole batch; ``T`` tokens of what a process works on.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from tandem.common.assignment import NO_RANK, data_parallel_ranks, scoring_trainers
from tandem.common.batch import Batch
from tandem.common.columns import Column, Model
from tandem.common.config import Config
from tandem.common.worlds import World, world_at, worlds_of
from tandem.trainer.backend import Backend
from tandem.trainer.portions import Portion, batch_of, divided, tokens_of


def meet(config: Config, index: int, store: Store, address: str, timeout_s: float) -> Exchange | None:
    """Make torch's default process group of the trainers that hold the same models, and connect it with the others.

    Args:
        config: of the run.
        index: of this trainer.
        store: the same for all trainers.
        address: of the network interface that others reach this process at.
        timeout_s: of collective operations in the default group.

    Returns the end of what connects groups; None where all trainers hold the same models. Collective.

    """
    world, deadlines = world_at(config, index), config.cluster.deadlines
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=PrefixStore(world.name, store),
        rank=index - world.first,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )
    if world.size == config.num_trainers:
        return None
    return Exchange(config, index, store, address, max(deadlines.train_s, deadlines.evaluate_s))


class Exchange:
    """A trainer's end of the group that spans all of them."""

    def __init__(self, config: Config, index: int, store: Store, address: str, timeout_s: float) -> None:
        """Connect all trainers, over the network interface that has `address`. Collective."""
        self._config = config
        self.index = index
        self.worlds = worlds_of(config)
        self.world = world_at(config, index)
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
        """Return what the trainer of this index has in the place of `values`, which are as large everywhere."""
        array = values.copy() if index == self.index else np.empty_like(values)
        if array.nbytes:
            self._group.broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), index).wait()
        return array

    def close(self) -> None:
        """Leave the group; who waits for this process fails."""
        self._group = None


class Division(NamedTuple):
    """How the replicas of a world divide a batch, which every trainer knows, and who speaks for each of them."""

    table: Batch
    speakers: list[int]


class BatchExchange:
    """The same for one batch."""

    def __init__(self, exchange: Exchange, table: Batch, config: Config) -> None:
        """`table` says how the policy's replicas divide the batch."""
        self._exchange, self._config, self._table = exchange, config, table
        self._divisions = {world.name: self._division(world) for world in exchange.worlds}

    @property
    def elsewhere(self) -> list[World]:
        """The worlds that do not hold the policy, in the order in which all trainers speak of them."""
        return [world for world in self._exchange.worlds if not world.has_policy]

    def portion(self, backend: Backend, batch: Batch) -> Portion | None:
        """Return what the model of this process works on; None with the policy, whose share is `batch`. Collective."""
        world = self._exchange.world
        table = self._divisions[world.name].table
        replicas = None if world.has_policy else backend.replicas(world.name)
        own = table.rows_of(NO_RANK if replicas is None else replicas.rank)
        wanted = tokens_of(table, own)
        token_ids_T, loss_mask_T = (
            self._moved("policy", values_T, wanted) for values_T in (batch.token_ids_T, batch.loss_mask_T)
        )
        return None if replicas is None else Portion(replicas, table, batch_of(table, own, token_ids_T, loss_mask_T))

    def columns(
        self, source: Model, target: Model, names: list[Column], columns: Mapping[Column, NDArray[Any]], own: Portion
    ) -> dict[Column, NDArray[Any]]:
        """Bring columns of tokens from one world to another; return them there, and nothing elsewhere. Collective.

        `own` is what this process works on, and has the columns of if it is of the source's world.
        """
        is_target = self._exchange.world.name == target
        wanted = own.token_of_T if is_target else np.zeros(0, dtype=np.int64)
        found = {}
        for column in names:
            rows = () if column.num_each is None else (column.num_each(self._config),)
            nothing = np.zeros((0, *rows), dtype=column.dtype)
            values_T = columns[column].astype(column.dtype) if self._exchange.world.name == source else nothing
            found[column] = self._moved(source, values_T, wanted)
        return found if is_target else {}

    def _moved(self, source: Model, values_T: NDArray[Any], wanted: NDArray[np.int64]) -> NDArray[Any]:
        """Return numbers of the wanted tokens of the batch, from those that the speakers of a world have of theirs."""
        division = self._divisions[source]
        found = np.zeros((len(wanted), *values_T.shape[1:]), dtype=values_T.dtype)
        place_of_T = np.full(int(self._table.lengths_S.sum(dtype=np.int64)), -1)
        for rank, speaker in enumerate(division.speakers):
            tokens = tokens_of(division.table, division.table.rows_of(rank))
            is_own = speaker == self._exchange.index
            nothing = np.empty((len(tokens), *values_T.shape[1:]), dtype=values_T.dtype)
            said = self._exchange.tell(values_T if is_own else nothing, speaker)
            place_of_T[:] = -1
            place_of_T[tokens] = np.arange(len(tokens))
            places = place_of_T[wanted]
            found[places >= 0] = said[places[places >= 0]]
        return found

    def _division(self, world: World) -> Division:
        config = self._config
        speakers = [world.first + place for place in scoring_trainers(config, world.name)]
        if world.has_policy:
            return Division(self._table, speakers)
        num_ranks, num_of_policy = (len({*data_parallel_ranks(config, name)}) for name in (world.name, "policy"))
        # Where there are as many, they have what the policy's have, as replicas in the policy's processes would.
        is_same = num_ranks == num_of_policy
        return Division(self._table if is_same else divided(self._table, world.name, num_ranks, config), speakers)
