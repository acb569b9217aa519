"""Runs an untrusted program and returns how it ended and what it printed.

    outcome = run_python("print(6 * 7)")                      # Outcome(status=OK, stdout="42\\n", ...)
    outcome = run_python(source, stdin="3 4\\n", limits=Limits(wall_seconds=2))

    sandbox = find_sandbox(Level.BUBBLEWRAP)                  # refuses a machine that gives less
    sandbox.level, sandbox.level.gaps()                       # what is active, and what it does not protect from

Each program runs in a new process and a new empty folder, which is removed afterwards. It does not inherit environment
variables, files or descriptors of the training run. Whatever the program does becomes a status, never an exception. If
the sandbox could not be created, the status is FAILED_SANDBOX, which says nothing about the program. If it fails after
the program has started, the status is BROKE_SANDBOX, which counts as a failure of the program.

Thread-safe; more callers than the machine has cores wait for each other. Cost: docs/sandbox.md, most of it two starts
of Python. Forking a warm interpreter would be faster, but each program could see what the previous one left in memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from octetrl.config.sandbox import SandboxConfig
from octetrl.process.levels import DEVICES, WARDEN_PACKAGE, Interpreter, Level, bubblewrap_command, find_interpreters
from octetrl.process.supervised import Supervised
from octetrl.system.errors import UserError
from octetrl.system.host import num_cores

MIB = 2**20
_PACKAGE = Path(__file__).parent
# Without octetrl/__init__.py, whose imports would take half of the warden's start.
_BOOT = """
import sys
package = sys.modules["octetrl"] = type(sys)("octetrl")
package.__path__ = [sys.argv[1]]
from octetrl.process.warden import main
main()
"""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each arena reserves 128 MiB of address space
}
_GRACE_SECONDS = 60.0  # beyond its wall limit, for a warden on a machine that is short of cores
_slots = threading.BoundedSemaphore(num_cores())


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program with all the processes that it starts: of their sum, unless stated otherwise."""

    wall_seconds: float = 5.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 * MIB  # address space of each process, and what all of them hold
    disk_bytes: int = 64 * MIB  # of its folder, which may be in memory, and of any one file
    files: int = 1024
    processes: int = 32  # threads count
    open_files: int = 64  # of each process
    output_bytes: int = 64 * 1024  # stdout and stderr

    @classmethod
    def from_config(cls, config: SandboxConfig) -> Limits:
        """The limits of the recipe's `environment.sandbox`."""
        return cls(
            wall_seconds=config.wall_seconds,
            cpu_seconds=config.cpu_seconds,
            memory_bytes=config.memory_mib * MIB,
            disk_bytes=config.disk_mib * MIB,
            processes=config.processes,
            output_bytes=config.output_kib * 1024,
        )


DEFAULTS = Limits()


class SandboxStatus(StrEnum):
    """How a program ended. The program causes all of these except FAILED_SANDBOX. BROKE_SANDBOX counts as caused by the
    program; otherwise it could break its sandbox to get no verdict instead of a bad one."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # another exit code: an exception, sys.exit(1)
    CRASHED = "crashed"  # by a signal of its own making: a segmentation fault, abort()
    KILLED = "killed"  # by SIGKILL or SIGTERM, from itself or from the machine's out-of-memory killer
    WALL_TIMEOUT = "wall_timeout"
    CPU_LIMIT = "cpu_limit"
    MEMORY_LIMIT = "memory_limit"  # killed for it, or ended by an uncaught MemoryError
    DISK_LIMIT = "disk_limit"
    OUTPUT_LIMIT = "output_limit"
    BROKE_SANDBOX = "broke_sandbox"  # while it ran, the process that watches it failed, or could not end it
    FAILED_SANDBOX = "failed_sandbox"  # it never ran, or the run went away


@dataclass(frozen=True, slots=True)
class Outcome:
    status: SandboxStatus
    stdout: str = ""  # the first of `output_bytes` of both together; bytes that are no UTF-8 replaced
    stderr: str = ""
    detail: str | None = None  # what went wrong with the sandbox itself
    seconds: float = 0.0  # of wall time, less the sandbox's own start
    cpu_seconds: float = 0.0
    memory_bytes: int = 0  # the most that was seen
    exit_code: int | None = None  # minus the signal where one ended it; None: it was ended by us, or never ran

    @property
    def ok(self) -> bool:
        return self.status is SandboxStatus.OK


@dataclass(frozen=True, slots=True)
class Program:
    source: str
    stdin: str = ""
    limits: Limits = DEFAULTS


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox of one level; `find_sandbox` creates it."""

    level: Level
    interpreter: Interpreter

    def __str__(self) -> str:
        """A line for a log: the level, and what it does not protect from."""
        return f"a sandbox of level {self.level}, which does not protect from {'; '.join(self.level.gaps())}"

    def run(self, program: Program) -> Outcome:
        """Run `source` as a main program."""
        with _slots:
            return _run(self, program, None)

    def run_pair(self, first: Program, second: Program) -> tuple[Outcome, Outcome]:
        """Run two programs at once, each in a sandbox of its own. A stream socket, descriptor 3 in both, connects them.
        When one program ends, the other's connection is closed; the other program continues."""
        ends = socket.socketpair()
        with _slots, ThreadPoolExecutor(2) as threads:
            outcomes = list(threads.map(_run, (self, self), (first, second), ends))
        return outcomes[0], outcomes[1]


def run_python(source: str, *, stdin: str = "", limits: Limits = DEFAULTS) -> Outcome:
    """Run `source` in the strongest sandbox of this machine. Raises UserError if there is none."""
    return find_sandbox().run(Program(source, stdin, limits))


