"""Strains boxes of every kind that works here, and shows that nothing of them is left.

    python -m tests.e2e.many_boxes [--boxes 200] [--at-once 16] [--kinds podman docker]      or: make test-faults

- `boxes` of them, `at-once` at any time, each with commands and files;
- a box in which a program starts processes without an end, beside others that go on working;
- a command that prints 1 GB; a box whose disk is full;
- a run that is killed with its boxes open.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from octetrl.boxes import bubblewrap, containers
from octetrl.boxes.box import OUTPUT_BYTES, Box, BoxError, program_of
from octetrl.boxes.boxes import open_box
from octetrl.boxes.containers import LABEL, sweep
from octetrl.config.box import BoxConfig
from tests.unit.boxes.made import config_of

PROCESSES = 500  # that a box of these tests may have
FORKS = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
SLEEPERS = "while :; do sleep 4321 & done"  # until the shell, whose fork fails, ends
MOST_MIB = 16.0  # that memory may grow by after the first boxes
GIGABYTE = 1_000_000_000


async def use(config: BoxConfig, number: int) -> None:
    async with await open_box(config) as box:
        await box.put("/tmp/number", str(number).encode())
        result = await box.run(["sh", "-c", f"cat /tmp/number; sleep 4321 >/dev/null 2>&1 & exit {number % 100}"])
        assert (result.code, result.stdout) == (number % 100, str(number)), result


async def many(config: BoxConfig, boxes: int, at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with places:
            await use(config, number)

    await asyncio.gather(*map(one, range(boxes)))


async def beside_a_bomb(config: BoxConfig) -> str:
    """The box of the bomb ends, or goes on with what the limit leaves it; others do not notice."""
    bomb = ["sh", "-c", SLEEPERS] if config.image else ["python3", "-c", FORKS]
    async with await open_box(config) as bombed, await open_box(config) as other:
        running = asyncio.create_task(bombed.run(bomb, seconds=5.0))
        most, answers = 0, 0
        while not running.done():
            assert (await other.run(["echo", "yes"])).stdout == "yes\n"
            most, answers = max(most, processes_in(bombed)), answers + 1
        with contextlib.suppress(BoxError):
            await running
            assert (await bombed.run(["true"])).code == 0
        assert PROCESSES // 2 < most <= PROCESSES, f"{most} processes"
        assert bombed.lost is not None or bomb[-1] == SLEEPERS
        await bombed.close()
        await use(config, 7)
    return f"{most} processes at most, {answers} answers of another box meanwhile, lost: {bombed.lost}"


def processes_in(box: Box) -> int:
    """Number of processes that share the process namespace of the box."""
    try:
        own = os.stat(f"/proc/{box.find_pid()}/ns/pid").st_ino
    except OSError:
        return 0
    return sum(namespace_of(name) == own for name in os.listdir("/proc") if name.isdigit())


def namespace_of(pid: str) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


async def much_output(config: BoxConfig) -> str:
    async with await open_box(config) as box:
        before = peak_mib()
        result = await box.run(["sh", "-c", f"head -c {GIGABYTE} /dev/zero | tr '\\0' x; echo end"], seconds=300.0)
        assert result.code == 0 and result.stdout.endswith("xend\n"), (result.code, result.stdout[-99:], result.stderr)
        assert f"[{GIGABYTE + 4 - OUTPUT_BYTES:,} bytes left out]" in result.stdout
        grown = peak_mib() - before
        assert grown < MOST_MIB, f"memory grew by {grown:.0f} MiB"
    return f"memory grew by {grown:.1f} MiB"


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def full_disk(config: BoxConfig) -> str:
    tight = config.model_copy(update={"memory_mib": 64})
    if config.kind != "bubblewrap":
        tight = config.model_copy(update={"options": (*config.options, "--tmpfs", "/tmp:size=64m")})
    async with await open_box(tight) as box:
        shell = box.shell(cwd="/tmp")
        await shell.run("A=1")
        filled = await shell.run("A=2; cat /dev/zero >fill")
        assert filled.code == 1 and "No space left" in filled.stdout, filled
        try:
            await box.put("/tmp/more", b"x" * 10**6)
        except OSError as error:
            said = str(error)
        assert (await shell.run("echo $A; rm fill")).stdout == "1\n", "the state that could not be written"
        await box.put("/tmp/more", b"x")
        assert await box.get("/tmp/more") == b"x"
    return said


OPENS = """
import asyncio, sys
from octetrl.boxes.boxes import Boxes
from octetrl.config.box import BoxConfig
from octetrl.records import Task
async def opens():
    boxes = Boxes(BoxConfig.model_validate_json(sys.argv[1]))
    of_rollouts = [boxes.of(Task(str(number), "?")) for number in range(int(sys.argv[2]))]
    opened = await asyncio.gather(*(own.open(policy_port=40_000) for own in of_rollouts))
    print(*(box.find_pid() for box in opened), flush=True)
    await asyncio.gather(*(box.run(["sh", "-c", "sleep 4321 & sleep 4321"]) for box in opened))
