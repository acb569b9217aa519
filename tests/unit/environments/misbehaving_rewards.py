"""Rewards that misbehave, at the top level of a module as a reward worker wants them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octetrl.records import Task


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise SystemExit(0)


def grow() -> None:
    held = []
    while True:
        held.append(b"x" * (8 << 20))
        time.sleep(0.002)


def orphan() -> int:
    """The process id of a grandchild in a session of its own, whose parent is gone."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            os.execvp("sleep", ["sleep", "60"])
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 20))


def exit_beside_a_slow_supervisor() -> None:
    """The supervisor runs again half a second later."""
    supervisor = os.getppid()
    os.kill(supervisor, signal.SIGSTOP)
    if os.fork() == 0:
        os.closerange(3, 256)
        time.sleep(0.5)
        os.kill(supervisor, signal.SIGCONT)
    os._exit(3)


def socket_to_the_run() -> int:
    return next(number for number in range(3, 64) if is_socket(number))


def is_socket(number: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    except OSError:
        return False


class Runs:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


class AnswersWithCode:
    """A scorer whose `answered` is an object that runs code where it is unpickled."""

    def __call__(self, task: Task, completion_text: str) -> float:
        return 1.0

    def answered(self, task: Task, completion_text: str) -> Any:
        return Runs(task.id)


@dataclass
class Loading:
    """A scorer that notes in `folder` who loads it, and takes `seconds` over it in all processes but the first and
    those from `quick_from` on."""

    folder: Path
    seconds: float
    quick_from: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        number = len(list(self.folder.iterdir()))
        (self.folder / f"{number}-{os.getpid()}").touch()
        if 0 < number < self.quick_from:
            time.sleep(self.seconds)

    def __call__(self, task: Task, completion_text: str) -> object:
        return by_name(task, completion_text)


@dataclass(frozen=True)
class Entries:
    """A generator of entries as reasoning_gym's are; `hangs` from this one on; `ends` its process at this one."""

    hangs: int = 1000
    dataset: str = "entries"
    ends: int = 1000

    def __call__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self.entry(index) for index in indices[:9]]

    def entry(self, index: int) -> dict[str, Any]:
        if index == 13:
            raise ValueError("unlucky")
        if index == self.ends:
            os._exit(3)
        if index >= self.hangs:
            time.sleep(60)
        return {"question": f"{index}?", "answer": str(index), "metadata": {"pid": os.getpid(), 2: (index, {index})}}


def in_a_sandbox_once(task: Task, completion_text: str) -> float:
    """The first call runs a sandbox without an end, and notes its process in the file that the task names."""
    from octetrl.process.levels import Level
    from octetrl.process.sandbox import Limits, Program, find_sandbox

    if not Path(task.id).exists():
        box = find_sandbox(Level.LANDLOCK)
        Path(task.id).write_text(str(os.getpid()))
        box.run(Program("import time; time.sleep(600)", limits=Limits(wall_seconds=600.0)))
    return 1.0


def by_name(task: Task, completion_text: str) -> object:
    """Does what the completion says."""
    match completion_text:
        case "raise":
            raise KeyError("missing column")
        case "hang":
            time.sleep(60)
        case "hang in C":
            return float(len(str(7 ** (7**9))))  # holds the interpreter's lock for far longer than the timeout
        case "exit":
            sys.exit(0)
        case "interrupt":
            raise KeyboardInterrupt("not by anybody")
        case "unspeakable":
            raise Unspeakable
        case "nan":
            return float("nan")
        case "none":
            return None
        case "bool":
            return True
        case "print":
            print("noise on stdout")
            return 0.25
        case "pid":
            return os.getpid()
        case "child":
            child = subprocess.Popen(["sleep", "60"])
            Path(task.id).write_text(str(child.pid))
            time.sleep(60)
        case "hang once":
            if not Path(task.id).exists():
                Path(task.id).write_text(str(os.getpid()))
                time.sleep(60)
            return 0.75
        case _ if (reward := misuse_of_the_process(completion_text)) is not None:
            return reward
    return float(len(completion_text))


def misuse_of_the_process(completion_text: str) -> float | None:
    """None: the completion asks for no such thing."""
    match completion_text:
        case "exit at once":
            os._exit(0)
        case "crash":
            os.abort()
        case "close descriptors":
            os.closerange(3, 256)
        case "replace descriptors":
            os.closerange(3, 256)
            while os.open("/dev/null", os.O_RDWR) < 64:
                pass
        case "become another program":
            os.execvp("sleep", ["sleep", "60"])
        case "kill the supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        case "stop the supervisor":
            os.kill(os.getppid(), signal.SIGSTOP)
            time.sleep(60)
        case "exit beside a slow supervisor":
            exit_beside_a_slow_supervisor()
        case "send junk":
            os.write(socket_to_the_run(), (5).to_bytes(8, "big") + b"junk!")
            time.sleep(60)
        case "ask for much":
            bytearray(1 << 52)
        case "grow":
            grow()
        case "grow in a child":
            if os.fork() == 0:
                os.setsid()
                grow()
            time.sleep(60)
        case "come back from a fork":
            child = os.fork()
            if child == 0:
                return -100.0
            os.waitpid(child, 0)
            return 1.0
        case "answer from a fork":
            child = os.fork()
            if child == 0:
                answers = (b'{"call":%d,"value":{"~tuple":[-100.0,null,null]}}' % call for call in range(300))
                os.write(socket_to_the_run(), b"".join(len(one).to_bytes(8, "big") + one for one in answers))
                os._exit(0)
            os.waitpid(child, 0)
            return 1.0
        case "flood":
            for _ in range(200):
                os.write(1, b"x" * 99_999 + b"\n")
            return 0.5
        case "orphan":
            return orphan()
    return None
