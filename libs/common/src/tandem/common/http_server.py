"""A web server that ends once when it is asked to."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import uvicorn


class SignalledServer(uvicorn.Server):
    """Takes a signal as a request to end; uvicorn would raise it once more afterwards."""

    def __init__(
        self, config: uvicorn.Config, *, heeds_signals: bool = True, end: signal.Signals | None = None
    ) -> None:
        """Without `heeds_signals`, `end` alone is such a signal."""
        super().__init__(config)
        self._end = end
        self._heeds_signals = heeds_signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hear of signals while it serves."""
        if not self._heeds_signals:
            if self._end is not None:
                signal.signal(self._end, self.handle_exit)
            yield
            return
        with super().capture_signals():
            yield
            self._captured_signals.clear()
