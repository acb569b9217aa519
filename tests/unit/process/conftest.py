"""A sandbox of each level that works here, with small limits, and the proof after each test that nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from octetrl.process.levels import Level
from octetrl.process.sandbox import MIB, Limits, Outcome, Program, Sandbox, find_sandbox
from octetrl.process.system_calls import can_filter
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
needs_filter = pytest.mark.skipif(not can_filter(), reason="no system-call filter here")


class Box:
    """A sandbox of one level with small limits."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self._sandbox = sandbox_or_skip(level)

    def run(self, source: str, stdin: str = "", **limits: float) -> Outcome:
        return self._sandbox.run(Program(source, stdin, limits=replace(SMALL, **limits)))  # type: ignore[arg-type]

    def output(self, source: str, stdin: str = "", **limits: float) -> str:
        """What a program that ends well prints."""
        outcome = self.run(source, stdin, **limits)
        assert outcome.ok, outcome
        return outcome.stdout

    def run_pair(self, first: str, second: str) -> tuple[Outcome, Outcome]:
        return self._sandbox.run_pair(Program(first, limits=SMALL), Program(second, limits=SMALL))


def sandbox_or_skip(*levels: Level) -> Sandbox:
    try:
        return find_sandbox(*levels)
    except UserError as error:
        missing(levels[0] if levels else Level.LANDLOCK, str(error))


@pytest.fixture(params=[Level.LANDLOCK, Level.BUBBLEWRAP], ids=str)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Box]:
    yield Box(request.param)
    assert not that_stay(sandbox_processes()), "processes of a sandbox are left"
    assert not sandbox_folders(), "a temporary folder is left"
