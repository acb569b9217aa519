"""Handles Ctrl-C on the command line, in every command and from the start: one line and exit code 130, no traceback.

While a module is imported, Ctrl-C ends the process at once. A library may turn a KeyboardInterrupt into an error of its
own there (pydantic's core and numpy do). Otherwise the first Ctrl-C raises KeyboardInterrupt, so the command can clean
up. During training the first Ctrl-C waits for the end of the step (system/process.py), and the second arrives here. One
more ends the process at once. The files are then as after a kill, which every file of a run survives. Nothing heavy is
imported here, so the handler is installed within a few hundredths of a second.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

INTERRUPTED = 130
TO_END = 3.0  # seconds for threads that are left
_EXECUTOR = os.path.join("concurrent", "futures", "thread.py")
_CLEAN = b"\r\x1b[J\x1b[?25h"  # without what a live line left there, and with the cursor that it had hidden


class Stopped(BaseException):
    """A command was stopped by Ctrl-C and has its own message. Unlike a KeyboardInterrupt, typer does not catch it."""


class CtrlC:
    """The handler of SIGINT from `install` on."""

    def __init__(self) -> None:
        self._is_last = False

    def install(self) -> None:
        signal.signal(signal.SIGINT, self.on_signal)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._unraisable

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_last or _is_importing(frame):
            end_at_once()
        self._is_last = True
        raise KeyboardInterrupt

    def end_at_next(self) -> None:
        """No cleaning up is left: the next Ctrl-C ends the process."""
        self._is_last = True

    def finish(self, code: int, *, was_stopped: bool) -> None:
        """The process is about to end, and further signals change nothing. While the interpreter shuts down it has no
        handlers, and it may end by SIGINT if the KeyboardInterrupt came within an `exec`; so a command that was stopped
        ends here, with its exit code."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threads = [] if was_stopped else _threads_that_stay()
        if threads:
            print(f"octetrl: ended with threads that still ran: {', '.join(threads)}", file=sys.stderr)
        if was_stopped or threads:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _unraisable(self, what: Any) -> None:
        """Repeat a KeyboardInterrupt that was raised where nothing can be raised (in a `__del__`)."""
        if what.exc_type is KeyboardInterrupt:
            _thread.interrupt_main()
        else:
            self._hook(what)


def _threads_that_stay() -> list[str]:
    """Names of threads for which the interpreter would wait for ever, such as one that a user's module started. They
    have `TO_END` seconds to end."""
    until = time.monotonic() + TO_END
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    while time.monotonic() < until and any(map(_is_busy, others)):
        time.sleep(0.01)
    return [thread.name for thread in others if _is_busy(thread)]


def _is_busy(thread: threading.Thread) -> bool:
    """Not so is a thread of an executor that waits for work: the interpreter itself ends it."""
    frame = sys._current_frames().get(thread.ident or 0)
    code = None if frame is None else frame.f_code
    waits = code is not None and code.co_name == "_worker" and code.co_filename.endswith(_EXECUTOR)
    return thread.is_alive() and not waits


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def end_at_once() -> None:
    ray = sys.modules.get("octetrl.workers.ray_cluster")
    stopped_at_once = getattr(ray, "stopped_at_once", None)  # None also where its import was interrupted
    if stopped_at_once is not None:
        stopped_at_once()
    os.write(2, (_CLEAN if os.isatty(2) else b"\n") + b"octetrl: stopped at once\n")
    os._exit(INTERRUPTED)


def clear_screen() -> None:
    """End a live line wherever its command was stopped, so that the next line on the terminal stands alone."""
    console = sys.modules.get("octetrl.telemetry.console")
    if console is not None:
        console.leave_screen()
    if os.isatty(2):
        sys.stderr.flush()
        os.write(2, _CLEAN)


def is_of_ctrl_c(error: BaseException) -> bool:
    """Whether the error is a KeyboardInterrupt, or was caused by one."""
    seen: set[int] = set()  # causes may form a circle
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, KeyboardInterrupt):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False
