"""The parts of a trainer, and their building: models, weights, and what works beside them."""

from __future__ import annotations

import dataclasses
import datetime
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.common.messages import BuildTrainer, OpenRendezvous, RendezvousOpened, TrainerBuilt
from tandem.common.network import defer_silent, find_address_towards, keep_to_interface, list_listening
from tandem.config.placement import ModelGroup
from tandem.config.threads import limit_threads
from tandem.launch.service import ServiceContext
from tandem.observe.exporters.nvml import GpuMonitor
from tandem.refit import layout
from tandem.refit.weight_client import WeightClient
from tandem.refit.weights import Weights
from tandem.samples.batch_sharding import scoring_trainers
from tandem.trainer import exposed_weights
from tandem.trainer.backend import TrainerBackend
from tandem.trainer.backends import make_backend
from tandem.trainer.exchange import RankExchange, meet
from tandem.trainer.losses.custom import try_out

if TYPE_CHECKING:
    from tandem.samples.sample_writing import LogprobRecorder

NO_LAYOUT = layout.encode(layout.LayoutBuilder("").build())
"""Layout of a process that does not hold the policy."""


@dataclasses.dataclass(kw_only=True)
class TrainerParts:
    """The models of a rank, and what works beside them."""

    store: TCPStore
    """The store at which the ranks have met, open as long as they may meet again."""
    backend: TrainerBackend
    exchange: RankExchange | None
    """The exchange with trainers of other models; None if all hold the same."""
    weights: Weights | None = None
    """The weights that engines read; None without the policy."""
    weight_client: WeightClient | None = None
    gpus: GpuMonitor | None = None
    """None without a GPU."""
    recorder: LogprobRecorder | None = None
    """None if no log-probabilities are logged, or another rank of the model-parallel group logs them."""

    def built(self, command: BuildTrainer) -> TrainerBuilt:
        """Return the reply to the command that these were built for."""
        return TrainerBuilt(
            command_id=command.command_id,
            version=command.version,
            num_parameters=self.backend.num_parameters,
            shares_prompts=self.backend.shares_prompts,
            layout=NO_LAYOUT if self.weights is None else layout.encode(self.weights.layout),
        )

    def close(self) -> None:
        """Leave the transfer groups, and release the models."""
        for part in (self.gpus, self.recorder, self.weight_client, self.weights, self.backend, self.exchange):
            if part is not None:
                part.close()


def open_rendezvous(context: ServiceContext, command: OpenRendezvous) -> tuple[TCPStore, RendezvousOpened]:
    """Open the store at which ranks meet, on a free port of one address of this machine; return it and its place."""
    host = find_address_towards(context.coordinator)
    listener = socket.create_server((host, 0))
    defer_silent([listener])
    # A listening socket binds the store to one address. By itself it would listen on all of them.
    store = TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
        timeout=datetime.timedelta(seconds=command.deadline_s),
    )
    return store, RendezvousOpened(command_id=command.command_id, host=host, port=store.port)


def build_parts(
    context: ServiceContext, command: BuildTrainer, store: TCPStore | None, model_group: ModelGroup
) -> TrainerParts:
    """Meet the other ranks and build this one's models. Collective.

    Raises `ModelError`, `ConfigError` or `CheckpointError`.

    Args:
        context: the service's.
        command: says where ranks meet, and from what they start.
        store: the store, if this rank has opened it.
        model_group: the models of this rank, and the ranks that hold the same.

    """
    config, index = context.config, context.index
    limit_threads(config, "trainers")
    try_out(config)
    # The ranks meet on the interface of the run, and on no other.
    address = find_address_towards(context.coordinator)
    keep_to_interface(address, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if store is None:
        timeout = datetime.timedelta(seconds=command.deadline_s)
        store = TCPStore(
            command.rendezvous_host, command.rendezvous_port, is_master=False, timeout=timeout, use_libuv=False
        )
    assert command.world_size == config.num_trainers, "the coordinator has the same configuration"
    exchange = meet(config, index, store, address, command.deadline_s)
    checkpoint = Path(command.checkpoint) if command.checkpoint else None
    backend = make_backend(config, checkpoint=checkpoint, model_group=model_group)
    defer_silent(list_listening())
    parts = TrainerParts(store=store, backend=backend, exchange=exchange)
    try:
        if config.is_colocated and model_group.has_policy:
            backend.offload()
        if model_group.has_policy:
            parts.weights = backend.weights()
            if config.keeps_copy:
                parts.weights = exposed_weights.copy_of(parts.weights)
            parts.weight_client = WeightClient(context, parts.weights)
        if torch.cuda.is_available():
            parts.gpus = GpuMonitor(config.logger)
            parts.gpus.begin(index, 1)
        if command.samples_folder and index in scoring_trainers(config):
            # Arrow starts threads when it is imported, and services are forked by a process that must have none.
            from tandem.samples.sample_writing import LogprobRecorder

            parts.recorder = LogprobRecorder(Path(command.samples_folder), context.run_id, context.name)
    except BaseException:
        parts.close()
        raise
    return parts
