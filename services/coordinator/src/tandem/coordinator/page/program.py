"""Serve the page until this process is asked to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from tandem.common.errors import ConfigError
from tandem.coordinator.page.security import is_loopback
from tandem.coordinator.page.server import make_app
from tandem.coordinator.page.stream import Watch

FIRST_PORT = 8700
_PORTS = 100
"""How many are tried from the first on, before any that is free is taken."""
_END_S = 5
"""How long requests may take that are not answered when the program is to end."""


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port; without one, on the first that is free from `FIRST_PORT` on, or any.

    Raises `ConfigError` if that cannot be.
    """
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + _PORTS), 0]
    why = ""
    for each in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, each, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
                0
            ]
            return _bound(family, address)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"the page cannot listen on {host}{'' if port is None else f', port {port}'}: {why}")


def _bound(family: int, address: object) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A page that has just ended leaves connections behind, which keep nobody from the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, token: str | None = None) -> str:
    """Return the address to open in a browser."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{port}{'' if token is None else f'/?token={token}'}"


def needs_token(host: str) -> bool:
    """Tell whether others than this machine's users reach an address."""
    return not is_loopback(host)


def serve(folders: Sequence[Path], listener: socket.socket, token: str | None) -> None:
    """Serve the page of these runs until this process gets SIGINT or SIGTERM."""
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
    server = _Server(config, app.state.watch)
    asyncio.run(server.serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """Ends when it is asked to, streams included."""

    def __init__(self, config: uvicorn.Config, watch: Watch) -> None:
        super().__init__(config)
        self._watch = watch

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, or they would be waited for."""
        self._watch.end()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take a signal as a request to end; uvicorn would raise it once more afterwards."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()