asyncio.run(opens())
"""


def killed(config: BoxConfig, at_once: int, *, with_all: bool) -> str:
    """with_all: also what makes the boxes, as when a batch system ends a job."""
    words = [sys.executable, "-c", OPENS, config.model_dump_json(), str(at_once)]
    run = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert run.stdout is not None
    pids = list(map(int, run.stdout.readline().split()))
    assert len(pids) == at_once
    beside = [pid for pid, line in command_lines() if f"-{run.pid}-" in line] if with_all else []
    for pid in (run.pid, *beside):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    run.wait()
    run.stdout.close()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids) and not sleeping(), "boxes to end")
    took = time.monotonic() - began
    left = [] if config.kind == "bubblewrap" else sweep(config)
    return f"all ended {took:.1f} s later; the next start removed {len(left)} containers"


def sleeping() -> list[str]:
    return [line for _, line in command_lines() if "4321" in line.split("\0")]


def command_lines() -> list[tuple[int, str]]:
    lines = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            lines.append((int(name), Path("/proc", name, "cmdline").read_text(errors="replace")))
    return lines


def wait_for(found: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def held(config: BoxConfig) -> dict[str, float]:
    """What this process and the machine have of boxes."""
    gc.collect()
    listed = "" if config.kind == "bubblewrap" else containers_of(config)
    return {
        "threads": sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate()),  # besides a pool
        "open_files": len(os.listdir("/proc/self/fd")),
        "sleeping": len(sleeping()),
        "containers": len(listed.split()),
        "temporary": len(list(Path(tempfile.gettempdir()).iterdir())),
    }


def containers_of(config: BoxConfig) -> str:
    words = [*program_of(config), "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def strain(config: BoxConfig, boxes: int, at_once: int) -> None:
    asyncio.run(many(config, 2, 2))  # by then everything was built once
    first, memory, kind = held(config), peak_mib(), config.kind
    for name, most in (("after another", 1), ("at once", at_once)):
        began = time.monotonic()
        asyncio.run(many(config, boxes, most))
        each = (time.monotonic() - began) / boxes
        print(f"{kind}: {boxes} boxes, {most} {name}: {1000 * each:.0f} ms a box", flush=True)
    for test in (much_output, full_disk, beside_a_bomb):
        print(f"{kind}: {test.__name__}: {asyncio.run(test(config))}", flush=True)
    print(f"{kind}: killed: {killed(config, at_once, with_all=False)}", flush=True)
    print(f"{kind}: killed with all beside it: {killed(config, at_once, with_all=True)}", flush=True)
    last = held(config)
    print(f"{kind}: {last}, memory grew by {peak_mib() - memory:.1f} MiB", flush=True)
    assert all(last[name] <= first[name] for name in first), (first, last)


def main() -> None:
    parser = argparse.ArgumentParser(description="strain boxes, and count what is left of them")
    parser.add_argument("--boxes", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", default=["bubblewrap", "podman", "docker"])
    given = parser.parse_args()
    bubblewrap.MOST_PROCESSES = containers.MOST_PROCESSES = PROCESSES
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        for kind in given.kinds:
            try:
                config = config_of(kind, Path(folder))
            except pytest.skip.Exception as reason:
                print(f"{kind}: not run: {reason}")
            else:
                strain(config, given.boxes, given.at_once)
    tempfile.tempdir = None


if __name__ == "__main__":
    main()
