"""The training backends, and which of them a run has."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from tandem.config import Config
from tandem.config.placement import ModelGroup
from tandem.trainer.backend import TrainerBackend


def make_backend(config: Config, *, checkpoint: Path | None, model_group: ModelGroup | None = None) -> TrainerBackend:
    """Return this rank's backend: Megatron-Core if it is enabled, even beside FSDP2, and otherwise FSDP2.

    `model_group` is that of the default process group; None if it holds all models. Raises the backend's errors.
    """
    name = "policy" if model_group is None else model_group.name
    section = config.settings_of(name)
    # Imported on use: each takes seconds, and Megatron-Core need not be installed.
    if not section.megatron_cfg.enabled:
        if name == "policy" and config.policy.mtp.num_layers:
            from tandem.trainer.backends.mtp import MtpBackend

            return MtpBackend(config, checkpoint=checkpoint, model_group=model_group)
        from tandem.trainer.backends.dtensor import DTensorBackend

        return DTensorBackend(config, checkpoint=checkpoint, model_group=model_group)
    from tandem.trainer.backends.megatron import preparing

    preparing.prepare()
    from tandem.trainer.backends.megatron.backend import MegatronBackend

    if name == "policy" and section.dtensor_cfg.enabled and dist.get_rank() == 0:
        print(
            "Megatron-Core trains: policy.megatron_cfg wins over policy.dtensor_cfg, which is enabled too", flush=True
        )
    return MegatronBackend(config, checkpoint=checkpoint, model_group=model_group)
