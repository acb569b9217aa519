"""SIGTERM, SIGUSR1 and SIGQUIT end a command with one line. Where there is something to clean up, they raise
`Terminated`, as Ctrl-C raises KeyboardInterrupt; before, as while modules are imported, they end the process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from octetrl.system.errors import TERMINATED, Terminated

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT)  # a scheduler's warnings, and Ctrl-\\
_raised: dict[int, str] = {}  # the process in which a signal raised Terminated, and the signal's name


class Handler:
    """Of SIGTERM, for this process. A second signal ends the process, and the first one a forked process."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._process:
            os.kill(os.getpid(), number)
        self.act(signal.Signals(number).name)

    def act(self, by: str) -> NoReturn:
        raise NotImplementedError


class RaiseTerminated(Handler):
    def act(self, by: str) -> NoReturn:
        raise_terminated(by)


class EndAtOnce(Handler):
    """From the start of a command (`install`) until something is to be cleaned up."""

    @classmethod
    def install(cls) -> None:
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, cls())

    def act(self, by: str) -> NoReturn:
        os.write(2, f"octetrl: stopped by {by}\n".encode())
        os._exit(TERMINATED)


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
    free = [number for number, one in before.items() if one in (signal.SIG_DFL, None) or isinstance(one, EndAtOnce)]
    if not in_main_thread or not free:
        yield
        return
    for number in free:
        signal.signal(number, RaiseTerminated())
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
