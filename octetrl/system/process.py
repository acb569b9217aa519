"""Signals that end a command, and imports of large libraries.

SIGTERM, SIGUSR1 and SIGQUIT end a command with one line. Where there is something to clean up, they raise `Terminated`,
as Ctrl-C raises KeyboardInterrupt; before, as while modules are imported, they end the process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from octetrl.system.errors import TERMINATED, Terminated

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT)  # a scheduler's warnings, and Ctrl-\\
_raised: dict[int, str] = {}  # the process in which a signal raised Terminated, and the signal's name


class EndingHandler:
    """Handles these signals in this process. A second signal ends the process, and the first one a forked process.

    raises: raise `Terminated`. Otherwise end the process with one line."""

    def __init__(self, *, raises: bool) -> None:
        self.raises, self._process = raises, os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._process:
            os.kill(os.getpid(), number)
        by = signal.Signals(number).name
        if self.raises:
            raise_terminated(by)
        os.write(2, f"octetrl: stopped by {by}\n".encode())
        os._exit(TERMINATED)


def end_at_once() -> None:
    """Let these signals end the process, from the start of a command until something is to be cleaned up."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, EndingHandler(raises=False))


def raise_terminated(by: str) -> NoReturn:
    """Raise Terminated in a handler of the signal of that name."""
    _raised[os.getpid()] = by
    raise Terminated(by)


def ending_signal(error: BaseException) -> str | None:
    """The name of the signal, if the error is Terminated or what became of it: Ray makes a plain SystemExit of one that
    is raised within a call of its own."""
    if isinstance(error, Terminated):
        return error.by
    return _raised.get(os.getpid()) if isinstance(error, SystemExit) else None


@contextmanager
def terminable() -> Iterator[None]:
    """In the main thread, these signals raise Terminated meanwhile, unless the process has handlers of its own."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may set a handler
    before = {number: signal.getsignal(number) for number in ENDING}
    ours = [number for number, one in before.items() if isinstance(one, EndingHandler) and not one.raises]
    free = [*ours, *(number for number, one in before.items() if one in (signal.SIG_DFL, None))]
    if not in_main_thread or not free:
        yield
        return
    for number in free:
        signal.signal(number, EndingHandler(raises=True))
    _raised.clear()
    try:
        yield
    except SystemExit as error:
        by = ending_signal(error)
        if isinstance(error, Terminated) or by is None:
            raise
        raise Terminated(by) from error
    finally:
        for number in free:
            signal.signal(number, before[number] or signal.SIG_DFL)
        _raised.clear()


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause garbage collection while modules are imported, and leave them out of every later one.

    Collections would take a fifth of the import's time and free nothing: modules stay as long as the process. A
    process that has PyTorch already, or collects no garbage, is left as it is."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
