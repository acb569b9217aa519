"""A run goes on when its terminal is closed or the reader of its output ends: it writes on in the run folder.

Within `keeps_writing` SIGHUP is ignored, as by nohup, also in processes that the run starts. The first write that finds
no reader opens the file and makes it stdout or stderr, so everything that follows goes there, too.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

CONSOLE_FILE = "console.log"
LOST = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESTALE)
_logs: list[Path] = []  # of the runs that are going on, the innermost last


@contextmanager
def keeps_writing(folder: Path) -> Iterator[None]:
    """Within, what finds no reader is appended to a file in `folder`."""
    is_main = threading.current_thread() is threading.main_thread()
    ignores = is_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if ignores:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _logs.append((folder / CONSOLE_FILE).absolute())
    try:
        yield
    finally:
        _logs.pop()
        if ignores:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Screen:
    """stdout or stderr, as a file for rich."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    @property
    def _file(self) -> Any:
        file = getattr(sys, self._name)
        return getattr(file, "rich_proxied_file", file)  # while a live line is shown

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
        except OSError as error:
            self._go_on(error)  # the stream keeps the text
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._go_on(error)
            self._file.flush()

    def _go_on(self, error: OSError) -> None:
        if error.errno not in LOST or not _logs:
            raise error
        log = os.open(_logs[-1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1 if self._name == "stdout" else 2)
        os.close(log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
