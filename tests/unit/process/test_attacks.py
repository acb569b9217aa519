"""Attacks on what watches a sandbox: on its count of files and memory, on its verdict, and through rare system calls.

A program that could make the sandbox itself fail would get no verdict, and its rollout would be left out instead of
scored 0. Each runs at each level; `test_another_user.py` runs all of this again without root's rights.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octetrl.process import usage
from octetrl.process.levels import Level
from octetrl.process.sandbox import Outcome, SandboxStatus
from octetrl.process.system_calls import ALWAYS
from octetrl.process.warden import choose_user
from tests.unit.process.conftest import Box, needs_filter
from tests.unit.process.traces import sandbox_processes

NO_ROOM = {SandboxStatus.DISK_LIMIT, SandboxStatus.ERROR}


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user that runs the sandboxes."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


SIGNALS_BY_DESCRIPTORS = """
import ctypes, fcntl, os, socket, struct
libc = ctypes.CDLL(None)
word, high = struct.pack("i", {victim}), 1 << 32
for victim in ({victim}, -{victim}):
    for kind in ("pipe", "socket"):
        if kind == "pipe": reader, writer = os.pipe()
        else: reader, writer = (end.detach() for end in socket.socketpair())
        for attempt in (lambda: fcntl.fcntl(reader, 8, victim), lambda: fcntl.fcntl(reader, 10, 9),
                        lambda: fcntl.fcntl(reader, 15, struct.pack("ii", 1, {victim})),
                        lambda: fcntl.ioctl(reader, 0x8901, word), lambda: fcntl.ioctl(reader, 0x8902, word),
                        lambda: 1 / (1 + libc.syscall({fcntl}, reader, ctypes.c_long(high | 8), victim)),
                        lambda: 1 / (1 + libc.syscall({fcntl}, reader, ctypes.c_long(high | 10), 9))):
            try: attempt(); print("DID", kind)
            except (OSError, ZeroDivisionError): pass
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(writer, b"x")
print("tried")
"""


def test_signals_by_descriptors(sandbox: Box, bystander: subprocess.Popen[bytes]) -> None:
    """A pipe or socket can be told to signal a process when it is ready: F_SETOWN, F_SETSIG and their likes."""
    number = {"x86_64": 72, "aarch64": 25}[platform.machine()]
    assert sandbox.output(SIGNALS_BY_DESCRIPTORS.format(victim=bystander.pid, fcntl=number)) == "tried\n"
    time.sleep(0.05)
    assert bystander.poll() is None


@needs_filter
def test_rare_system_calls(sandbox: Box) -> None:
    """io_uring, pidfd, ptrace, key rings, namespaces and others: the kernel answers that they are not permitted."""
    column = ["x86_64", "aarch64"].index(platform.machine())
    numbers = {name: row[column] for name, row in ALWAYS.items() if row[column] is not None}
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers}.items():
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 5) != -1 or ctypes.get_errno() != 1: print(name)
print("tried")
"""
    assert sandbox.run(program).stdout == "tried\n"


@pytest.fixture
def shared_objects() -> Iterator[tuple[int, int]]:
    """System V memory that holds a secret, and a semaphore, both open to everybody."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    memory, semaphore = libc.shmget(0, 4096, 0o1666), libc.semget(0, 1, 0o1666)
    assert memory >= 0 and semaphore >= 0
    ctypes.memmove(libc.shmat(memory, None, 0), b"secret", 6)
    yield memory, semaphore
    libc.shmctl(memory, 0, None)
    libc.semctl(semaphore, 0, 0)


@needs_filter
def test_objects_that_outlive_processes(sandbox: Box, shared_objects: tuple[int, int]) -> None:
    """System V objects are the machine's: by their number they are read, changed and removed."""
    program = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
memory, semaphore = {shared_objects}
place = libc.shmat(memory, None, 0)
if place != 2**64 - 1: print("DID read", ctypes.string_at(place, 6))
if libc.semop(semaphore, b"\\0\\0\\1\\0\\0\\0", 1) == 0: print("DID change")
space = ctypes.create_string_buffer(4096)
for kind in ("shm", "sem", "msg"):
    find = getattr(libc, kind + "ctl")
    if (find(0, 0, 3, space) if kind == "sem" else find(0, 3, space)) >= 0: print("DID count", kind)
