"""Rules for all numbers, which float32 must be able to carry; and learning rates that are zero in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tandem.common.messages import LARGEST
from tandem.config.problem import InvalidValue, Rule
from tandem.config.schema import Config, MegatronCfg, ModelConfig

SMALLEST = 1e-30
"""Smallest divisor: a logit of a million divided by it is 1e36, and float32 ends at 3.4e38."""


MAY_VANISH = ("lr_warmup_init", "min_lr", "eta_min")
"""Learning rates that a schedule begins or ends with: a smaller one counts as zero, and nothing is divided by it."""
_DECAYS_TO_MIN_LR = ("linear", "cosine", "WSD")
"""Decays of Megatron-Core that end at ``min_lr``."""
_TORCH, _USUAL_ITERS = "torch.optim.lr_scheduler", 5
"""The steps of torch's `LinearLR` and `PolynomialLR` by default."""


def check_float32_carries_numbers(config: Config) -> None:
    """Check that no number would overflow: learning rates of 1e300 or temperatures of 1e-300 produce infinities."""
    for key, number in list_numbers("", config):
        if abs(number) > LARGEST:
            raise InvalidValue(key, f"{number:g} must be from {-LARGEST:g} to {LARGEST:g}: the run computes in float32")
        if number and abs(number) < SMALLEST and key.rpartition(".")[2] not in MAY_VANISH:
            raise InvalidValue(key, f"{number:g} must be 0 or at least {SMALLEST:g}: the run computes in float32")


def list_numbers(key: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield all floating-point numbers in a value, with their keys."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, msgspec.Struct):
        # Not `msgspec.structs.fields`, which evaluates all annotations again: half of the time of a configuration.
        for name, field in zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True):
            yield from list_numbers(_join_key(key, name), getattr(value, field))
    elif isinstance(value, Mapping):
        for name, element in value.items():
            yield from list_numbers(_join_key(key, str(name)), element)
    elif isinstance(value, list | tuple):
        for place, element in enumerate(value):
            yield from list_numbers(f"{key}[{place}]", element)


def _join_key(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


RULES: tuple[Rule, ...] = (check_float32_carries_numbers,)


def find_too_small_rates(config: Config) -> Iterator[str]:
    """Yield the learning rates that are so small that they are zero."""
    for key, number in list_numbers("", config):
        if number and abs(number) < SMALLEST and key.rpartition(".")[2] in MAY_VANISH:
            yield f"{key} ({number:g}) counts as 0: the run computes in float32"


def find_ended_schedules(config: Config) -> Iterator[str]:
    """Yield the schedules whose rate is zero long before the run ends."""
    num_steps = config.algorithm_section.max_num_steps
    for name in config.declaration.trains:
        section = config.settings_of(name)
        key, end = _end_of(name, section)
        if end is None or config.evaluates:
            continue
        last = -(-end // config.num_passes)
        if num_steps < 0 or num_steps > last:
            run = "" if num_steps < 0 else f", and {config.algorithm}.max_num_steps is {num_steps}"
            yield f"{key}: the learning rate is 0 after step {last}{run}: later steps change nothing"


def _end_of(name: str, section: ModelConfig) -> tuple[str, int | None]:
    """Return the key of a model's schedule, and the steps after which its rate is zero for good, if it ever is."""
    if section.megatron_cfg.enabled:
        return f"{name}.megatron_cfg.scheduler", _end_of_megatron(section.megatron_cfg)
    return f"{name}.scheduler", _end_of_torch(section)


def _end_of_megatron(megatron: MegatronCfg) -> int | None:
    scheduler, lowest = megatron.scheduler, megatron.optimizer.get("min_lr") or 0.0
    is_zero = scheduler.lr_decay_style in _DECAYS_TO_MIN_LR and abs(lowest) < SMALLEST
    return scheduler.lr_decay_iters if is_zero else None


def _end_of_torch(section: ModelConfig) -> int | None:
    """Return the end of the last of torch's schedules, which each count from their milestone on."""
    schedules = [entry for entry in section.scheduler if entry.name is not None]
    milestones = [0, *(each for entry in section.scheduler for each in entry.milestones or ())]
    if not schedules or len(milestones) != len(schedules):
        return None
    last, arguments = schedules[-1], schedules[-1].kwargs
    iters: Any = arguments.get("total_iters", _USUAL_ITERS)
    is_zero = (last.name == f"{_TORCH}.LinearLR" and arguments.get("end_factor") == 0) or (
        last.name == f"{_TORCH}.PolynomialLR"
    )
    return milestones[-1] + iters if is_zero and isinstance(iters, int) else None
