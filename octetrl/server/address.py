"""The address that a server of ours listens on, and whether other machines reach it. Imports no engine."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from octetrl.system.errors import UserError


def url_of(host: str, port: int, path: str = "/v1") -> str:
    """The address that clients take as their base URL."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def is_of_this_machine(host: str) -> bool:
    """Whether all addresses of `host` can be reached only from this machine."""
    try:
        found = socket.getaddrinfo(host or None, 0, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host: '{host}' is not an address of this machine ({error}); give another") from error
    return all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found)


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Binds the socket before the model is loaded, so that a port in use is reported at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise UserError(
            f"--port: {host}:{port} can't be listened on ({error.strerror or error}); give another"
        ) from error
    with listening:
        yield listening
