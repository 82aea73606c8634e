"""Find the address at which other processes reach this host, and keep to loopback where the run does."""

from __future__ import annotations

import ipaddress
import os
import socket
from urllib.parse import urlsplit

from tandem.common.errors import ConfigError


def address_towards(endpoint: str) -> str:
    """Return this host's address as the peer at ``tcp://host:port`` sees it; loopback if the peer is on loopback."""
    parts = urlsplit(endpoint)
    try:
        family, _, _, _, peer = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)  # sends nothing: it only asks the kernel for the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot find a route to {endpoint!r}: {error}") from error


def is_loopback(host: str) -> bool:
    """Say whether an address is one of this host's own, unreachable from outside."""
    return ipaddress.ip_address(host).is_loopback


def loopback_interface(*variables: str) -> None:
    """Tell collective libraries, through these environment variables, to use the loopback interface.

    They would otherwise look up the host's name, which a laptop often cannot resolve, and listen on what they find.
    """
    names = [name for _, name in socket.if_nameindex()]
    loopback = "lo" if "lo" in names else "lo0"
    for variable in variables:
        os.environ.setdefault(variable, loopback)


def url_of(listening: socket.socket) -> str:
    """Return the address of a socket that listens for HTTP."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
