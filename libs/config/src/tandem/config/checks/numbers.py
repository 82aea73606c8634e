"""Rules of numbers, wherever they stand: float32, in which the run computes, must carry them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tandem.common.messages import LARGEST
from tandem.config.checks.rule import Rule
from tandem.config.problem import Invalid
from tandem.config.schema import Config

SMALLEST = 1e-30
"""Nothing is divided by less: a logit of a million over it is 1e36, and float32 ends at 3.4e38."""


def float32_carries_numbers(config: Config) -> None:
    """A learning rate of 1e300 or a temperature of 1e-300 makes infinite numbers of finite ones."""
    for key, number in _numbers("", config):
        if abs(number) > LARGEST:
            raise Invalid(key, f"{number:g} must be from {-LARGEST:g} to {LARGEST:g}: the run computes in float32")
        if number and abs(number) < SMALLEST:
            raise Invalid(key, f"{number:g} must be 0 or at least {SMALLEST:g}: the run computes in float32")


def _numbers(key: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield all floating-point numbers in a value, by their keys."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, msgspec.Struct):
        # Not `msgspec.structs.fields`, which evaluates all annotations again: half of the time of a configuration.
        for name, field in zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True):
            yield from _numbers(_below(key, name), getattr(value, field))
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _numbers(_below(key, str(name)), each)
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _numbers(f"{key}[{place}]", each)


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


RULES: tuple[Rule, ...] = (float32_carries_numbers,)
