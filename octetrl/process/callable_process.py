"""A child Python process that holds one callable and answers one call at a time.

Rewards run foreign code on text that a policy wrote: they may hang, crash, print and leak memory. In a process of its
own a call that hangs can be killed. reasoning_gym's generators run here for another reason: some of them iterate over
sets of strings, and only a process with a fixed PYTHONHASHSEED gives the same task in every run.

The child's side is `keeper.py`: a worker that runs the callable, and a keeper that ends all processes that the callable
leaves running. The worker's answers are read as plain data (`plain_data.py`), never as a pickle. So code that takes
over a worker can choose its answers, but cannot run anything in the parent. An answer must have the number of the
current call. The kernel names the process that sent it; messages from children of the worker are ignored.

The child is a plain `python -c`. A fork would lose torch's threads, and `multiprocessing` would import the parent's
main module. The child has a session of its own, so Ctrl-C reaches only the parent. It ends with its parent even while
the callable hangs, so no process survives a `kill -9` of the run. Output of the callable goes to stderr.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from octetrl.process.keeper import LONGEST_ANSWER, LOST_SOCKET
from octetrl.process.plain_data import from_text
from octetrl.system.errors import UserError

Cause = Literal["raised", "memory", "user"]
_CREDENTIALS = struct.Struct("iII")  # of the sender: process, user, group
_READS = 64  # most reads of one `take`, so that messages from other processes cannot block the caller
_SEND_SECONDS = 30.0
_REPORT_SECONDS = 1.0  # to wait for the report of a keeper whose worker has closed its socket
_END_SECONDS = 5.0  # to wait for a keeper that was told to end


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
        control, theirs = socket.socketpair()
        if sys.platform == "linux":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        arguments = f"{data.fileno()}, {theirs.fileno()}, {os.getpid()}, {memory_mib or 0}"
        with data, theirs:
            child = subprocess.Popen(
                [sys.executable, "-c", f"from octetrl.process.keeper import keep; keep({arguments})"],
                pass_fds=[data.fileno(), theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": _import_path()},
            )
        self._keeper = _Keeper(child, control)
        self._finalizer = weakref.finalize(self, _end, self._keeper, self._socket)
        self._calls = itertools.count(1)
        self._call = 0  # number of the call whose answer is awaited; 0: the greeting
        self._buffer = bytearray()
        self.is_ready = False
        self.started = time.monotonic()
        with contextlib.suppress(ProcessDied):  # a child that died at once is reported by `take`
            self._write(payload)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._keeper.worker()

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
            _wait(self, select.POLLIN, left)
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
        rest = memoryview(len(data).to_bytes(8, "big") + data)
        deadline = time.monotonic() + _SEND_SECONDS
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self.kill()
                    raise ProcessDied(f"the process read nothing for {_SEND_SECONDS:g} s") from None
                _wait(self, select.POLLOUT, 1.0)
            except OSError as error:
                raise self._death() from error

    def _whole_answer(self) -> Answer | None:
        """The first answer in the buffer that belongs to the running call."""
        while len(self._buffer) >= 8:
            size = int.from_bytes(self._buffer[:8], "big")
            if size > LONGEST_ANSWER:
                self.kill()
                raise ProcessDied(f"the process sent {size:,} bytes for an answer; {LONGEST_ANSWER:,} are allowed")
            if len(self._buffer) < 8 + size:
                return None
            frame = bytes(self._buffer[8 : 8 + size])
            del self._buffer[: 8 + size]
            try:
                call, answer = _read_answer(frame)
            except ValueError as error:
                self.kill()
                raise ProcessDied(f"the process sent what is no answer ({str(error)[:100]})") from error
            if call == self._call:
                self.is_ready = self.is_ready or answer.error is None
                return answer
        return None

    def _death(self) -> ProcessDied:
        report = self._keeper.report()
        self.kill()
        if report.memory_mib:
            text = f"its processes held {report.memory_mib:,} MiB"
            return ProcessDied(text, memory_mib=report.memory_mib)
        if report.code is None:
            return ProcessDied(report.text, signal=report.signal)
        if report.code == LOST_SOCKET:
            return ProcessDied("the process closed descriptors that were not its own")
        if report.code < 0:
            return ProcessDied(f"the process was killed by signal {-report.code}", signal=-report.code)
        return ProcessDied(f"the process exited with code {report.code}")


@dataclass(frozen=True, slots=True)
class _Report:
    """How a worker ended. code: its exit code, or minus the signal's number; None: `text` describes the end."""

    code: int | None = None
    memory_mib: int = 0
    text: str = ""
    signal: int = 0  # that ended its keeper


class _Keeper:
    """The run's handle on a keeper. Its messages are checked like those of the worker, because a worker has the rights
    to take over its keeper."""

    def __init__(self, child: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._child, self._control = child, control
        self._worker: int | None = None
        self._said = b""

    def worker(self) -> int:
        """The worker's process id; 0 if no worker was started."""
        if self._worker is None:
            self._worker = _number(self._line(_SEND_SECONDS), "worker") or 0
        return self._worker

    def report(self) -> _Report:
        """Wait for the keeper's report, which it sends after the end of its worker."""
        line = self._line(_REPORT_SECONDS) if self.worker() else b""
        if not line and self._worker and (state := _state_of(self._worker)) in ("", "Z", "X"):
            line = self._line(_SEND_SECONDS if state else _REPORT_SECONDS)  # it has ended; the keeper lacks a core
        if line:
            return _Report(
                _number(line, "code"), _number(line, "memory_mib") or 0, "the process was ended", signal.SIGKILL
            )
        code = self._child.poll()
        if code is None:
            return _Report(text="the process closed its connection and still runs")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return _Report(text=f"the process that keeps the worker {how}", signal=max(0, -code))

    def end(self) -> None:
        """End the keeper, and with it all processes below it; kill it if it does not answer."""
        if self._child.returncode is not None:  # the kernel may have given its number to another process
            return
        with contextlib.suppress(OSError):  # it has ended
            self._control.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _END_SECONDS
        while self._heard(deadline - time.monotonic()):
            pass
        try:
            self._child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._child.kill()  # the kernel then kills the worker
        if self._child.wait() != 0 and self._worker:  # it could not clean up
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._worker, signal.SIGKILL)
        self._control.close()

    def _line(self, seconds: float) -> bytes:
        """The next line; empty if none arrives in time."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._said:
            if not self._heard(deadline - time.monotonic()):
                return b""
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _heard(self, seconds: float) -> bool:
        """Read what the keeper sends next. Returns whether anything arrived in time."""
        if seconds <= 0 or self._control.fileno() < 0 or len(self._said) > 1 << 16:
            return False
        self._control.settimeout(seconds)
        try:
            data = self._control.recv(4096)
        except OSError:  # the time is over, or the keeper has ended
            return False
        self._said += data
        return bool(data)


def _state_of(pid: int) -> str:
    """The letter of /proc for a process's state. Empty if it has ended, or where /proc does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _wait(process: CallableProcess, event: int, seconds: float) -> None:
    poll = select.poll()  # select() accepts only descriptors below 1024
    poll.register(process, event)
    poll.poll(seconds * 1000)


def _end(keeper: _Keeper, data: socket.socket) -> None:
    data.close()
    keeper.end()


def _number(line: bytes, name: str) -> int | None:
    try:
        found = json.loads(line)[name]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found, int) else None


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
