"""Transports for pairs of places in memory, looked up for many pairs at once.

Transports are asked about kinds of places (`Route`), which are few, and the answers are cached.
"""

from __future__ import annotations

import itertools

import numpy as np

from tandem.refit.columns import Ints
from tandem.refit.layout import KINDS_OF_MEMORY, PrivateMemory
from tandem.refit.transports import registry
from tandem.refit.transports.transport import Route

_ROUTES = tuple(Route(*facts) for facts in itertools.product((False, True), repeat=4))
"""Every route by its number; the facts, in order, are the number's binary digits."""

PRIVATE = KINDS_OF_MEMORY.index(PrivateMemory)
"""Code of memory that only its own process can access."""


def number_routes(same_host: object, same_device: object, from_gpu: object, to_gpu: object) -> Ints:
    """Return the number of each route; arguments are the facts of `Route`, as columns or single values."""
    number: Ints = np.zeros(1, np.int64)
    for fact in (same_host, same_device, from_gpu, to_gpu):
        number = number * 2 + np.asarray(fact, np.int64)
    return number


class TransportChoices:
    """The preferred transports, found as they are needed."""

    def __init__(self, *, sent_only: bool = False) -> None:
        """Choose from all transports, or only from those that send."""
        self._sent_only = sent_only
        shape = len(KINDS_OF_MEMORY), len(_ROUTES)
        self._transport_KR = np.full(shape, -1)
        self._preference_KR = np.zeros(shape, np.int64)

    def look_up(self, kind_N: Ints, route_N: Ints) -> tuple[Ints, Ints]:
        """Return the number of the transport for each kind of memory and route, and its preference.

        Raises:
            RefitError: no transport reaches the destination.

        """
        transport_N = self._transport_KR[kind_N, route_N]
        is_new_N = transport_N < 0
        if is_new_N.any():
            for kind, route in set(zip(kind_N[is_new_N].tolist(), route_N[is_new_N].tolist(), strict=True)):
                choice = registry.choose(KINDS_OF_MEMORY[kind], _ROUTES[route], sent_only=self._sent_only)
                self._transport_KR[kind, route], self._preference_KR[kind, route] = choice
            transport_N = self._transport_KR[kind_N, route_N]
        return transport_N, self._preference_KR[kind_N, route_N]
