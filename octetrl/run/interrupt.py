"""Ctrl-C: the first asks the run to stop after the current step, the second stops it at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from octetrl.telemetry.console import Console


class StopRequest:
    """A context manager; `asked` becomes true at the first Ctrl-C."""

    def __init__(self, console: Console) -> None:
        self.asked = False
        self._console = console

    def __enter__(self) -> StopRequest:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._console.warn("stopping after this step; press Ctrl-C again to stop at once")
