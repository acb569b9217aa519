"""A child Python process that holds one callable and answers one call at a time.

Rewards run foreign code on text that a policy wrote: they may hang, crash, print and leak memory. In a process of its
own a call that hangs can be killed. reasoning_gym's generators run here for another reason: some of them iterate over
sets of strings, and only a process with a fixed PYTHONHASHSEED gives the same task in every run.

The child's side is `worker.py`: a worker that runs the callable, and a supervisor (`supervisor.py`) that ends all
processes that the callable leaves running. The worker's answers are read as plain data (`plain_data.py`), never as a
pickle. So code that takes over a worker can choose its answers, but cannot run anything in the parent. An answer must
have the number of the current call. The kernel names the process that sent it; messages from children of the worker are
ignored.

The supervisor is a plain `python -c`. A fork would lose torch's threads, and `multiprocessing` would import the
parent's main module. It has a session of its own, so Ctrl-C reaches only the parent. It ends with its parent even while
the callable hangs, so no process survives a `kill -9` of the run. Output of the callable goes to stderr.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octetrl.process.plain_data import LONGEST_MESSAGE, framed, from_text, take_frame
from octetrl.process.supervised import Supervised
from octetrl.process.worker import LOST_SOCKET
from octetrl.system.errors import UserError

Cause = Literal["raised", "memory", "user"]
_CREDENTIALS = struct.Struct("iII")  # of the sender: process, user, group
_READS = 64  # most reads of one `take`, so that messages from other processes cannot block the caller
_SEND_SECONDS = 30.0
_REPORT_SECONDS = 1.0  # to wait for the report of a supervisor whose worker has closed its socket


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one call. `error` is None if the callable returned."""

    value: Any = None
    error: str | None = None
    trace: str | None = None  # the traceback behind `error`, where there is one
    cause: Cause = "raised"  # of the error: any exception, a MemoryError, a UserError


class ProcessDied(RuntimeError):
    """The child ended without an answer: it exited, crashed or was killed."""

    def __init__(self, text: str, *, signal: int = 0, memory_mib: int | None = None) -> None:
        super().__init__(text)
        self.signal = signal  # that ended it, perhaps from outside; 0: none
        self.memory_mib = memory_mib  # its memory when it exceeded the limit; None: it did not


class NoAnswer(RuntimeError):
    """There was no answer in time."""


class CallFailed(RuntimeError):
    """The callable raised."""


