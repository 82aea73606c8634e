"""The registry of transports, the only place that lists them all."""

from __future__ import annotations

from tandem.common.errors import RefitError, nearest
from tandem.refit.layout import Address
from tandem.refit.transports import alias, cuda_ipc, shm, store, stream
from tandem.refit.transports.transport import Route, Transport

TRANSPORTS: dict[str, Transport] = {
    each.name: each
    for each in (
        stream.StreamTransport(),
        shm.ShmTransport(),
        cuda_ipc.CudaIpc(),
        alias.AliasTransport(),
        store.StoreTransport(),
    )
}
"""Transports by name. Tables of a plan store a transport's position in this order as its number."""


def find(name: str) -> Transport:
    """Return the transport of a name. Raises `RefitError` if there is none."""
    if name not in TRANSPORTS:
        raise RefitError(f"there is no transport {name!r}, only {', '.join(TRANSPORTS)}{nearest(name, TRANSPORTS)}")
    return TRANSPORTS[name]


def list_numbered() -> tuple[Transport, ...]:
    """Return all transports, in order of their numbers."""
    return tuple(TRANSPORTS.values())


def find_in_place(name: str) -> tuple[Transport, ...]:
    """Return the transports that can replace copies of this one by reading in place."""
    return tuple(each for each in TRANSPORTS.values() if each.in_place_of == name)


def choose(memory: type[Address], route: Route, *, sent_only: bool = False) -> tuple[int, int]:
    """Return the number of the preferred transport for a route, and its preference.

    Args:
        memory: kind of memory at the source.
        route: from the source to the destination.
        sent_only: exclude receiver-driven transports.

    Raises:
        RefitError: no transport reaches the destination.

    """
    candidates = [
        (each.preference(route), -number)
        for number, each in enumerate(TRANSPORTS.values())
        if not each.in_place_of and (each.is_sent or not sent_only) and each.reaches(memory, route)
    ]
    if not candidates:
        raise RefitError(f"no transport brings bytes out of {memory.__name__} {route}")
    preference, number = max(candidates)
    return -number, preference
