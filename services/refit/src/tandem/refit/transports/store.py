"""Weights through a store: trainers write each version once, and engines anywhere read it.

This is the declaration alone. `tandem.refit.store` does the work, at both ends in the background: an engine's process
brings its parts of a version into a mirror in its host's shared memory, and copies out of that by `shm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.errors import RefitError
from tandem.refit.layout import Address, StoreMemory
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports.transport import BoundTransfers, Route, TransferEnd, Transport, Wire

URL_VARIABLE = "TANDEM_REFIT_STORE"
"""Environment variable with the store's URL as an engine's machine reaches it, in the place of ``refit.store``."""
HOST_VARIABLE = "TANDEM_HOST"
"""Environment variable with another name for the host of an engine, so that it depends on no memory of its machine."""


class StoreTransport(Transport):
    """The receiver reads what the source has written to a store."""

    name = "store"
    is_sent = False

    def reaches(self, memory: type[Address], route: Route) -> bool:
        """Return whether the memory is published in a store, which is within reach from everywhere."""
        return memory is StoreMemory

    def wire(self, route: Route) -> Wire | None:
        """Return the network."""
        return "network"

    def explain(self, route: Route) -> str:
        """Return the reason as a phrase."""
        return "different hosts, and the source is in refit.store"

    def preference(self, route: Route) -> int:
        """Return more than for streams."""
        return 1

    def bind(self, transfers: Sequence[LinkTransfer], end: TransferEnd) -> BoundTransfers:
        """Raise `RefitError`: an engine with a mirror has put that in the place of the store."""
        raise RefitError(f"{end.member} has no mirror of refit.store to copy from")
