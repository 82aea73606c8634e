"""The number of steps that Megatron-Core's schedules span, decided once, when a run begins.

It is the run's own: the smaller of ``max_num_steps`` and ``max_num_epochs``, as in NeMo-RL v0.7, which writes it to
``megatron_cfg.train_iters`` too. A run that was resumed with another ``max_num_steps`` keeps it, unless
``override_opt_param_scheduler`` says otherwise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.config import Config, config_from_json
from tandem.config.schema import Model
from tandem.launch.preparing.beginning import Mode, has_begun
from tandem.observe.run_folder.journal import read_journal

Section = TypeVar("Section", bound=Model)


def with_run_length(config: Config, num_steps: int, mode: Mode) -> Config:
    """Return the configuration with the steps of the run in ``train_iters`` of the models that Megatron-Core trains.

    A replay keeps what its run had.
    """
    trained = [section for section in (config.policy, config.value) if section is not None]
    if config.replay is not None or not any(section.megatron_cfg.enabled for section in trained):
        return config
    recorded = _recorded(config, mode)
    policy = _with_steps(config.policy, num_steps, None if recorded is None else recorded.policy)
    value = config.value
    if value is not None:
        value = _with_steps(value, num_steps, None if recorded is None else recorded.value)
    return msgspec.structs.replace(config, policy=policy, value=value)


def _with_steps(section: Section, num_steps: int, recorded: Model | None) -> Section:
    megatron = section.megatron_cfg
    if not megatron.enabled:
        return section
    steps = max(1, num_steps)
    if recorded is not None and not megatron.scheduler.override_opt_param_scheduler:
        steps = recorded.megatron_cfg.train_iters or steps  # an earlier release recorded none
    return msgspec.structs.replace(section, megatron_cfg=msgspec.structs.replace(megatron, train_iters=steps))


def _recorded(config: Config, mode: Mode) -> Config | None:
    """Return the configuration that a run to be resumed has had so far."""
    if mode != "resume" or not has_begun(config):
        return None
    with read_journal(Path(config.logger.log_dir)) as journal:
        return config_from_json(journal.config_json)
