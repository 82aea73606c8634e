"""Web servers that log no requests, and one that ends once when it is told to."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tandem.common import web


def quiet_config(app: ASGIApp, end_s: int, **settings: Any) -> uvicorn.Config:
    """Return the settings of a server that logs no requests, and waits `end_s` for unfinished ones at its end."""
    return uvicorn.Config(
        app,
        access_log=False,
        server_header=False,
        lifespan="off",
        http=web.Protocol,
        backlog=web.backlog(),
        ws="none",
        timeout_graceful_shutdown=end_s,
        **settings,
    )


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
