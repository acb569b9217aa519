"""The recipe's `environment.sandbox`: what code that the model wrote may use. docs/sandbox.md explains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section


class SandboxConfig(Section):
    level: Literal["limits", "landlock", "bubblewrap"] = "landlock"
    """The least that the machine must give; the best that works is used, and `octetrl check` shows it. `limits`
    hides no files: for code that you would run yourself. It does not judge code with tests."""
    python: str | None = None
    """Interpreter for the model's code, such as that of a virtual environment whose packages it may import; None: the
    run's own, without the packages of its environment."""
    wall_seconds: float = Field(default=5.0, gt=0.0, le=1e6)
    """Of all tests of a completion, or of one call of a tool."""
    cpu_seconds: int = Field(default=5, ge=1, le=86_400)
    """Of a program and all its processes."""
    memory_mib: int = Field(default=512, ge=32, le=1 << 24)
    disk_mib: int = Field(default=64, ge=1, le=1 << 24)
    """Of its temporary folder, which may be in memory."""
    processes: int = Field(default=32, ge=1, le=4_096)
    """Threads count."""
    output_kib: int = Field(default=64, ge=1, le=1 << 20)
    """Of stdout and stderr together; a program that says more is ended."""
