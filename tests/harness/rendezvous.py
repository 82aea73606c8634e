"""A store where the members of a stream's tests find each other."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore


class Rendezvous:
    """A store that listens on a free port of this machine."""

    def __init__(self) -> None:
        self.store: TCPStore | None = TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.port: int = self.store.port


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    """Yield a store; it listens no more afterwards."""
    made = Rendezvous()
    yield made
    made.store = None  # which pytest would keep, and with it a listening socket
    gc.collect()
