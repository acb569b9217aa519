"""Finds the Ray that `cluster.address` names, before Ray itself is called.

Ray's own search for `auto` joins any Ray of the machine, also one that another run has started and will end. And its
connection to a port that answers nothing, or another protocol, blocks without a limit. So this file looks for the
`raylet` processes of the machine, leaves out those of runs, and asks the port for the first frame of HTTP/2, which Ray
speaks.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from octetrl.system.errors import UserError

FOLDER_PREFIX = "octetrl-"  # of the folder in /tmp of a Ray that a run starts
CONNECT_SECONDS = 10.0
REMEDY = "start one with `ray start --head --port=6379`, or leave cluster.address out"
_OF_A_RUN = re.compile(rf"^--(?:temp|session)[_-]dir=/tmp/{FOLDER_PREFIX}[^/]+")
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # with empty settings
_FRAME_HEADER, _SETTINGS = 9, 4  # bytes, the type of the first frame that a server sends
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class LocalRay:
    """A Ray with a `raylet` on this machine."""

    address: str  # host:port
    is_of_a_run: bool  # started by a run, which ends it


def address_to_join(address: str, latest: Callable[[], str | None]) -> str:
    """host:port of the Ray to join. Raises UserError if no Ray answers there, or if it belongs to another run.

    `address`: cluster.address, host:port or auto. `latest`: the address of the machine's last `ray start`.
    """
    found = tuple(local_rays())
    wanted = _automatic(found, latest) if address == "auto" else address
    host, _, port = wanted.rpartition(":")
    if not host or not port.isdigit():
        where = "" if address == wanted else f"{address}, and RAY_ADDRESS: "
        raise UserError(f"cluster.address: {where}'{wanted}' is not host:port, auto or local; the usual port is 6379")
    if any(one.is_of_a_run and _is_same(one.address, host, port) for one in found):
        raise UserError(
            f"cluster.address: the Ray at {wanted} belongs to another run of octetrl, which ends it; {REMEDY}"
        )
    _check_answer(host.strip("[]"), int(port), wanted)
    return wanted


def local_rays() -> Iterator[LocalRay]:
    """By the command lines of this machine's processes. Nothing on a system without /proc."""
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                parts = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace").split("\0")
                addresses = [part.partition("=")[2] for part in parts if part.startswith("--gcs-address=")]
                if Path(parts[0]).name == "raylet" and addresses:
                    yield LocalRay(addresses[0], any(map(_OF_A_RUN.match, parts)))


def _automatic(found: tuple[LocalRay, ...], latest: Callable[[], str | None]) -> str:
    given = os.environ.get("RAY_ADDRESS", "")
    if given not in ("", "auto"):
        return given
    joinable = sorted({one.address for one in found if not one.is_of_a_run})
    last = latest()
    if last in joinable or (last is not None and not found):  # where processes cannot be seen, Ray's own file remains
        return str(last)
    if len(joinable) > 1:
        raise UserError(f"cluster.address: auto: several Rays run on this machine; give one of {', '.join(joinable)}")
    if joinable:
        return joinable[0]
    runs = sum(one.is_of_a_run for one in found)
    others = f" but that of {runs} other run{'s' if runs > 1 else ''} of octetrl, which will end it" if runs else ""
    raise UserError(f"cluster.address: auto: no Ray runs on this machine{others}; {REMEDY}")


def _is_same(address: str, host: str, port: str) -> bool:
    own_host, _, own_port = address.rpartition(":")
    if own_port != port:
        return False
    if host in (*_HERE, own_host, socket.gethostname()):
        return True
    with contextlib.suppress(OSError, UnicodeError):
        return socket.gethostbyname(host) in (*_HERE, own_host)
    return False


def _check_answer(host: str, port: int, address: str) -> None:
    """Raises UserError unless a server of HTTP/2 answers. With TLS only the connection is tried."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            connection.settimeout(CONNECT_SECONDS)
            connection.sendall(_PREFACE)
            header = b""
            while len(header) < _FRAME_HEADER and (more := connection.recv(_FRAME_HEADER - len(header))):
                header += more
    except TimeoutError as error:
        why = f"nothing came in {CONNECT_SECONDS:.0f} s"
        raise UserError(f"cluster.address: no Ray answers at {address} ({why}); {REMEDY}") from error
    except (OSError, OverflowError) as error:
        raise UserError(f"cluster.address: no Ray answers at {address} ({error}); {REMEDY}") from error
    if len(header) < _FRAME_HEADER or header[3] != _SETTINGS:
        raise UserError(f"cluster.address: what answers at {address} is not Ray; {REMEDY}")
