"""The limits of a sandbox, and how a program in it ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from octetrl.config.sandbox import SandboxConfig

MIB = 2**20


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
