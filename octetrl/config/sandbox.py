"""The recipe's `environment.sandbox` section: limits for code that the model writes (docs/sandbox.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section


class SandboxConfig(Section):
    level: Literal["landlock", "bubblewrap"] = "landlock"
    """Weakest level of isolation that is acceptable. The strongest level that works is used; `octetrl check` shows
    it."""
    python: str | None = None
    """Interpreter for the model's code, for example from a virtual environment with packages that the code may import.
    None: the run's interpreter, without the packages of its environment."""
    wall_seconds: float = Field(default=5.0, gt=0.0, le=1e6)
    """Time limit in seconds for all tests of a completion, or for one tool call."""
    cpu_seconds: int = Field(default=5, ge=1, le=86_400)
    """Limit of the processor time of a program and all its processes, in seconds."""
    memory_mib: int = Field(default=512, ge=32, le=1 << 24)
    """Memory limit of a program and all its processes, in MiB."""
    disk_mib: int = Field(default=64, ge=1, le=1 << 24)
    """Size limit of a program's temporary folder, in MiB. The folder may be in memory."""
    processes: int = Field(default=32, ge=1, le=4_096)
    """Largest number of processes. Threads count as processes."""
    output_kib: int = Field(default=64, ge=1, le=1 << 20)
    """Limit of stdout and stderr together, in KiB. A program that prints more is ended."""