print("tried")
"""
    assert sandbox.output(program) == "tried\n"


@needs_filter
def test_what_all_programs_of_the_machine_share(sandbox: Box) -> None:
    """Places for asynchronous input and output, of which the machine has a fixed number; writing back all disks."""
    column = ["x86_64", "aarch64"].index(platform.machine())
    calls = {"io_setup": (206, 0), "sync": (162, 81), "syncfs": (306, 267)}
    numbers = {name: row[column] for name, row in calls.items()}
    program = f"""
import ctypes
libc = ctypes.CDLL(None)
place = ctypes.c_ulong(0)
for name, number in {numbers}.items():
    arguments = (ctypes.c_long(64), ctypes.byref(place)) if name == "io_setup" else (ctypes.c_long(1),)
    if libc.syscall(ctypes.c_long(number), *arguments) == 0: print("DID", name)
print("tried")
"""
    assert sandbox.output(program) == "tried\n"


@needs_filter
def test_a_crash_starts_no_program(sandbox: Box) -> None:
    """A core pattern may be a program, which the kernel runs as root when a process crashes. It does so whatever the
    limit on core dumps, except if that is 1."""
    most = resource.getrlimit(resource.RLIMIT_CORE)[1]
    program = """
import resource
for limit in ((0, 0), (0, 1)):
    try: resource.setrlimit(resource.RLIMIT_CORE, limit); print("DID")
    except (OSError, ValueError): pass
print(resource.getrlimit(resource.RLIMIT_CORE))
"""
    expected = (0, 0) if most == 0 else (1, 1)
    assert sandbox.run(program).stdout == f"{expected}\n"


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


def test_maps_of_users_and_memory_by_proc(sandbox: Box) -> None:
    """A process may write its own memory, which gives it nothing, and neither user ids nor memory of others."""
    own = [("self", name) for name in ("uid_map", "gid_map", "setgroups")]
    others = ["parent", str(os.getpid())]
    foreign = [(pid, name) for pid in others for name in ("uid_map", "gid_map", "setgroups", "mem")]
    program = f"""
import os
for pid, name in {own + foreign}:
    place = f"/proc/{{os.getppid() if pid == 'parent' else pid}}/{{name}}"
    try: os.write(os.open(place, os.O_RDWR), b"0 0 1"); print("DID write", place)
    except OSError: pass
    try:
        if name == "mem": os.close(os.open(place, os.O_RDONLY)); print("DID open", place)
    except OSError: pass
"""
    assert sandbox.output(program) == ""


def test_a_name_that_is_no_text(sandbox: Box) -> None:
    """/proc shows a process's name to the one that watches, whatever bytes it has."""
    program = (
        "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff) \\n(\\xfe', 0, 0, 0)\ntime.sleep(0.2)\nprint(1)"
    )
    assert sandbox.output(program) == "1\n"


@pytest.mark.parametrize(
    "what", ["shutil.rmtree(above)", "os.rename(above, above + '-moved') or os.rename(above + '-moved', above)"]
)
def test_its_own_folder_taken_away(sandbox: Box, what: str) -> None:
    program = f"import os, shutil\nabove = os.path.dirname(os.getcwd())\ntry: {what}\nexcept OSError: pass\nprint(1)"
    assert sandbox.output(program) == "1\n"


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


def test_links_swapped_for_folders(sandbox: Box, tmp_path: Path) -> None:
    """A folder that turns into a link and back while it is counted, and at the end is one: nothing outside changes."""
    tmp_path.chmod(0o777)
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o751)
    (outside / "kept").write_text("kept")
    program = f"""
import os, time
os.mkdir("real"); end = time.monotonic() + 0.3
os.mkdir("inside"); open("inside/file", "w").close()
while time.monotonic() < end:
    os.rename("real", "place"); os.rename("place", "real")
    os.symlink({str(outside)!r}, "place"); os.unlink("place")
os.rmdir("real"); os.symlink({str(outside)!r}, "real")
"""
    result = sandbox.run(program)
    assert result.ok, result
    assert outside.stat().st_mode & 0o777 == 0o751
    assert (outside / "kept").read_text() == "kept"


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
