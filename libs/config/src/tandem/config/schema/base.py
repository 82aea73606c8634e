"""The base of every section, the constrained types that sections share, and methods computed once.

The docstring under each field is its entry in ``docs/configuration.md``. A docstring that begins with ``New.`` marks
a key that NeMo-RL v0.3 does not have.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import msgspec
from msgspec import Meta


class ConfigSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The base of every section of the configuration."""


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Probability = Annotated[float, Meta(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Meta(gt=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Port = Annotated[int, Meta(ge=1, le=65535)]
NonEmptyStr = Annotated[str, Meta(min_length=1)]


Owner = TypeVar("Owner")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class cached_method(Generic[Owner, Arguments, Result]):
    """Decorates a method whose results depend on nothing but the struct and hashable arguments.

    The first access puts a cache of results on the instance, under the method's name. The struct needs ``dict=True``.
    """

    def __init__(self, method: Callable[Concatenate[Owner, Arguments], Result]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type[Owner]) -> cached_method[Owner, Arguments, Result]: ...

    @overload
    def __get__(self, instance: Owner, owner: type[Owner]) -> Callable[Arguments, Result]: ...

    def __get__(self, instance: Owner | None, owner: type[Owner]) -> Any:
        """Return the cached method of an instance."""
        if instance is None:
            return self
        cached = functools.cache(functools.partial(self._method, instance))
        vars(instance)[self._method.__name__] = cached
        return cached
