"""Attacks on what watches a sandbox: on its count of files and memory, on its verdict, and through rare system calls.

A program that could make the sandbox itself fail would get no verdict, and its rollout would be left out instead of
scored 0. Each runs at each level; `test_another_user.py` runs all of this again without root's rights.
"""

from __future__ import annotations

import mmap
import os
import platform
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octetrl.process import usage
from octetrl.process.levels import Level
from octetrl.process.sandbox import Outcome, SandboxStatus
from octetrl.process.warden import choose_user
from tests.unit.process.conftest import Box, needs_filter
from tests.unit.process.traces import sandbox_processes

NO_ROOM = {SandboxStatus.DISK_LIMIT, SandboxStatus.ERROR}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other call table of x86_64")
@pytest.mark.parametrize(
    "code",
    ["b8 14 00 00 00 cd 80 c3", "b8 27 00 00 40 0f 05 c3"],  # mov eax, getpid; int 0x80 or, as x32, syscall; ret
    ids=["i386", "x32"],
)
@needs_filter
def test_calls_by_another_table(sandbox: Box, code: str) -> None:
    program = f"""
import ctypes, mmap
place = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
place.write(bytes.fromhex("{code}"))
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(place)))())
"""
    result = sandbox.run(program)
    assert (result.status, result.stdout, result.exit_code) == (SandboxStatus.CRASHED, "", -signal.SIGSYS)


def ends_for_room(sandbox: Box, program: str) -> Outcome:
    """Where 40 MiB find no room, `program` is ended while it waits, or told that there is none."""
    result = sandbox.run(f"import os, time\n{program}\ntime.sleep(60)\nprint('kept')", wall_seconds=50.0, cpu_seconds=9)
    assert result.status in NO_ROOM and "kept" not in result.stdout, result
    return result


@pytest.mark.parametrize(
    "program",
    [
        "held = []\nfor n in range(10):\n    held.append(open('x', 'wb', 0)); held[-1].write(bytes(4 << 20))\n"
        "    os.unlink('x')",
        "import mmap\nheld = []\nfor n in range(10):\n    with open('x', 'w+b', 0) as file:\n"
        "        file.write(bytes(4 << 20)); held.append(mmap.mmap(file.fileno(), 0))\n    os.unlink('x')",
    ],
    ids=["open", "mapped"],
)
def test_deleted_files_that_are_kept(sandbox: Box, program: str) -> None:
    if not sandbox.level.counts_deleted_files():
        pytest.skip("this level says that it does not count deleted files")
    ends_for_room(sandbox, program)


def test_files_in_a_folder_that_may_not_be_read(sandbox: Box) -> None:
    fill = "for n in range(10): open(f'{n}', 'wb').write(bytes(4 << 20))"
    ends_for_room(sandbox, f"os.mkdir('d', 0o300); os.chdir('d')\n{fill}")


def test_a_program_that_hides_its_files(sandbox: Box) -> None:
    """What runs from a file that may not be read is hidden from its own user, the one that watches among them."""
    if os.geteuid() == 0 or sandbox.level is Level.BUBBLEWRAP:
        pytest.skip("root sees into all processes, and the folder of bubblewrap is bounded")
    program = """
import shutil, sys
with open(os.path.realpath(sys.executable), "rb") as source:
    with open(os.open("python", os.O_CREAT | os.O_WRONLY, 0o111), "wb") as copy: shutil.copyfileobj(source, copy)
os.execv("python", ["python", "-I", "-c", "import time; time.sleep(60)"])
"""
    result = sandbox.run(f"import os\n{program}", disk_bytes=64 << 20, wall_seconds=50.0)
    assert result.status is SandboxStatus.DISK_LIMIT, result


def test_many_small_files_at_once(sandbox: Box) -> None:
    """Written in one go, then the program waits: the next look finds them."""
    ends_for_room(sandbox, "for n in range(200): open(f'{n}', 'wb').write(bytes(1 << 16))")


