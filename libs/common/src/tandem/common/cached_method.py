"""A method of a frozen struct, computed once for each combination of arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

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
