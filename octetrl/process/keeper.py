"""The child's side of `process.py`: a keeper, and below it a worker. Only the worker runs foreign code.

    run -- keeper (adopts orphans) -- worker (a session of its own) -- whatever the callable starts

The keeper forks the worker before anything is imported, so a keeper costs a millisecond and a few MB. The worker loads
the callable and sends its answers directly to the run, over the data socket. The keeper

- ends all processes below it when the worker ends, when the run asks for it, and when the run itself has ended. It
  kills the worker's group first, then every descendant, also those in sessions of their own and without parents;
- adds up their memory and ends them if it exceeds the limit;
- forwards their output, up to `_OUTPUT_BYTES` per process, so that it fills neither a disk nor a terminal;
- reports how it ended over the control socket, which the worker does not have.

Data socket, to the worker: frames of eight bytes of length and a pickle; the first is the callable, the others are
(call, args). From the worker: frames of JSON, {"call", "value", "error", "trace", "cause"}; call 0 is the greeting,
sent when the callable is loaded. Control socket, from the keeper: a line {"worker": pid}, and at the end a line
{"code", "memory_mib"}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from octetrl.process.linux import adopt_orphans, die_with_parent
from octetrl.process.watch import lists_children, memory_bytes, processes
from octetrl.system.imports import uncollected

LOST_SOCKET = 113
"""Exit code of a worker whose data socket was closed, or replaced by another file, by the callable."""
LONGEST_ANSWER = 64 << 20  # bytes of a frame
_MIB = 1 << 20
_OUTPUT_BYTES = 1 * _MIB
_PIECE = 4096  # bytes that a pipe accepts without blocking if it polls as writable
_END_SECONDS = 10.0
_LEAVE_SECONDS = 0.5  # for descendants that clean up when the worker has ended
_WARDEN_SECONDS = 3.0  # for sandboxes, which remove their folders, on a machine that is short of cores
_WARDEN = b"octetrl.process.warden"  # in the command line of a sandbox
_LONGEST_PAUSE, _SHORTEST_PAUSE = 0.25, 0.01
_FASTEST_FILL = 8 << 30  # largest expected growth of memory, in bytes per second


def keep(data: int, control: int, parent_pid: int, limit_mib: int) -> None:
    """Fork the worker, watch it, and end all its processes. limit_mib: 0 for no limit. Does not return."""
    os.set_inheritable(control, False)
    wakes_read, wakes_write = os.pipe()
    for descriptor in (wakes_read, wakes_write):
        os.set_blocking(descriptor, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _noted)
    signal.set_wakeup_fd(wakes_write, warn_on_full_buffer=False)
    if sys.platform == "linux":
        die_with_parent(signal.SIGTERM)  # a signal that the keeper handles, so that it can end the others
        adopt_orphans()
    if os.getppid() != parent_pid:
        os._exit(1)
    if limit_mib and not lists_children():
        _print(b"octetrl: this system lists no children of processes: a reward's memory has no limit\n")
    output_read, output_write = os.pipe()
    keeper_pid = os.getpid()
    worker = os.fork()
    if worker == 0:
        for descriptor in (control, wakes_read, output_read):
            os.close(descriptor)
        signal.set_wakeup_fd(-1)
        os.close(wakes_write)
        os.set_inheritable(data, False)
        _become_worker(keeper_pid, output_write)
        _serve(data)
        os._exit(0)
    os.close(data)
    os.close(output_write)
    os.write(control, json.dumps({"worker": worker}).encode() + b"\n")
    _Keeper(worker, control, wakes_read, output_read, limit_mib * _MIB).run()
    os._exit(0)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the wake-up descriptor receives the signal's number."""


