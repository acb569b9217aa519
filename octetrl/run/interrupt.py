"""Ctrl-C: the first stops the run after the current step; the second stops it at once and saves what is possible.

The previous handler receives the second Ctrl-C, so a third one also ends the saving (cli/ctrl_c.py).

The message of the first is printed by a separate thread. The signal may arrive while the console is printing or being
imported, and one thread must not enter the console twice.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from octetrl.telemetry.console import Console

Handler = Callable[[int, FrameType | None], object]


class StopRequest:
    """A context manager; `asked` becomes true at the first Ctrl-C.

    saving: the step that is being saved before the run ends, 0 if none. The second Ctrl-C then only says so; the next
    one gives the save up.
    """

    def __init__(self, console: Console) -> None:
        self.asked, self.saving = False, 0
        self._console, self._has_said = console, False
        self._answers: list[threading.Thread] = []

    def __enter__(self) -> StopRequest:
        before = signal.getsignal(signal.SIGINT)  # ignored in a shell's background job, and then it stays so
        in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may listen
        self._listens = callable(before) and in_main_thread
        if callable(before) and self._listens:
            self._before: Handler = before
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listens:
            signal.signal(signal.SIGINT, self._before)
        for answer in self._answers:
            answer.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.asked:
            self.asked = True
            self._say("stopping after this step; press Ctrl-C again to stop at once")
        elif self.saving and not self._has_said:
            self._has_said = True
            self._say(f"saving step {self.saving}; press Ctrl-C again to stop without it")
        else:
            self._before(number, frame)
            raise KeyboardInterrupt

    def _say(self, text: str) -> None:
        """In a thread: the main one may hold the console's lock."""
        self._answers.append(threading.Thread(target=self._console.warn, args=(text,)))
        self._answers[-1].start()
