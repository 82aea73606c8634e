"""Rules for all numbers: float32, in which the run computes, must be able to carry them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tandem.common.messages import LARGEST
from tandem.config.checks.rule import Rule
from tandem.config.problem import InvalidValue
from tandem.config.schema import Config

SMALLEST = 1e-30
"""Smallest divisor: a logit of a million divided by it is 1e36, and float32 ends at 3.4e38."""


MAY_VANISH = ("lr_warmup_init", "min_lr", "eta_min")
"""Learning rates that a schedule begins or ends with: a smaller one counts as zero, and nothing is divided by it."""


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
