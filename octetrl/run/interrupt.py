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
    """A context manager; `asked` becomes true at the first Ctrl-C."""

    def __init__(self, console: Console) -> None:
        self.asked = False
        self._answer = threading.Thread(
            target=console.warn, args=("stopping after this step; press Ctrl-C again to stop at once",)
        )

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
        if self._answer.is_alive():
            self._answer.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self._before(number, frame)
            raise KeyboardInterrupt
        self.asked = True
        self._answer.start()
