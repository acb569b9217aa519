"""Signals that end a command, and imports of large libraries.

SIGTERM, SIGUSR1 and SIGQUIT end a command with one line. Where there is something to clean up, they raise `Terminated`,
as Ctrl-C raises KeyboardInterrupt; before, as while modules are imported, they end the process. While a run takes
steps, the first of these signals, or the first Ctrl-C, stops it after the current step (`StopRequest`). Schedulers send
SIGTERM or SIGUSR1 before they take a machine back."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, NoReturn

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


class StopRequest:
    """A context manager for the steps of a run. `asked` becomes true at the first Ctrl-C or SIGTERM, and `error` is
    what ends the run then. The second signal stops the step at once, and the run saves what is possible.

    saving: the step that is being saved before the run ends, 0 if none. The second signal is then only answered; the
    next one gives the save up.

    The previous handler receives the second Ctrl-C, so a third one also ends the saving (cli/ctrl_c.py); a third
    SIGTERM ends the process. Processes that the run forks inherit the handler, and die of it as they did before.

    say: prints a line. A thread of its own calls it: the signal may arrive while the console is printing or being
    imported, and one thread must not enter the console twice.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.asked, self.saving = False, 0
        self.error: BaseException = KeyboardInterrupt()
        self._say, self._has_said = say, False
        self._lines: list[threading.Thread] = []
        self._earlier: dict[signal.Signals, Any] = {}  # handlers

    def __enter__(self) -> StopRequest:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():  # the only one that may set a handler
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # not where it is ignored, as in a shell's background job
                self._earlier[signal.SIGINT] = before
                signal.signal(signal.SIGINT, self._on_ctrl_c)
            for number in ENDING:
                earlier = signal.getsignal(number)
                if earlier is signal.SIG_DFL or isinstance(earlier, EndingHandler):
                    self._earlier[number] = earlier
                    signal.signal(number, self._on_ending)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        for line in self._lines:
            line.join()

    def _on_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        if not self._waits(KeyboardInterrupt(), "press Ctrl-C again"):
            self._earlier[signal.SIGINT](number, frame)
            raise KeyboardInterrupt

    def _on_ending(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._waits(Terminated(name), f"{name}: send it again"):
            signal.signal(number, signal.SIG_DFL)
            raise_terminated(name)

    def _waits(self, error: BaseException, again: str) -> bool:
        """Whether the run goes on to the end of the step, or of the save, after this signal."""
        if not self.asked:
            self.asked, self.error = True, error
            line = f"stopping after this step; {again} to stop at once"
        elif self.saving and not self._has_said:
            self._has_said = True
            line = f"saving step {self.saving}; {again} to stop without it"
        else:
            return False
        self._lines.append(threading.Thread(target=self._say, args=(line,)))
        self._lines[-1].start()
        return True


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
