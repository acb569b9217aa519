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

from octetrl.config.errors import TERMINATED, Terminated

ENDING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT)  # a scheduler's warnings, and Ctrl-\\
_raised: list[int] = []  # the process in which a signal raised Terminated


class Handler:
    """Of SIGTERM, for this process. A second signal ends the process, and the first one a forked process."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != self._process:
            os.kill(os.getpid(), number)
        self.act()

    def act(self) -> NoReturn:
        raise NotImplementedError


class RaiseTerminated(Handler):
    def act(self) -> NoReturn:
        raise_terminated()


class EndAtOnce(Handler):
    """From the start of a command (`install`) until something is to be cleaned up."""

    @classmethod
    def install(cls) -> None:
        for number in ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, cls())

    def act(self) -> NoReturn:
        os.write(2, b"octetrl: stopped by SIGTERM\n")
        os._exit(TERMINATED)


def raise_terminated() -> NoReturn:
    """Raise Terminated in a handler of SIGTERM."""
    _raised[:] = [os.getpid()]
    raise Terminated


def is_of_sigterm(error: BaseException) -> bool:
    """Whether it is Terminated, or what became of it: Ray makes a plain SystemExit of one that is raised within a call
    of its own."""
    return isinstance(error, SystemExit) and (isinstance(error, Terminated) or _raised == [os.getpid()])


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
        if isinstance(error, Terminated) or not is_of_sigterm(error):
            raise
        raise Terminated from error
    finally:
        for number in free:
            signal.signal(number, before[number] or signal.SIG_DFL)
        _raised.clear()
