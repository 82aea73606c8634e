"""The settings of all web servers, their event loop, and a server that ends once when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from tandem.common import web
from tandem.common.signals import defer_signals


def settings(app: ASGIApp, *, end_s: float, **overrides: Any) -> uvicorn.Config:
    """Return uvicorn's settings for `app`; unfinished answers have `end_s` seconds at the end.

    All servers bound idle connections and headers (`web.TimedHttpProtocol`), answer wrong keys late, say nothing of
    themselves, and log only what goes wrong.
    """
    shared = {
        "log_config": None,
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "lifespan": "off",
        "http": web.TimedHttpProtocol,
        "backlog": web.read_backlog(),
        "ws": "none",
        "loop": "asyncio",
        "timeout_graceful_shutdown": int(end_s),
    }
    return uvicorn.Config(web.SlowRefusals(app), **{**shared, **overrides})


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.Runner]:
    """Yield an event loop of the main thread, made while no signal can interrupt: half a loop warns when collected."""
    with contextlib.ExitStack() as stack:
        with defer_signals():
            runner = stack.enter_context(asyncio.Runner())
        yield runner


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
