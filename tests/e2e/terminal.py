"""A small terminal: runs a command on one, and says what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_TOKENS = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\x1b.|.", re.DOTALL)
CTRL_C = b"\x03"


class Ended(NamedTuple):
    code: int
    screen: list[str]  # at the end
    shows_cursor: bool
    received: bytes  # all that the command wrote


def run_on_terminal(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    on_screen: Callable[[list[str], Callable[[], None]], None],
    *,
    columns: int = 80,
    seconds: float = 270.0,
) -> Ended:
    """Calls `on_screen(lines, press)` whenever the screen has changed; `press` presses Ctrl-C."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], list(command), {**environment, "TERM": "xterm"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    received, end = b"", time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            if not select.select([terminal], [], [], 0.1)[0]:
                continue
            try:
                new = os.read(terminal, 65536)
            except OSError:  # the command has ended
                break
            received += new
            on_screen(screen(received, columns), lambda: (os.write(terminal, CTRL_C), None)[1])
        else:
            os.kill(pid, 9)
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    shown, hidden = received.rfind(b"\x1b[?25h"), received.rfind(b"\x1b[?25l")
    return Ended(os.waitstatus_to_exitcode(status), screen(received, columns), shown >= hidden, received)


def screen(received: bytes, columns: int) -> list[str]:
    """The lines that a terminal shows, all that scrolled away included."""
    lines: list[list[str]] = [[]]
    row = column = 0
    for token in _TOKENS.findall(received.decode("utf-8", "ignore")):
        code, number = token[-1], re.sub(r"\D", "", token)
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
        elif token.startswith("\x1b"):
            if code == "A":
                row = max(0, row - int(number or 1))
            elif code == "K":
                del lines[row][0 if number == "2" else column :]
            elif code == "J":
                del lines[row][column:], lines[row + 1 :]
        else:
            if column == columns:
                row, column = row + 1, 0
            lines += [[] for _ in range(row + 1 - len(lines))]
            lines[row] += [" "] * (column + 1 - len(lines[row]))
            lines[row][column] = token
            column += 1
        lines += [[] for _ in range(row + 1 - len(lines))]
    return ["".join(line).rstrip() for line in lines]
