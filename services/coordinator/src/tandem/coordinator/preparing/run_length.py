"""The number of steps that schedules span, decided once, when a run begins.

Megatron-Core's schedules span it, and warm-ups that are a share of the run. It is the run's own: the smaller of
``max_num_steps`` and ``max_num_epochs``, as in NeMo-RL v0.7, which writes it to ``megatron_cfg.train_iters`` too, and
in Transformers. A run that was resumed with another ``max_num_steps`` keeps it, unless
``override_opt_param_scheduler`` says otherwise, and keeps its warm-up in any case.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from tandem.config import Config, config_from_json
from tandem.config.derive import compute_warmup_length, make_linear_warmup
from tandem.config.schema import ModelConfig, SchedulerEntry
from tandem.launch.preparing.beginning import Mode, has_begun
from tandem.observe.run_folder.journal import read_journal

Section = TypeVar("Section", bound=ModelConfig)


def set_run_length(config: Config, num_steps: int, mode: Mode) -> Config:
    """Return the configuration with the steps of the run in the schedules of the models that are trained.

    They are in ``train_iters`` where Megatron-Core trains, and in warm-ups that are a share of the run. A replay keeps
    what its run had.
    """
    trained = [section for section in (config.policy, config.value) if section is not None]
    if config.replay is not None or not any(_spans_run(section) for section in trained):
        return config
    recorded, steps = _find_recorded(config, mode), (max(1, num_steps), config.num_passes)
    policy = _set_steps(config.policy, *steps, None if recorded is None else recorded.policy)
    value = config.value
    if value is not None:
        value = _set_steps(value, *steps, None if recorded is None else recorded.value)
    return msgspec.structs.replace(config, policy=policy, value=value)


def _spans_run(section: ModelConfig) -> bool:
    return section.megatron_cfg.enabled or 0 < section.warmup_steps < 1


def _set_steps(section: Section, num_steps: int, num_passes: int, recorded: ModelConfig | None) -> Section:
    megatron = section.megatron_cfg
    warmup = compute_warmup_length(section.warmup_steps, num_steps, num_passes) if 0 < section.warmup_steps < 1 else 0
    if not megatron.enabled:
        if not warmup:
            return section
        scheduler = (SchedulerEntry(**make_linear_warmup(warmup)),) if recorded is None else recorded.scheduler
        return msgspec.structs.replace(section, scheduler=scheduler)
    schedule = megatron.scheduler
    if recorded is not None and not schedule.override_opt_param_scheduler:
        num_steps = recorded.megatron_cfg.train_iters or num_steps  # an earlier release recorded none
    if warmup:
        warmup = warmup if recorded is None else recorded.megatron_cfg.scheduler.lr_warmup_iters
        schedule = msgspec.structs.replace(schedule, lr_warmup_iters=warmup)
    megatron = msgspec.structs.replace(megatron, train_iters=num_steps, scheduler=schedule)
    return msgspec.structs.replace(section, megatron_cfg=megatron)


def _find_recorded(config: Config, mode: Mode) -> Config | None:
    """Return the configuration that a run to be resumed has had so far."""
    if mode != "resume" or not has_begun(config):
        return None
    with read_journal(Path(config.logger.log_dir)) as journal:
        return config_from_json(journal.config_json)
