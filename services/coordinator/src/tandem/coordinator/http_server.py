"""A web server that ends once when it is asked to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn


class SignalledServer(uvicorn.Server):
    """Takes a signal as a request to end, or leaves signals alone; uvicorn would raise one once more afterwards."""

    def __init__(self, config: uvicorn.Config, *, heeds_signals: bool) -> None:
        super().__init__(config)
        self._heeds_signals = heeds_signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hear of signals while it serves."""
        if not self._heeds_signals:
            yield
            return
        with super().capture_signals():
            yield
            self._captured_signals.clear()
