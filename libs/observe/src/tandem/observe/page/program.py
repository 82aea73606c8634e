"""The page's main loop, until the process is asked to end."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from tandem.common.web import SignalledServer, event_loop, settings
from tandem.observe.page.address import END
from tandem.observe.page.server import make_app
from tandem.observe.page.stream import RunsWatch

_END_S = 5
"""Longest time for unfinished requests once the program is to end."""
_MOST_AT_ONCE = 200
"""Connections and requests beyond which requests are refused."""


def serve(
    folders: Sequence[Path], listener: socket.socket, token: str | None = None, *, heeds_signals: bool = True
) -> None:
    """Serve the page of these runs until SIGINT or SIGTERM, or only `END` without `heeds_signals`."""
    app = make_app(folders, token)
    config = settings(app, end_s=_END_S, limit_concurrency=_MOST_AT_ONCE)
    server = _Server(config, app.state.watch, heeds_signals=heeds_signals)
    try:
        with event_loop() as runner:
            runner.run(server.serve(sockets=[listener]))
    finally:
        app.state.thumbnails.close()
        app.state.rows.close()


class _Server(SignalledServer):
    """A server that also ends its streams."""

    def __init__(self, config: uvicorn.Config, watch: RunsWatch, *, heeds_signals: bool) -> None:
        super().__init__(config, heeds_signals=heeds_signals, end=END)
        self._watch = watch

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams first, because the shutdown waits for them."""
        self._watch.end()
        await super().shutdown(sockets)