def sandbox_for(config: SandboxConfig) -> Sandbox:
    """As the recipe's `environment.sandbox` says; `Limits.from_config` has the rest of it."""
    strongest = Level(config.level) is Level.BUBBLEWRAP
    return find_sandbox(*([Level.BUBBLEWRAP] if strongest else []), python=config.python)


@cache
def find_sandbox(*levels: Level, python: str | None = None) -> Sandbox:
    """The strongest sandbox of one of `levels` (none: of any) that works here, found by trying. Raises UserError.

    python: the interpreter for the foreign code; None: the run's own, without the packages of its virtual environment.
    """
    reasons = []
    for level in levels or Level:
        reason = level.lacks()
        for interpreter in find_interpreters(python) if reason is None else ():
            sandbox = Sandbox(level, interpreter)
            reason = _try_out(sandbox)
            if reason is None:
                return sandbox
        reasons.append(f"{level}: {reason}")
    remedy = "install bubblewrap" + (", or accept landlock" if levels == (Level.BUBBLEWRAP,) else "")
    raise UserError(f"environment.sandbox.level: this machine gives no sandbox ({'; '.join(reasons)}); {remedy}")


def _try_out(sandbox: Sandbox) -> str | None:
    """What is wrong with the sandbox, or None."""
    outcome = _run(sandbox, Program("print(6 * 7)", limits=Limits(wall_seconds=30.0, cpu_seconds=30)), None)
    if outcome.ok and outcome.stdout == "42\n":
        return None
    return outcome.detail or f"{outcome.status}: {outcome.stderr.strip()[-200:]}"


def _run(sandbox: Sandbox, program: Program, link: socket.socket | None) -> Outcome:
    in_bubblewrap = sandbox.level is Level.BUBBLEWRAP
    place = "/tmp" if in_bubblewrap else tempfile.gettempdir()
    folder = os.path.join(place, f"octetrl-sandbox-{os.getpid()}-{os.urandom(6).hex()}")
    work, main = f"{folder}/work", f"{folder}/program/main.py"
    order = {
        "level": sandbox.level,
        "command": [sandbox.interpreter.executable, "-I", "-B", main],
        "environment": _ENVIRONMENT | {"HOME": work, "TMPDIR": work},
        "source": program.source,
        "stdin": program.stdin,
        "limits": asdict(program.limits),
        "folders": sandbox.interpreter.folders,
        "devices": DEVICES,
        "folder": folder,
        "work": work,
        "main": main,
        "link": None if link is None else link.fileno(),
    }
    with link or contextlib.nullcontext():
        try:
            warden = _start_warden(sandbox, program, () if link is None else (link,))
        except OSError as error:
            return Outcome(SandboxStatus.FAILED_SANDBOX, detail=f"the sandbox did not start: {error}")
    started, said = False, ""
    try:
        seconds = program.limits.wall_seconds + _GRACE_SECONDS
        warden.order(order | {"number": warden.pid}, seconds)
        report = warden.message(seconds)
        if report is not None and "started" in report:
            started, warden.group = True, 0 if in_bubblewrap else report["started"]
            report = warden.message(seconds)
    finally:
        said = " ".join(warden.end().split())
        if not in_bubblewrap and os.path.lexists(folder):  # the warden was killed
            shutil.rmtree(folder, ignore_errors=True)
    if report is None:
        report = {"error": f"the sandbox ended without a report: {said[-300:] or 'it said nothing'}"}
    return _outcome(report, started=started)


def _start_warden(sandbox: Sandbox, program: Program, sockets: Sequence[socket.socket]) -> Supervised:
    package, command = str(_PACKAGE.parent), []
    if sandbox.level is Level.BUBBLEWRAP:
        room_bytes = program.limits.disk_bytes + 4 * len(program.source) + MIB
        package, command = WARDEN_PACKAGE, bubblewrap_command(sandbox.interpreter, _PACKAGE, room_bytes)
    command += [sandbox.interpreter.executable, "-I", "-S", "-B", "-c", _BOOT, package]
    return Supervised(command, sockets, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", env={})


def _outcome(report: Mapping[str, Any], *, started: bool) -> Outcome:
    if "error" in report:
        status = SandboxStatus.BROKE_SANDBOX if started else SandboxStatus.FAILED_SANDBOX
        return Outcome(status, detail=report["error"])
    if report["left_over"]:
        return Outcome(SandboxStatus.BROKE_SANDBOX, detail="processes of the program could not be ended")
    if report["stopped"] == "abandoned":
        return Outcome(SandboxStatus.FAILED_SANDBOX, detail="the run went away")
    return Outcome(
        status=_status(report),
        stdout=report["stdout"],
        stderr=report["stderr"],
        seconds=report["wall_seconds"],
        cpu_seconds=report["cpu_seconds"],
        memory_bytes=report["memory_bytes"],
        exit_code=report["exit"] if report["stopped"] is None else None,
    )


def _status(report: Mapping[str, Any]) -> SandboxStatus:
    if report["stopped"] is not None:
        return SandboxStatus(report["stopped"])
    code = report["exit"]
    if code == 0:
        return SandboxStatus.OK
    if code == -signal.SIGXCPU:
        return SandboxStatus.CPU_LIMIT
    if report["disk_full"] or code == -signal.SIGXFSZ:
        return SandboxStatus.DISK_LIMIT
    if report["stderr"].rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return SandboxStatus.MEMORY_LIMIT
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return SandboxStatus.KILLED
    return SandboxStatus.CRASHED if code < 0 else SandboxStatus.ERROR
