"""A child Python process that holds one callable and answers one call at a time.

Rewards run code that we did not write, on text that a policy invented: they hang, crash, print and leak. So
they run here, where a hang ends with a kill. reasoning_gym's generators run here too, for another reason:
some of them iterate over sets of strings, and only a process with a fixed PYTHONHASHSEED gives the same task
in every run.

Wire: pickled messages over a socket pair. Parent: the callable once, then (args) per call. Child: None when
the callable is loaded, then per call `Answer(value=...)` or `Answer(error="ValueError: ... (file.py:12)")`.

The child is a plain `python -c`, not a fork (torch's threads would not survive) and not `multiprocessing` (it
would import the parent's main module). It has a session of its own, so Ctrl-C reaches the parent alone, and
killing its group ends what it started. It leaves when its socket closes, and the kernel kills it with its
parent even while it hangs, so no orphan survives a `kill -9` of the run. What a callable prints goes to
stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_LINUX_PR_SET_PDEATHSIG = 1
_ERROR_LENGTH = 300
_TRACE_LENGTH = 4000
_EXIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one call. `error` is None when the callable returned."""

    value: Any = None
    error: str | None = None
    trace: str | None = None  # the traceback behind `error`, where there is one


class ProcessDied(RuntimeError):
    """The child ended without an answer: it exited, crashed or was killed from outside."""


class CallableProcess:
    """One child process around `function`, started at once and without waiting; use from one thread.

    function: picklable, importable in a fresh interpreter. The child first imports what `function` needs, which may
    take seconds, and then greets; `is_ready` tells whether the greeting was received. The thread that makes the process
    must outlive it: Linux takes a thread's end for the parent's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        payload = pickle.dumps(function)
        ours, theirs = socket.socketpair()
        program = f"from octetrl.environments.process import serve; serve({theirs.fileno()}, {os.getpid()})"
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": _import_path()},
            )
        self.connection = Connection(ours.detach())
        self.is_ready = False
        self._finalizer = weakref.finalize(self, _kill, self._child, self.connection)
        with contextlib.suppress(BrokenPipeError):  # a child that died at once is reported by `receive`
            self.connection.send_bytes(payload)

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, *args: Any) -> None:
        """Begin a call. Raises ProcessDied when the child is gone."""
        try:
            self.connection.send(args)
        except BrokenPipeError as error:
            raise ProcessDied(self._exit_text()) from error

    def receive(self) -> Answer:
        """The answer to the call begun last (or the greeting, when not `is_ready`). Blocks."""
        try:
            answer: Answer = self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise ProcessDied(self._exit_text()) from error
        self.is_ready = self.is_ready or answer.error is None
        return answer

    def call(self, *args: Any) -> Any:
        """A call and its answer. Raises ProcessDied, or RuntimeError with the callable's error."""
        answered = False
        try:
            if not self.is_ready and (greeting := self.receive()).error is not None:
                raise RuntimeError(greeting.error)
            self.send(*args)
            answer = self.receive()
            answered = True
        finally:
            if not answered:  # interrupted in between: a late answer must not be taken for that of the next call
                self.kill()
        if answer.error is not None:
            raise RuntimeError(answer.error)
        return answer.value

    def kill(self) -> None:
        """End the child and all it started, now. Harmless when it has ended."""
        self._finalizer()

    def _exit_text(self) -> str:
        deadline = time.monotonic() + _EXIT_SECONDS
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        _kill_group(self._child)  # what it started, and itself when it lives on without its socket
        code = self._child.wait()
        return f"the process was killed by signal {-code}" if code < 0 else f"the process exited with code {code}"


def serve(descriptor: int, parent_pid: int) -> None:
    """The child's side: load the callable, then answer calls until the parent closes the socket.

    A broad `except`, as only here and in turns/calls.py: whatever a foreign callable raises becomes an answer.
    SystemExit and other BaseExceptions end the process instead, which the parent sees as ProcessDied.
    """
    _die_with(parent_pid)
    with Connection(descriptor) as connection:
        try:
            function = connection.recv()
        except EOFError:
            return
        except Exception as error:
            connection.send(Answer(error=error_line(error), trace=error_trace(error)))
            return
        connection.send(Answer())
        while True:
            try:
                args = connection.recv()
            except EOFError:
                return
            try:
                answer = Answer(value=function(*args))
            except Exception as error:
                answer = Answer(error=error_line(error), trace=error_trace(error))
            try:
                connection.send(answer)
            except (BrokenPipeError, ConnectionResetError):
                return


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_LINUX_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def _import_path() -> str:
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def error_line(error: BaseException) -> str:
    """`ValueError: text (file.py:12)`, where the error was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_ERROR_LENGTH]
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def error_trace(error: BaseException) -> str:
    """The traceback below our own frame; the end of it, where it is long."""
    whole = error.__traceback__
    below = whole.tb_next if whole is not None else None
    return "".join(traceback.format_exception(type(error), error, below or whole)).strip()[-_TRACE_LENGTH:]


def _kill(child: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    if child.returncode is None:  # once it is waited for, its number may be another process's
        _kill_group(child)
        child.wait()


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
