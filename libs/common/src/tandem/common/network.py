"""Find the address at which other processes reach this host, and keep local runs on loopback."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from tandem.common.errors import ConfigError

_SIOCGIFADDR = 0x8915
"""Linux's ioctl for the address of an interface."""
_SILENT_S = 3600
"""How long the kernel keeps a silent connection to itself."""
_ADDRESSES_6 = "/proc/net/if_inet6"


def find_address_towards(endpoint: str) -> str:
    """Return this host's address as the peer at ``tcp://host:port`` sees it; loopback if the peer is on loopback."""
    parts = urlsplit(endpoint)
    try:
        family, _, _, _, peer = socket.getaddrinfo(parts.hostname, parts.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(peer)  # sends nothing: it only asks the kernel for the route
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot find a route to {endpoint!r}: {error}") from error


def forget_empty_endpoint() -> None:
    """Take an empty ``HF_ENDPOINT`` for one that is not set; the Hub's libraries take it for an address.

    To be called before they are imported, which is when they read it. Child processes inherit the rest.
    """
    if os.environ.get("HF_ENDPOINT", "x").strip() == "":
        del os.environ["HF_ENDPOINT"]


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is reachable only from this host; of names, only localhost counts."""
    if host.rstrip(".").lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def keep_to_interface(address: str, *variables: str) -> None:
    """Make collective libraries use the interface with this address, through environment variables.

    By default they look up the host name, which a laptop often cannot resolve, and listen on the result. Values set
    by the user are kept.
    """
    name = _find_interface(address)
    for variable in variables if name else ():
        os.environ.setdefault(variable, name)


def list_listening() -> Iterator[socket.socket]:
    """Yield copies of this process's sockets that listen for TCP, a library's own included; each is closed again."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as listener:
                    is_tcp = (
                        listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
                    )
                    if is_tcp and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        yield listener


def defer_silent(listeners: Iterable[socket.socket]) -> None:
    """Have the kernel keep connections until they say something: peers speak first, and strangers may not.

    A torch store and gloo take a descriptor for each connection, for ever, and end their process without a free one.
    """
    for listener in listeners:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_S)


def _find_interface(address: str) -> str:
    """Return the name of the interface with this address; empty if it cannot be found."""
    names = [name for _, name in socket.if_nameindex()]
    if is_loopback(address):
        return "lo" if "lo" in names else "lo0"
    if ":" in address:
        return _find_interface_of_6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _find_interface_of_6(address: str) -> str:
    """Return the same for an IPv6 address, from Linux's table of addresses."""
    hex_address = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
    with contextlib.suppress(OSError), open(_ADDRESSES_6, encoding="ascii") as table:
        for line in table:
            listed_address, *_, name = line.split()
            if listed_address == hex_address:
                return name
    return ""


def url_of(listening: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
