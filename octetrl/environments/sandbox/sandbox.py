"""A program that nobody trusts goes in; how it ended and what it printed comes out.

    sandbox = Sandbox()                                       # the best level this machine gives
    result = sandbox.run("print(6 * 7)")                      # SandboxResult(status=OK, stdout="42\\n", ...)
    result = sandbox.run(program, stdin="3 4\\n", limits=Limits(wall_seconds=2))

Each run is a new process in a new room (`room.py`) that ends with it; nothing is kept and nothing of the run's is
inherited: not its environment, its files, its descriptors. Whatever the program does becomes a status, never an
exception. What a level does not protect from: `Sandbox.protection.gaps` and docs/sandbox.md.

Thread-safe; more callers than `concurrency` wait. Cost: about 40 ms of one core a run, most of it two starts of Python.
A warm interpreter that forks would be faster and would show each program what the one before left in memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from octetrl.config.errors import UserError
from octetrl.environments.sandbox.interpreter import Interpreter, find_interpreter, system_interpreter
from octetrl.environments.sandbox.levels import Level, Protection, bubblewrap_command, find_level, protection
from octetrl.environments.sandbox.limits import Limits, SandboxResult, SandboxStatus

_PACKAGE = Path(__file__).parent
_BOOT = (
    "import sys; sys.path.append(sys.argv[2]);"
    " from octetrl.environments.sandbox.warden import main; main(int(sys.argv[1]))"
)
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "{work}",
    "TMPDIR": "{work}",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each arena reserves 128 MiB of address space
}
_GRACE_SECONDS = 60.0  # beyond its wall limit, for a warden on a machine that is short of cores
_STOPPED = {status.value: status for status in SandboxStatus}
_GREETING = "print(6 * 7)"


@dataclass(frozen=True, slots=True)
class Program:
    """One run of `run_many`."""

    code: str
    stdin: str = ""


class Sandbox:
    """Runs Python programs apart. Raises UserError where the machine gives no level, or none as good as `least`.

    level: use this one alone; None: the best that works here. least: refuse anything weaker. python: the interpreter
    for the foreign code; None: the run's own, without its packages. concurrency: programs that run at once.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        level: Level | None = None,
        least: Level = Level.LIMITS,
        python: str | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.concurrency = concurrency or os.cpu_count() or 1
        self.level, self._interpreter = working_level(level, least, python)
        self._slots = threading.BoundedSemaphore(self.concurrency)

    @property
    def protection(self) -> Protection:
        return protection(self.level)

    def run(
        self, code: str, stdin: str = "", *, limits: Limits | None = None, files: Mapping[str, str] | None = None
    ) -> SandboxResult:
        """Run `code` as a main program. files: further modules, name -> text, to import beside it."""
        with self._slots:
            return _run(self.level, self._interpreter, code, stdin, limits or self.limits, files or {})

    def run_many(self, programs: Iterable[Program], *, limits: Limits | None = None) -> list[SandboxResult]:
        """Results in the order of `programs`, `concurrency` at a time."""
        with ThreadPoolExecutor(self.concurrency) as threads:
            return list(threads.map(lambda program: self.run(program.code, program.stdin, limits=limits), programs))


@cache
def working_level(level: Level | None, least: Level, python: str | None) -> tuple[Level, Interpreter]:
    """The level and the interpreter that work here, found by trying. Raises UserError with what each level lacks."""
    own = find_interpreter(python)
    candidates = [own]
    fallback = system_interpreter()
    if python is None and fallback is not None and not own.is_public:
        candidates.append(fallback)  # an interpreter in a private folder: a user without rights can't reach it
    reasons: dict[Level, str] = {}
    for interpreter in candidates:
        try_out = partial(_try_out, interpreter)
        if level is not None:
            reason = try_out(level)
            found, reasons = (level if reason is None else None), {level: reason or ""}
        else:
            found, reasons = find_level(try_out, least)
        if found is not None:
            return found, interpreter
    lacking = "; ".join(f"{name.value}: {reason}" for name, reason in reasons.items())
    raise UserError(f"environment.sandbox: this machine gives no sandbox of the level asked for ({lacking})")


def _try_out(interpreter: Interpreter, level: Level) -> str | None:
    result = _run(level, interpreter, _GREETING, "", Limits(wall_seconds=30.0, cpu_seconds=30), {})
    if result.ok and result.stdout == "42\n":
        return None
    return (result.detail or f"{result.status.value}: {result.stderr.strip()[-200:]}").strip()


