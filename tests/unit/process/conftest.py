"""A sandbox of each level that works here, with small limits, and the proof after each test that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from octetrl.process.levels import Level, Protection
from octetrl.process.limits import MIB, Limits, Outcome
from octetrl.process.sandbox import Program, find_sandbox
from octetrl.system.errors import UserError
from tests.required import missing
from tests.unit.process.traces import sandbox_folders, sandbox_processes, that_stay

SMALL = Limits(
    wall_seconds=30.0,  # a machine short of cores must not be taken for a limit
    cpu_seconds=1,
    memory_bytes=128 * MIB,
    disk_bytes=8 * MIB,
    files=64,
    processes=12,
    output_bytes=4096,
)


class Box:
    """A sandbox of one level with small limits."""

    def __init__(self, level: Level) -> None:
        self._sandbox = find_sandbox(only=level)

    @property
    def protection(self) -> Protection:
        return self._sandbox.protection

    def run(self, source: str, stdin: str = "", **limits: float) -> Outcome:
        return self._sandbox.run(Program(source, stdin, limits=replace(SMALL, **limits)))  # type: ignore[arg-type]


@pytest.fixture(params=list(Level), ids=str)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Box]:
    try:
        box = Box(request.param)
    except UserError as error:
        missing(request.param, str(error))
    yield box
    assert not that_stay(sandbox_processes()), "processes of a sandbox are left"
    assert not sandbox_folders(), "a temporary folder is left"
