"""The recipe's `environment.sandbox`: limits for code that the model wrote (docs/sandbox.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section


class SandboxConfig(Section):
    level: Literal["limits", "landlock", "bubblewrap"] = "landlock"
    """Lowest acceptable level. The strongest level that works is used; `octetrl check` shows it. `limits` hides no
    files and does not judge code with tests; use it only for code that you would run yourself."""
    python: str | None = None
    """Interpreter for the model's code, for example of a virtual environment with packages that the code may import.
    None: the run's interpreter, without the packages of its environment."""
    wall_seconds: float = Field(default=5.0, gt=0.0, le=1e6)
    """Time limit of all tests of a completion, or of one tool call."""
    cpu_seconds: int = Field(default=5, ge=1, le=86_400)
    """Processor time of a program and all its processes."""
    memory_mib: int = Field(default=512, ge=32, le=1 << 24)
    disk_mib: int = Field(default=64, ge=1, le=1 << 24)
    """Size of its temporary folder, which may be in memory."""
    processes: int = Field(default=32, ge=1, le=4_096)
    """Largest number of processes; threads count."""
    output_kib: int = Field(default=64, ge=1, le=1 << 20)
    """Limit of stdout and stderr together. A program that prints more is ended."""
