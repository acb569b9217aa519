"""SIGTERM where a command has something to clean up: it raises `Terminated`, as Ctrl-C raises KeyboardInterrupt."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from octetrl.config.errors import Terminated

_raised: list[int] = []  # the process in which a signal raised Terminated


class RaiseTerminated:
    """A handler of SIGTERM for this process. A second signal ends the process, and the first one a forked process."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != self._process:
            os.kill(os.getpid(), signal.SIGTERM)
        raise_terminated()


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
    """In the main thread, SIGTERM raises Terminated meanwhile, unless the process has a handler of its own."""
    in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may set a handler
    before = signal.getsignal(signal.SIGTERM)
    if not in_main_thread or before not in (signal.SIG_DFL, None):
        yield
        return
    signal.signal(signal.SIGTERM, RaiseTerminated())
    _raised.clear()
    try:
        yield
    except SystemExit as error:
        if isinstance(error, Terminated) or not is_of_sigterm(error):
            raise
        raise Terminated from error
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _raised.clear()
