"""The run's handle on a supervisor (`supervisor.py`): starts it, gives it an order, reads its messages and ends it.

A supervisor of foreign code may be taken over by that code. So its messages are read as plain JSON, and at most
LONGEST_MESSAGE bytes of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octetrl.process.plain_data import LONGEST_MESSAGE, framed, take_frame

_END_SECONDS = 15.0  # to wait for a supervisor whose lifeline is closed


class Supervised:
    """A supervisor process, and below it one child. The constructor starts it and does not wait; `end` ends both.

    command: of a Python that runs the supervisor's `main`; the lifeline's descriptor is added as its last argument.
    sockets: those that the child gets. options: more of `subprocess.Popen`. Raises OSError if it can't be started."""

    def __init__(self, command: Sequence[str], sockets: Iterable[socket.socket], **options: Any) -> None:
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *(end.fileno() for end in sockets)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                **options,
            )
        self._received = bytearray()
        self.group = 0  # the child's process group, which is killed if the supervisor could not do it

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, order: Mapping[str, Any], seconds: float) -> None:
        """Send the order. A supervisor that does not read it has ended, or sends no message."""
        self._lifeline.settimeout(seconds)
        with contextlib.suppress(OSError):
            self._lifeline.sendall(framed(json.dumps(order).encode()))

    def message(self, seconds: float) -> dict[str, Any] | None:
        """The next message. None: there is none in time, the supervisor has ended, or it sent something else."""
        deadline = time.monotonic() + seconds
        try:
            while (frame := take_frame(self._received, LONGEST_MESSAGE)) is None:
                if not self._receive(deadline - time.monotonic()):
                    return None
            message = json.loads(frame)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def exit_code(self, seconds: float) -> int | None:
        """The supervisor's exit code, or minus the signal that ended it; None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> str:
        """Close the lifeline and wait until the supervisor has ended everything; kill it if it does not. Returns its
        stderr, if that is a pipe."""
        with contextlib.suppress(OSError):  # it has ended
            self._lifeline.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _END_SECONDS
        while self._receive(deadline - time.monotonic()):
            pass
        try:
            _, said = self._process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the kernel then kills the child
            _, said = self._process.communicate()
        if self._process.returncode != 0 and self.group:  # it could not clean up
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)
        self._lifeline.close()
        return (said or b"").decode("utf-8", "replace")

    def _receive(self, seconds: float) -> bool:
        """Read once. Returns whether anything arrived in time."""
        if seconds <= 0 or self._lifeline.fileno() < 0:
            return False
        self._lifeline.settimeout(seconds)
        try:
            data = self._lifeline.recv(1 << 16)
        except OSError:  # the time is over, or the supervisor has ended
            return False
        self._received += data
        return bool(data)
