"""A worker: the child of a supervisor that loads a callable and answers calls of it, one at a time.

`main` is the program that `callable_process.py` starts. It forks the worker before the callable is loaded, so the
supervisor costs a few milliseconds and MB. The worker has the data socket, and the supervisor the lifeline.

Data socket, to the worker: frames of eight bytes of length and a pickle; the first is the callable, the others are
(call, args). From the worker: frames of JSON, {"call", "value", "error", "trace", "cause"}; call 0 is the greeting,
sent when the callable is loaded.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

from octetrl.process.kernel import die_with_parent
from octetrl.process.plain_data import LONGEST_MESSAGE, read_frame, to_text, write_frame
from octetrl.process.supervisor import Supervisor, print_error, receive_order, send
from octetrl.process.usage import lists_children
from octetrl.system.errors import UserError, error_line, error_trace
from octetrl.system.process import uncollected

LOST_SOCKET = 113
"""Exit code of a worker whose data socket was closed, or replaced by another file, by the callable."""
_OUTPUT_BYTES = 1 << 20


def main() -> None:
    """Supervise a worker. The order has `data` (descriptor), `parent` (the run's process) and `memory_bytes` (0: no
    limit)."""
    lifeline = int(sys.argv[-1])
    del sys.argv[1:]  # what the callable runs may look at it
    order = receive_order(lifeline)
    if order is None:
        return
    limits = {"output_bytes": _OUTPUT_BYTES} | ({"memory_bytes": most} if (most := order["memory_bytes"]) else {})
    supervisor = Supervisor(lifeline, limits, is_worker=True)
    if sys.platform == "linux":
        die_with_parent(signal.SIGTERM)  # a signal that the supervisor handles, so that it can end the others
    if os.getppid() != order["parent"]:
        return
    if most and not lists_children():
        print_error(b"octetrl: this system lists no children of processes: a reward's memory has no limit\n")
    data = order["data"]
    if supervisor.start(lambda: os.set_inheritable(data, False)):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        _serve(_Link(data))
        os._exit(0)
    os.close(data)
    send(lifeline, supervisor.watch())
    os._exit(0)


def _serve(link: _Link) -> None:
    """Load the callable, then answer calls until the run closes the socket.

    The `except` is broad: any exception of a foreign callable is an answer, including SystemExit and KeyboardInterrupt.
    """
    payload = link.read()
    if payload is None:
        return
    try:
        with uncollected():
            function: Callable[..., Any] = pickle.loads(payload)
    except BaseException as error:
        link.write(_failure(0, error))
        return
    link.write({"call": 0})
    while (frame := link.read()) is not None:
        call, args = pickle.loads(frame)
        try:
            answer = {"call": call, "value": function(*args)}
        except BaseException as error:
            answer = _failure(call, error)
        link.write(answer)


def _failure(call: int, error: BaseException) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"call": call, "error": " ".join(str(error).split()), "cause": "user"}
    cause = "memory" if isinstance(error, MemoryError) else "raised"
    return {"call": call, "error": error_line(error), "trace": error_trace(error), "cause": cause}


class _Link:
    """The worker's end of the data socket. Before each use it checks process and socket: the callable may have closed
    descriptors that it did not open, or may have forked, so that its child returned here."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._identity = self._file()
        self._ahead = bytearray()

    def read(self) -> bytes | None:
        """The next frame; None if the run has closed the socket."""
        self._check()
        return read_frame(self._descriptor, self._ahead)

    def write(self, answer: dict[str, Any]) -> None:
        self._check()
        try:
            text = to_text(answer).encode()
            if len(text) > LONGEST_MESSAGE:
                raise ValueError(f"an answer of {len(text):,} bytes; {LONGEST_MESSAGE:,} are allowed")
        except (TypeError, ValueError, RecursionError) as error:
            text = to_text(_failure(answer["call"], error)).encode()
        try:
            write_frame(self._descriptor, text)
        except (BrokenPipeError, ConnectionResetError):  # the run has closed it
            os._exit(0)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            os.write(2, b"octetrl: a child that the callable forked came back from it; it ends, and gives no answer\n")
            os._exit(0)
        if self._file() != self._identity:
            os._exit(LOST_SOCKET)

    def _file(self) -> tuple[int, int] | None:
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino
