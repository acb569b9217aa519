"""Ctrl-C and SIGTERM: the first stops the run after the current step; the second stops it at once and saves what is
possible. SIGUSR1 and SIGQUIT are like SIGTERM.

The previous handler receives the second Ctrl-C, so a third one also ends the saving (cli/ctrl_c.py). A third SIGTERM
ends the process. Schedulers send SIGTERM or SIGUSR1 before they take a machine back. Processes that the run forks
inherit the handler, and die of it as they did before. Before the first step and after the last one, the first SIGTERM
ends the run (system/sigterm.py).

The message of the first is printed by a separate thread. The signal may arrive while the console is printing or being
imported, and one thread must not enter the console twice.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from octetrl.system.errors import Terminated
from octetrl.system.process import ENDING, EndingHandler, raise_terminated
from octetrl.telemetry.console import Console

Handler = Callable[[int, FrameType | None], object]


class StopRequest:
    """A context manager; `asked` becomes true at the first Ctrl-C or SIGTERM, and `error` is what ends the run then.

    saving: the step that is being saved before the run ends, 0 if none. The second Ctrl-C then only says so; the next
    one gives the save up.
    """

    def __init__(self, console: Console) -> None:
        self.asked, self.saving = False, 0
        self.error: BaseException = KeyboardInterrupt()
        self._console, self._has_said = console, False
        self._answers: list[threading.Thread] = []
        self._earlier: dict[signal.Signals, Any] = {}  # handlers

    def __enter__(self) -> StopRequest:
        before = signal.getsignal(signal.SIGINT)  # ignored in a shell's background job, and then it stays so
        in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may listen
        self._listens = callable(before) and in_main_thread
        if callable(before) and self._listens:
            self._before: Handler = before
            signal.signal(signal.SIGINT, self._on_signal)
        self._process = os.getpid()
        for number in ENDING if in_main_thread else ():
            earlier = signal.getsignal(number)
            if earlier is signal.SIG_DFL or isinstance(earlier, EndingHandler):
                self._earlier[number] = earlier
                signal.signal(number, self._on_ending)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listens:
            signal.signal(signal.SIGINT, self._before)
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        for answer in self._answers:
            answer.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._waits(KeyboardInterrupt(), "press Ctrl-C again"):
            self._before(number, frame)
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
            self._say(f"stopping after this step; {again} to stop at once")
        elif self.saving and not self._has_said:
            self._has_said = True
            self._say(f"saving step {self.saving}; {again} to stop without it")
        else:
            return False
        return True

    def _say(self, text: str) -> None:
        """In a thread: the main one may hold the console's lock."""
        self._answers.append(threading.Thread(target=self._console.warn, args=(text,)))
        self._answers[-1].start()