def test_files_that_vanish_while_they_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is removed between list and look must not hide those after it."""
    for name in ("a", "b", "c"):
        (tmp_path / name).write_bytes(bytes(1 << 16))
    scandir = os.scandir

    class Racing:
        """The list of a folder whose first file is removed once it is listed."""

        def __init__(self, path: str) -> None:
            with scandir(path) as entries:
                self._entries = list(entries)
            os.unlink(self._entries[0].path)

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            return iter(self._entries)

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(os, "scandir", Racing)
    size, files = usage.folder_use(str(tmp_path), 10)
    assert files == 3 and size >= 2 << 16


def test_a_thread_that_ends_while_its_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that starts and ends threads all the time is looked at like any other."""
    path = tmp_path / "mapped"
    with path.open("w+b") as file:
        file.truncate(1 << 16)
        mapped = mmap.mmap(file.fileno(), 0)
    path.unlink()
    listdir = os.listdir
    gone = lambda folder: [*listdir(folder), *(["0"] if str(folder).endswith("/task") else [])]  # noqa: E731
    monkeypatch.setattr(os, "listdir", gone)
    monkeypatch.setattr(usage, "sees_descriptors_of_others", lambda: True)
    assert usage.deleted_use([os.getpid()], str(tmp_path), 10)[0] >= 1 << 16
    mapped.close()


def test_a_burst_of_memory(sandbox: Box) -> None:
    """Ten processes take 100 MiB each at one moment. All are ended, and the look at them is quick enough for it."""
    program = """
import os, time
start = time.monotonic() + 0.2
for _ in range(9):
    if os.fork() == 0: break
time.sleep(max(0.0, start - time.monotonic()))
held = bytearray(b"x") * (100 << 20)
time.sleep(60)
"""
    result = sandbox.run(program, wall_seconds=50.0, cpu_seconds=15)
    assert result.status in {SandboxStatus.MEMORY_LIMIT, SandboxStatus.ERROR}, result
    assert result.seconds < 49.0


def test_memory_shared_after_a_fork_counts_once(sandbox: Box) -> None:
    program = """
import os, time
held = bytearray(b"x") * (50 << 20)
children = [os.fork() for _ in range(1)] + [os.fork() for _ in range(1)]
time.sleep(0.3)
print("shared", flush=True)
"""
    result = sandbox.run(program)
    assert result.status is SandboxStatus.OK, result


def test_the_program_goes_first_when_memory_is_out(sandbox: Box) -> None:
    """The kernel's killer takes what has the highest score: never the process that watches, which has the verdict."""
    scores: dict[str, int] = {}
    runner = threading.Thread(target=lambda: sandbox.run("import time\ntime.sleep(60)"))
    runner.start()
    while runner.is_alive() and not scores:
        for pid in sandbox_processes():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                score = int(Path(f"/proc/{pid}/oom_score_adj").read_text())
            except OSError:
                continue
            if any(word.endswith(b"/program/main.py") for word in words):
                scores["program"] = score
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    runner.join()
    assert scores == {"program": 1000}


def test_a_user_id_that_nobody_has() -> None:
    everybody = [range(2**32 - 1)]
    assert choose_user(4711, everybody, lambda _: True) == 2_000_004_711  # not looked up: nobody's by definition
    container = [range(1), range(1, 65537)]
    assert choose_user(3, container, lambda user: False) == 32_772
    assert choose_user(3, container, lambda user: user < 40_000) == 40_000
    with_holes = [range(1), range(1000, 1001), range(100_000, 165_536)]
    assert choose_user(4711, with_holes, lambda _: False) in with_holes[2]
    of_all = {choose_user(number, container, lambda _: False) for number in range(70_000)}
    assert not of_all & {0, 65534} and all(user in container[1] for user in of_all)
    for nobodys in ([range(1)], container):
        with pytest.raises(OSError, match="maps no user id that is free"):
            choose_user(1, nobodys, lambda user: user != 0)