class _Keeper:
    def __init__(self, worker: int, control: int, wakes: int, output: int, limit: int) -> None:
        self._worker, self._control, self._wakes, self._output = worker, control, wakes, output
        self._limit = limit  # bytes; 0: none
        self._printed = 0
        self._poll = select.poll()
        for descriptor in (control, wakes, output):
            self._poll.register(descriptor, select.POLLIN)
        os.set_blocking(output, False)

    def run(self) -> None:
        """Watch until the worker ends, exceeds its memory limit, or the run asks to end it."""
        code, memory, due = None, 0, 0.0
        while code is None:
            if self._limit and time.monotonic() >= due:
                memory = memory_bytes(processes(), self._limit)
                if memory > self._limit:
                    break
                pause = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, (self._limit - memory) / _FASTEST_FILL))
                due = time.monotonic() + pause
            wait = max(1.0, (due - time.monotonic()) * 1000) if self._limit else None
            ready = [descriptor for descriptor, _ in self._poll.poll(wait)]
            if self._output in ready:
                self._pass_on()
            if self._control in ready or (self._wakes in ready and signal.SIGTERM in os.read(self._wakes, 4096)):
                break
            code = self._reap()
        over = memory if self._limit and memory > self._limit else 0
        with contextlib.suppress(OSError):  # the run has ended or closed the socket
            os.write(self._control, json.dumps({"code": code, "memory_mib": -(-over // _MIB)}).encode() + b"\n")
        self._end(code is not None)
        while self._pass_on():
            pass

    def _reap(self) -> int | None:
        """Reap orphans that have ended. Returns the worker's exit code (or minus the signal) if it has ended. The
        worker stays a zombie, so that its process id keeps identifying its group."""
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            if ended.si_pid == self._worker:
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            os.waitpid(ended.si_pid, 0)

    def _end(self, has_ended: bool) -> None:
        """Kill the worker's group with one signal, which a fork bomb can't outrun; then, one by one, processes that
        left the group."""
        try:
            os.killpg(self._worker, signal.SIGKILL)
        except ProcessLookupError:  # it has not created its group yet
            if not has_ended:
                os.kill(self._worker, signal.SIGKILL)
        started = time.monotonic()
        while (waited := time.monotonic() - started) < _END_SECONDS:
            if waited > _LEAVE_SECONDS:
                for pid in processes():
                    if waited > _WARDEN_SECONDS or not _is_warden(pid):
                        _kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.001)

    def _pass_on(self) -> bool:
        """Forward the worker's output. Returns whether there was any."""
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._poll_no_more()
            return False
        room = _OUTPUT_BYTES - self._printed
        self._printed += len(data)
        if room > 0:
            _print(data[:room])
            if self._printed >= _OUTPUT_BYTES:
                said = f"process {self._worker} printed {_OUTPUT_BYTES >> 20} MiB; what more it prints is left out"
                _print(f"\noctetrl: {said}\n".encode())
        return True

    def _poll_no_more(self) -> None:
        try:
            self._poll.unregister(self._output)
        except KeyError:  # already
            return


def _is_warden(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            return _WARDEN in words.read()
    except OSError:  # it has ended
        return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, or belongs to another user
        os.kill(pid, signal.SIGKILL)


def _print(data: bytes) -> None:
    """Write to stderr without ever blocking: a blocked keeper would not watch its worker."""
    writable = select.poll()
    writable.register(2, select.POLLOUT)
    for start in range(0, len(data), _PIECE):
        if not writable.poll(20):
            return
        try:
            os.write(2, data[start : start + _PIECE])
        except OSError:  # stderr has no reader any more
            return


# ---------------------------------------------------------------- the worker


def _become_worker(keeper_pid: int, output: int) -> None:
    """Create a session, whose group can be killed; end together with the keeper; redirect stdout and stderr to it."""
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    if sys.platform == "linux":
        die_with_parent(signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel kills this process before the run
    if os.getppid() != keeper_pid:
        os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _serve(descriptor: int) -> None:
    """Load the callable, then answer calls until the run closes the socket.

    The `except` is broad: any exception of a foreign callable is an answer, including SystemExit and KeyboardInterrupt.
    """
    import pickle

    link = _Link(descriptor)
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
    from octetrl.process.tracebacks import error_line, error_trace
    from octetrl.system.errors import UserError

    if isinstance(error, UserError):
        return {"call": call, "error": " ".join(str(error).split()), "cause": "user"}
    cause = "memory" if isinstance(error, MemoryError) else "raised"
    return {"call": call, "error": error_line(error), "trace": error_trace(error), "cause": cause}


class _Link:
    """The worker's end of the data socket. Before each use it checks process and socket: the callable may have closed
    descriptors that it did not open, or may have forked, so that its child returned here."""

    def __init__(self, descriptor: int) -> None:
        from octetrl.process.plain_data import to_text

        self._to_text = to_text
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._identity = self._found()
        self._ahead = bytearray()

    def read(self) -> bytes | None:
        """The next frame; None if the run has closed the socket."""
        self._check()
        if not self._has(8):
            return None
        size = int.from_bytes(self._ahead[:8], "big")
        if not self._has(8 + size):
            return None
        frame = bytes(self._ahead[8 : 8 + size])
        del self._ahead[: 8 + size]
        return frame

    def write(self, answer: dict[str, Any]) -> None:
        self._check()
        try:
            frame = self._to_text(answer).encode()
            if len(frame) > LONGEST_ANSWER:
                raise ValueError(f"an answer of {len(frame):,} bytes; {LONGEST_ANSWER:,} are allowed")
        except (TypeError, ValueError, RecursionError) as error:
            frame = self._to_text(_failure(answer["call"], error)).encode()
        data = memoryview(len(frame).to_bytes(8, "big") + frame)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except (BrokenPipeError, ConnectionResetError):  # the run has closed it
            os._exit(0)

    def _has(self, size: int) -> bool:
        """Read until `size` bytes are buffered. Returns False if the socket ends before."""
        while len(self._ahead) < size:
            try:
                part = os.read(self._descriptor, 1 << 16)
            except ConnectionResetError:
                return False
            if not part:
                return False
            self._ahead += part
        return True

    def _check(self) -> None:
        if os.getpid() != self._pid:
            os.write(2, b"octetrl: a child that the callable forked came back from it; it ends, and gives no answer\n")
            os._exit(0)
        if self._found() != self._identity:
            os._exit(LOST_SOCKET)

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return None
        return found.st_dev, found.st_ino
