"""The page's socket, and its address in a browser; imports no web server."""

from __future__ import annotations

import signal
import socket
from urllib.parse import quote

from tandem.common.errors import ConfigError

END = signal.SIGUSR1
"""Signal that ends the page's process. The page leaves signals that end the whole run to the coordinator."""
FIRST_PORT = 8700
_PORTS = 100
"""Number of ports tried from the first on, before any free one is taken."""


def listen(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port; without one, on the first free port from `FIRST_PORT` on, or any.

    Raises `ConfigError` if that is impossible.
    """
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + _PORTS), 0]
    reason = ""
    for candidate in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host, candidate, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            return _bind(family, address)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    raise ConfigError(f"the page cannot listen on {host}{'' if port is None else f', port {port}'}: {reason}")


def _bind(family: int, address: object) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections left by a page that has just ended must not block the port.
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
    query = "" if token is None else f"/?token={quote(token, safe='')}"
    return f"http://{host}:{port}{query}"
