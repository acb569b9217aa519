"""How a script of this folder reads its options and ends: one line for what is wrong or stops it, and no traceback."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octetrl.system.errors import TERMINATED, Terminated, UserError
from octetrl.system.sigterm import terminable

WRONG_INPUT, INTERRUPTED = 2, 130


def run_command(name: str, main: Callable[[], None]) -> None:
    """Run `main`. A wrong input ends the process with 2, Ctrl-C with 130, SIGTERM with 143, each after its clean-up."""
    try:
        with terminable():
            main()
    except UserError as error:
        code, said = WRONG_INPUT, str(error)
    except KeyboardInterrupt:
        code, said = INTERRUPTED, "stopped by Ctrl-C"
    except Terminated as error:
        code, said = TERMINATED, f"stopped by {error.by}"
    else:
        return
    print(f"lab.{name}: {said}", file=sys.stderr)
    raise SystemExit(code)


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM until the block ends: it starts a process and notes it in the list of what must end."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def at_least(smallest: int, largest: int | None = None) -> Callable[[str], int]:
    """For argparse: a whole number from `smallest` on."""

    def number(text: str) -> int:
        value = int(text) if text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() else None
        if value is None or value < smallest or (largest is not None and value > largest):
            until = "on" if largest is None else f"to {largest:,}"
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number from {smallest} {until}")
        return value

    return number


def listed(smallest: int, count: int | None = None) -> Callable[[str], list[int]]:
    """For argparse: whole numbers from `smallest` on, with commas between them; `count` of them if it is given."""

    def numbers(text: str) -> list[int]:
        values = [at_least(smallest)(part) for part in text.split(",")]
        if count not in (None, len(values)):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} has {len(values)} numbers; give {count}")
        return values

    return numbers


def seconds(text: str) -> float:
    """For argparse: a time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of seconds above 0")
    return value