def _run(
    level: Level, interpreter: Interpreter, code: str, stdin: str, limits: Limits, files: Mapping[str, str]
) -> SandboxResult:
    ours, theirs = socket.socketpair()
    folder = os.path.join(tempfile.gettempdir(), f"octetrl-sandbox-{os.getpid()}-{os.urandom(6).hex()}")
    request = {
        "level": level.value,
        "command": [interpreter.executable, "-I", "-B", "{program}/main.py"],
        "environment": _ENVIRONMENT,
        "files": {**files, "main.py": code},
        "stdin": stdin,
        "limits": asdict(limits),
        "folders": interpreter.folders,
        "links": interpreter.links,
        "folder": folder,
    }
    with ours:
        with theirs:
            try:
                warden = _start_warden(level, interpreter, theirs)
            except OSError as error:
                return _failed(f"the sandbox did not start: {error}")
        try:
            report = _exchange(ours, request | {"number": warden.pid}, limits.wall_seconds + _GRACE_SECONDS)
        finally:
            ours.close()  # the lifeline: whatever still runs ends now
            said = _see_off(warden)
    if report is None:
        return _failed(f"the sandbox ended without a report: {said[-300:] or 'it said nothing'}")
    return _result(report)


def _start_warden(level: Level, interpreter: Interpreter, channel: socket.socket) -> subprocess.Popen[bytes]:
    root = "/warden" if level is Level.BUBBLEWRAP else str(_PACKAGE.parents[2])
    command = [interpreter.executable]
    if level is Level.BUBBLEWRAP:
        command = bubblewrap_command(interpreter, str(_PACKAGE), channel.fileno())
    return subprocess.Popen(
        [*command, "-I", "-S", "-B", "-c", _BOOT, str(channel.fileno()), root],
        pass_fds=[channel.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env={},
    )


def _exchange(channel: socket.socket, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
    """Send the request, get the report; None when none comes."""
    import json

    text = json.dumps(request).encode()
    channel.settimeout(seconds)
    try:
        channel.sendall(len(text).to_bytes(8, "big") + text)
        size = int.from_bytes(_read(channel, 8), "big")
        report: dict[str, Any] = json.loads(_read(channel, size))
    except (OSError, EOFError):  # TimeoutError is an OSError
        return None
    return report


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _see_off(warden: subprocess.Popen[bytes]) -> str:
    """Wait for the warden, which has nothing more to do; kill it if it does not go. What it said on stderr."""
    assert warden.stderr is not None
    try:
        _, said = warden.communicate(timeout=10.0)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(warden.pid, 9)
        _, said = warden.communicate()
    return " ".join(said.decode("utf-8", "replace").split())


def _result(report: Mapping[str, Any]) -> SandboxResult:
    if "error" in report:
        return _failed(report["error"])
    if report["left_over"]:
        return _failed("processes of the program could not be ended")
    if report["stopped"] == "abandoned":
        return _failed("the run went away")
    return SandboxResult(
        status=_status(report),
        exit_code=report["exit"] if report["stopped"] is None else None,
        stdout=report["stdout"],
        stderr=report["stderr"],
        wall_seconds=report["wall_seconds"],
        cpu_seconds=report["cpu_seconds"],
        memory_bytes=report["memory_bytes"],
    )


def _status(report: Mapping[str, Any]) -> SandboxStatus:
    import signal

    if report["stopped"] is not None:
        return _STOPPED[report["stopped"]]
    code = report["exit"]
    if code == 0:
        return SandboxStatus.OK
    if code in (-signal.SIGXCPU,):
        return SandboxStatus.CPU_LIMIT
    if report["disk_full"] or code == -signal.SIGXFSZ:
        return SandboxStatus.DISK_LIMIT
    if report["stderr"].rstrip().rpartition("\n")[2].startswith("MemoryError"):
        return SandboxStatus.MEMORY_LIMIT
    if code in (-signal.SIGKILL, -signal.SIGTERM):
        return SandboxStatus.KILLED
    return SandboxStatus.CRASHED if code < 0 else SandboxStatus.ERROR


def _failed(detail: str) -> SandboxResult:
    return SandboxResult(SandboxStatus.FAILED_SANDBOX, None, "", "", detail)
