"""Serve the page until this process is asked to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from tandem.coordinator.page.beside import END
from tandem.coordinator.page.server import make_app
from tandem.coordinator.page.stream import Watch

_END_S = 5
"""How long requests may take that are not answered when the program is to end."""


def serve(
    folders: Sequence[Path], listener: socket.socket, token: str | None = None, *, heeds_signals: bool = True
) -> None:
    """Serve the page of these runs until this process gets SIGINT or SIGTERM; `END` if it does not heed these."""
    app = make_app(folders, token)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_END_S,
        limit_concurrency=200,
    )
    server = _Server(config, app.state.watch, heeds_signals=heeds_signals)
    asyncio.run(server.serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """Ends when it is asked to, streams included."""

    def __init__(self, config: uvicorn.Config, watch: Watch, *, heeds_signals: bool) -> None:
        super().__init__(config)
        self._watch = watch
        self._heeds_signals = heeds_signals

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, or they would be waited for."""
        self._watch.end()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take a signal as a request to end; uvicorn would raise it once more afterwards."""
        if not self._heeds_signals:
            signal.signal(END, self.handle_exit)
            yield
            return
        with super().capture_signals():
            yield
            self._captured_signals.clear()
