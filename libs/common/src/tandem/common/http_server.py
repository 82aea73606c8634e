"""A web server that ends once when it is told to."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import uvicorn


class SignalledServer(uvicorn.Server):
    """A uvicorn server that ends on a signal without raising that signal again afterwards."""

    def __init__(
        self, config: uvicorn.Config, *, heeds_signals: bool = True, end: signal.Signals | None = None
    ) -> None:
        """Create the server; without `heeds_signals`, `end` is the only signal that ends it."""
        super().__init__(config)
        self._end = end
        self._heeds_signals = heeds_signals

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs."""
        if not self._heeds_signals:
            if self._end is not None:
                signal.signal(self._end, self.handle_exit)
            yield
            return
        with super().capture_signals():
            yield
            self._captured_signals.clear()