class CallableProcess:
    """One child process that runs `function`. The constructor starts it and does not wait. Use it from one thread.

    function: picklable, and importable in a fresh interpreter. The child first imports what `function` needs, which may
    take seconds, and then sends a greeting; `is_ready` says whether the greeting was received. memory_mib: memory limit
    of the child with all processes that it starts; None: no limit. The thread that creates the process must outlive it:
    for Linux, the end of this thread is the end of the parent.
    """

    def __init__(self, function: Callable[..., Any], *, memory_mib: int | None = None) -> None:
        payload = pickle.dumps(function)
        self._socket, data = socket.socketpair()
        if sys.platform == "linux":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        with data:
            self._supervised = Supervised(
                [sys.executable, "-c", "from octetrl.process.worker import main; main()", type(function).__name__],
                [data],
                stdout=2,
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": _import_path()},
            )
            order = {"data": data.fileno(), "parent": os.getpid(), "memory_bytes": (memory_mib or 0) << 20}
            self._supervised.order(order, _SEND_SECONDS)
        self._worker: int | None = None
        self._finalizer = weakref.finalize(self, _end, self._supervised, self._socket)
        self._calls = itertools.count(1)
        self._call = 0  # number of the call whose answer is awaited; 0: the greeting
        self._buffer = bytearray()
        self.is_ready = False
        self.started = time.monotonic()
        with contextlib.suppress(ProcessDied):  # a child that died at once is reported by `take`
            self._write(payload)

    @property
    def pid(self) -> int:
        """Process id of the worker; 0 if none was started."""
        if self._worker is None:
            started = (self._supervised.message(_SEND_SECONDS) or {}).get("started")
            self._worker = started if isinstance(started, int) and started > 1 else 0
            self._supervised.group = self._worker
        return self._worker

    @property
    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds the worker. False where /proc does not say."""
        return _state_of(self.pid) == "T"

    def fileno(self) -> int:
        """The socket's descriptor, for selectors: it is readable if there is something to `take`."""
        return self._socket.fileno()

    def send(self, *args: Any) -> None:
        """Start a call. Raises ProcessDied if the child has exited."""
        self._call = next(self._calls)
        self._write(pickle.dumps((self._call, args)))

    def take(self) -> Answer | None:
        """The answer to the last call (or the greeting, if not `is_ready`), or None if it is not complete. Does not
        wait. Raises ProcessDied."""
        for _ in range(_READS):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return None
            except OSError as error:  # reset, or closed by `kill`
                raise self._death() from error
            if not data:
                raise self._death()
            if _is_from(ancillary, self.pid):
                self._buffer += data
                if (answer := self._whole_answer()) is not None:
                    return answer
        return None

    def receive(self, seconds: float) -> Answer:
        """Wait for the result of `take`. Raises ProcessDied, or NoAnswer after `seconds`; the call then still
        runs."""
        deadline = time.monotonic() + seconds
        while (answer := self.take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NoAnswer(f"no answer in {seconds:g} s")
            poll = select.poll()  # select() accepts only descriptors below 1024
            poll.register(self, select.POLLIN)
            poll.poll(left * 1000)
        return answer

    def call(self, *args: Any, seconds: float) -> Any:
        """Make a call and return its result. `seconds` limits the call, and before the first call the greeting. Raises
        ProcessDied, NoAnswer, UserError if the callable raises it, and CallFailed for its other exceptions. Without an
        answer the child is ended."""
        answered = False
        try:
            if not self.is_ready:
                _value(self.receive(seconds))
            self.send(*args)
            answer = self.receive(seconds)
            answered = True
        finally:
            if not answered:
                self.kill()
        return _value(answer)

    def kill(self) -> None:
        """End the child and all processes that it started. Does nothing if they have ended."""
        self._finalizer()

    def _write(self, data: bytes) -> None:
        try:
            self._socket.settimeout(_SEND_SECONDS)
            self._socket.sendall(framed(data))
            self._socket.setblocking(False)
        except TimeoutError:
            self.kill()
            raise ProcessDied(f"the process read nothing for {_SEND_SECONDS:g} s") from None
        except OSError as error:
            raise self._death() from error

    def _whole_answer(self) -> Answer | None:
        """The first answer in the buffer that belongs to the running call."""
        try:
            while (frame := take_frame(self._buffer, LONGEST_MESSAGE)) is not None:
                call, answer = _read_answer(frame)
                if call == self._call:
                    self.is_ready = self.is_ready or answer.error is None
                    return answer
        except ValueError as error:
            self.kill()
            raise ProcessDied(f"the process sent what is no answer ({str(error)[:100]})") from error
        return None

    def _death(self) -> ProcessDied:
        """How the worker ended. Its supervisor's messages are checked like its own, because a worker has the rights to
        take over its supervisor."""
        report = self._supervised.message(_REPORT_SECONDS) if self.pid else None
        if report is None and self.pid and _state_of(self.pid) in ("", "Z", "X"):
            report = self._supervised.message(_SEND_SECONDS)  # it has ended; the supervisor lacks a core, or is busy
        code = self._supervised.exit_code(0.1) if report is None else None
        self.kill()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return ProcessDied(f"the process that keeps the worker {how}", signal=max(0, -code))
        match report:
            case None:
                return ProcessDied("the process closed its connection and still runs")
            case {"stopped": "memory_limit", "memory_bytes": int(held)}:
                mib = -(-held >> 20)
                return ProcessDied(f"its processes held {mib:,} MiB", memory_mib=mib)
            case {"exit": code} if code == LOST_SOCKET:
                return ProcessDied("the process closed descriptors that were not its own")
            case {"exit": int(code)} if code < 0:
                return ProcessDied(f"the process was killed by signal {-code}", signal=-code)
            case {"exit": int(code)}:
                return ProcessDied(f"the process exited with code {code}")
        return ProcessDied("the process was ended", signal=signal.SIGKILL)


def _state_of(pid: int) -> str:
    """The letter of /proc for a process's state. Empty if it has ended, or where /proc does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _end(supervised: Supervised, data: socket.socket) -> None:
    data.close()
    supervised.end()


def _read_answer(frame: bytes) -> tuple[int, Answer]:
    """Call number and answer in a frame. Raises ValueError if the frame has another form."""
    match from_text(frame):
        case {"call": int(call), "error": str(error), "cause": cause, **rest} if cause in get_args(Cause):
            trace = rest.get("trace")
            return call, Answer(error=error, trace=trace if isinstance(trace, str) else None, cause=cause)
        case {"call": int(call), **rest} if rest.keys() <= {"value"}:
            return call, Answer(rest.get("value"))
    raise ValueError("it has other parts")


def _value(answer: Answer) -> Any:
    if answer.error is None:
        return answer.value
    raise UserError(answer.error) if answer.cause == "user" else CallFailed(answer.error)


def _is_from(ancillary: Sequence[tuple[int, int, bytes]], worker: int) -> bool:
    """Whether the worker sent the message, according to the kernel. On systems that don't name the sender: True."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and len(data) == _CREDENTIALS.size:
            return bool(_CREDENTIALS.unpack(data)[0] == worker)
    return sys.platform != "linux"


def _import_path() -> str:
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)
