"""Megatron-Core's process groups, for each division of the ranks that the models of a process need.

Megatron-Core keeps the groups of one division in variables of its module ``parallel_state``. Layers, schedules and the
reduction of gradients look them up there, and not all of them take groups as arguments. So each division here has
values of its own for all of these variables, and sets them while one of its models is built or runs. Otherwise there
are none, so that to forget a division is Megatron-Core's error, and never a wrong number.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from tandem.config.schema.columns import Model
from tandem.refit.adapters.megatron import Megatron
from tandem.trainer.backend import ModelReplicas
from tandem.trainer.backends.megatron.settings import MegatronSettings


class RankDivision:
    """A division of the default process group's ranks, for models of equal parallel sizes."""

    def __init__(
        self, sizes: Megatron, device: torch.device, timeout: datetime.timedelta, *, splits_sequences: bool
    ) -> None:
        """Make the groups.

        Collective, and in the same order on all ranks.

        Args:
            sizes: parallel sizes of the models.
            device: device of this rank.
            timeout: time-out of collective operations.
            splits_sequences: whether some of the models have sequence parallelism.
        """
        self._device = device
        outside = _variables()
        parallel_state.destroy_model_parallel()  # which only forgets the groups of another division
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=sizes.pp,
            virtual_pipeline_model_parallel_size=sizes.vpp if sizes.vpp > 1 else None,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            expert_tensor_parallel_size=sizes.etp,
            order="tp-cp-ep-dp-pp",
            distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
            create_gloo_process_groups=False,
        )
        if torch.cuda.is_available():
            tensor_parallel.model_parallel_cuda_manual_seed(0)  # modules ask for it, though nothing random is left
        self._own = _variables()
        self._is_heard = (
            parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )
        self.replicas = ModelReplicas(
            sizes=(sizes.dp, sizes.pp, sizes.cp, sizes.tp),
            rank=parallel_state.get_data_parallel_rank(),
            size=sizes.dp,
            sequence_divisor=(2 * sizes.cp if sizes.cp > 1 else 1) * (sizes.tp if splits_sequences else 1),
            sum=self.sum_over_replicas,
        )
        """The division of a batch among the ranks."""
        _set(outside)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have Megatron-Core use these groups in the block."""
        outside = _variables()
        _set(self._own)
        try:
            yield
        finally:
            self._own = _variables()
            _set(outside)

    def sum_over_replicas(self, values: torch.Tensor) -> torch.Tensor:
        """Add a float64 tensor over the replicas, counting each replica's last stage once."""
        total = values.detach().to(self._device, copy=True)
        if not self._is_heard:
            total.zero_()
        dist.all_reduce(total)
        return total


def divided(
    models: Iterable[tuple[Model, MegatronSettings]], device: torch.device, timeout: datetime.timedelta
) -> dict[Model, RankDivision]:
    """Return the division of each model, made once for models of equal parallel sizes. Collective."""
    by_sizes: dict[tuple[int | None, ...], list[tuple[Model, MegatronSettings]]] = {}
    for name, settings in models:
        sizes = settings.sizes
        key = (sizes.tp, sizes.pp, sizes.vpp, sizes.cp, sizes.ep, sizes.etp)
        by_sizes.setdefault(key, []).append((name, settings))
    divisions: dict[Model, RankDivision] = {}
    for same in by_sizes.values():
        splits_sequences = any(settings.transformer.sequence_parallel for _, settings in same)
        division = RankDivision(same[0][1].sizes, device, timeout, splits_sequences=splits_sequences)
        divisions |= dict.fromkeys((name for name, _ in same), division)
    return divisions


def _variables() -> dict[str, Any]:
    """Return the variables of ``parallel_state`` that depend on the division."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def _set(variables: Mapping[str, Any]) -> None:
    vars(parallel_state).update(variables)
