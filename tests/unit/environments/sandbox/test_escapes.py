"""Programs that try to break out, use up the machine or outlive their end. The run goes on, and nothing of them stays.

Each attack runs at each level that this machine gives; one that a level says it does not protect from is skipped, and
`test_another_user.py` runs all of this again without root's rights.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path

import pytest

from octetrl.environments.sandbox.limits import SandboxStatus
from tests.unit.environments.sandbox.conftest import Box

TOO_LONG = {SandboxStatus.WALL_TIMEOUT, SandboxStatus.CPU_LIMIT}
TOO_DEEP = {SandboxStatus.CRASHED, SandboxStatus.MEMORY_LIMIT, SandboxStatus.ERROR, SandboxStatus.CPU_LIMIT}
NO_ROOM = {SandboxStatus.DISK_LIMIT, SandboxStatus.ERROR}


def test_a_fork_bomb(sandbox: Box) -> None:
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert sandbox.run(bomb).status in TOO_LONG


def test_the_number_of_processes_is_bounded(sandbox: Box) -> None:
    count = """
import os, time
made = 0
try:
    for _ in range(500):
        if os.fork() == 0: time.sleep(60)
        made += 1
except OSError as error: print(made, error)
"""
    made = int(sandbox.run(count).stdout.split()[0])
    as_all_of_the_users = 40 if os.geteuid() else 0
    assert 5 <= made <= 16 + as_all_of_the_users


def test_a_fork_bomb_of_sessions(sandbox: Box) -> None:
    """Each process tries to leave the group and the parent behind."""
    bomb = """
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD): signal.signal(number, signal.SIG_IGN)
while True:
    try:
        if os.fork() == 0:
            try: os.setsid()
            except OSError: pass
    except OSError: pass
"""
    assert sandbox.run(bomb).status in TOO_LONG


@pytest.mark.parametrize(
    "program",
    [
        "held = []\nwhile True: held.append(bytearray(1 << 24))",
        "import mmap\nheld = [mmap.mmap(-1, 1 << 24) for _ in range(100)]\nfor m in held: m.write(bytes(1 << 24))",
        "text = 'x'\nwhile True: text += text",
        """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(os.urandom(1 << 20) * 40)
        time.sleep(60)
time.sleep(60)
""",
    ],
    ids=["heap", "maps", "string", "six processes together"],
)
def test_a_memory_bomb(sandbox: Box, program: str) -> None:
    result = sandbox.run(program)
    assert result.status in {SandboxStatus.MEMORY_LIMIT, SandboxStatus.ERROR}, result
    if result.status is SandboxStatus.ERROR:
        assert "Cannot allocate memory" in result.stderr


@pytest.mark.parametrize(
    "program",
    [
        "import os\nmade = os.memfd_create('x')",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 30, 0o1600) >= 0",
    ],
)
def test_memory_that_nobody_counts(sandbox: Box, program: str) -> None:
    if not sandbox.protection.has_filter:
        pytest.skip("no system-call filter here")
    assert sandbox.run(program).status is SandboxStatus.ERROR


@pytest.mark.parametrize(
    "program",
    [
        "while True: print('spam ' * 100)",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        "import sys\nwhile True: sys.stderr.write('e' * 4000)",
        "import os\nwhile True:\n    if os.fork() == 0: os._exit(print('x' * 999, flush=True) or 0)\n    os.wait()",
    ],
)
def test_endless_output(sandbox: Box, program: str) -> None:
    result = sandbox.run(program)
    assert result.status is SandboxStatus.OUTPUT_LIMIT
    assert 3000 < len(result.stdout) + len(result.stderr) <= 4096
    assert result.seconds < 10.0


READ_THE_REST = """
import os
for pid in os.listdir("/proc") + ["{run}", str(os.getppid())]:
    if not pid.isdigit() or int(pid) == os.getpid(): continue
    for name in ("environ", "mem", "maps", "fd", "cwd/x", "root/etc/hostname"):
        try:
            path = f"/proc/{{pid}}/{{name}}"
            found = os.listdir(path) if name == "fd" else open(path, "rb").read(64)
            if found: print("READ", path, found)
        except OSError: pass
"""


def test_the_parents_environment_and_memory(sandbox: Box) -> None:
    if not sandbox.protection.parent:
        pytest.skip("this level says that it does not protect the run's memory")
    result = sandbox.run(READ_THE_REST.format(run=os.getpid()))
    assert "READ" not in result.stdout
    assert result.status in {SandboxStatus.OK, SandboxStatus.ERROR}


def test_it_inherits_no_environment(sandbox: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "very secret")
    result = sandbox.run("import os\nprint(dict(os.environ), open('/dev/null').read(), os.listdir('.'))")
    assert result.ok
    assert "secret" not in result.stdout
    assert result.stdout.endswith("[]\n")


def test_it_inherits_no_descriptor(sandbox: Box, tmp_path: Path) -> None:
    with open(tmp_path / "held", "w") as held:
        os.set_inheritable(held.fileno(), True)
        program = "import os\nfor number in range(3, 1000):\n    try: print(number, os.fstat(number))\n    except OSError: pass"
        assert sandbox.run(program).stdout == ""


@pytest.fixture
def secrets(tmp_path: Path) -> list[Path]:
    """In a temporary folder, in the repository and, where it may be written, at home: readable by everybody."""
    tmp_path.chmod(0o755)
    planted = [tmp_path / "secret"]
    planted[0].write_text("secret")
    planted[0].chmod(0o644)
    return [*planted, Path(__file__), Path.home(), Path("/etc/passwd"), Path("/etc/hostname"), Path.cwd()]


def test_files_of_the_user(sandbox: Box, secrets: list[Path]) -> None:
    if not sandbox.protection.files:
        pytest.skip("this level says that it does not hide files")
    program = f"""
import os
for path in {[str(path) for path in secrets]}:
    for what in (os.listdir, lambda path: open(path).read(), lambda path: open(path, "a"), os.unlink):
        try: print("DID", path, what(path))
        except OSError: pass
"""
    result = sandbox.run(program)
    assert result.ok, result
    assert "DID" not in result.stdout
    assert secrets[0].read_text() == "secret"


def test_a_file_at_home(sandbox: Box) -> None:
    secret = Path.home() / f".octetrl-test-secret-{os.getpid()}"
    try:
        secret.write_text("secret at home")
    except OSError:
        pytest.skip("this user's home can't be written")
    try:
        result = sandbox.run(f"print(open({str(secret)!r}).read())")
    finally:
        secret.unlink()
    if sandbox.protection.files:
        assert result.status is SandboxStatus.ERROR
        assert "secret at home" not in result.stdout


def test_modes_times_and_owners_of_the_users_files(sandbox: Box, secrets: list[Path]) -> None:
    before = secrets[0].stat()
    path = repr(str(secrets[0]))
    program = f"""
import os
for what in (lambda: os.chmod({path}, 0), lambda: os.utime({path}, (0, 0)), lambda: os.truncate({path}, 0),
             lambda: os.setxattr({path}, "user.x", b"x"), lambda: os.rename({path}, "stolen"),
             lambda: os.link({path}, "linked"), lambda: os.chown({path}, -1, os.getgid())):
    try: what(); print("DID")
    except OSError: pass
"""
    if not sandbox.protection.files:
        pytest.skip("this level says that it does not protect files")
    result = sandbox.run(program)
    assert (result.status, result.stdout) == (SandboxStatus.OK, "")
    after = secrets[0].stat()
    assert (stat.S_IMODE(after.st_mode), after.st_mtime, after.st_size) == (0o644, before.st_mtime, before.st_size)


def test_nothing_is_written_elsewhere(sandbox: Box) -> None:
    if not sandbox.protection.files:
        pytest.skip("this level says that it does not protect folders that all may write")
    name = f"octetrl-left-by-a-test-{os.getpid()}"
    folders = ["/dev/shm", "/var/tmp", "/tmp", "/usr/lib", "/run", "/", str(Path.cwd()), "/program", ".."]
    program = f"""
import os
for folder in {folders}:
    try: open(os.path.join(folder, {name!r}), "w").write("x")
    except OSError: pass
"""
    assert sandbox.run(program).ok
    assert not [folder for folder in folders if Path(folder, name).exists()]


def test_sockets(sandbox: Box, tmp_path: Path) -> None:
    if not sandbox.protection.network:
        pytest.skip("this level says that it does not protect the network")
    tmp_path.chmod(0o777)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        named.bind(str(tmp_path / "s"))
        abstract.bind(f"\0octetrl-test-{os.getpid()}")
        udp.bind(("127.0.0.1", 0))
        for listener in (named, abstract):
            listener.listen()
        program = f"""
import socket
def tcp(): socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), timeout=1)
def named(): socket.socket(socket.AF_UNIX).connect({str(tmp_path / "s")!r})
def abstract(): socket.socket(socket.AF_UNIX).connect("\\0octetrl-test-{os.getpid()}")
def udp(): socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", {udp.getsockname()[1]}))
def raw(): socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
for attempt in (tcp, named, abstract, udp, raw):
    try: attempt(); print("DID", attempt.__name__)
    except OSError: pass
left, right = socket.socketpair()
left.send(b"a pair is fine")
print(right.recv(99))
"""
        result = sandbox.run(program)
        assert (result.status, result.stdout) == (SandboxStatus.OK, "b'a pair is fine'\n"), result
        udp.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(1)


@pytest.mark.parametrize(
    "program",
    [
        "import time\ntime.sleep(3600)",
        "import signal\nfor n in set(signal.valid_signals()) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: signal.pause()",
        "import os, signal\nos.kill(0, signal.SIGSTOP)",
        "import os\nos.close(0); os.close(1); os.close(2)\nimport time; time.sleep(3600)",
        "import sys\nsys.stdin.read()\nimport threading\nthreading.Event().wait()",
    ],
    ids=["sleep", "every signal ignored", "stopped", "streams closed", "wait"],
)
def test_one_that_never_ends(sandbox: Box, program: str) -> None:
    started = time.monotonic()
    result = sandbox.run(program, wall_seconds=0.5)
    assert result.status is SandboxStatus.WALL_TIMEOUT
    assert result.exit_code is None
    assert time.monotonic() - started < 5.0


def test_one_that_burns_time(sandbox: Box) -> None:
    result = sandbox.run("while True: pass")
    assert result.status is SandboxStatus.CPU_LIMIT
    assert result.cpu_seconds >= 0.9


def test_time_burnt_by_children_counts(sandbox: Box) -> None:
    program = "import os\nfor _ in range(3): os.fork()\nwhile True: pass"
    result = sandbox.run(program)
    assert result.status is SandboxStatus.CPU_LIMIT
    assert result.cpu_seconds < 3.0  # and not four times one second


DAEMON = """
import os, sys, time
if os.fork() == 0:
    try: os.setsid()
    except OSError: pass
    if os.fork() == 0:
        {streams}
        while True: time.sleep(0.01)
    os._exit(0)
os.wait()
print("gone")
"""


@pytest.mark.parametrize("streams", ["pass", "for number in range(3): os.close(number)"])
def test_a_daemon(sandbox: Box, streams: str) -> None:
    """The program ends well; what it left running, with our pipes in hand or without, ends too and is not waited for."""
    result = sandbox.run(DAEMON.format(streams=streams))
    assert (result.status, result.stdout) == (SandboxStatus.OK, "gone\n")
    assert result.seconds < 10.0


@pytest.mark.parametrize(
    "program",
    [
        "with open('big', 'wb') as file:\n    while True: file.write(bytes(1 << 20))",
        "for number in range(10 ** 6):\n    with open(f'file{number}', 'wb') as file: file.write(bytes(1 << 20))",
        "for number in range(10 ** 6): open(f'file{number}', 'w').close()",
        "import os\nfor number in range(10 ** 6):\n    os.mkdir('d')\n    os.chdir('d')",
        "import os\nwith open('big', 'wb') as file: os.posix_fallocate(file.fileno(), 0, 10 ** 9)",
    ],
    ids=["one file", "many files", "empty files", "deep folders", "reserved"],
)
def test_gigabytes(sandbox: Box, program: str) -> None:
    result = sandbox.run(program)
    assert result.status in NO_ROOM, result


def test_a_folder_that_is_hard_to_remove(sandbox: Box) -> None:
    """A tree past any path's length and any recursion, without modes, with names that are no text."""
    program = """
import os
open(b"\\xff\\xfe", "w").close()
os.symlink("/", "everything"); os.mkfifo("pipe")
os.mkdir("closed"); open("closed/file", "w").close()
try: os.chmod("closed", 0)
except OSError: pass
for number in range(1500):
    os.mkdir("deep" * 20)
    os.chdir("deep" * 20)
"""
    result = sandbox.run(program, files=2000)
    assert result.status in {SandboxStatus.OK, SandboxStatus.DISK_LIMIT}, result


@pytest.mark.parametrize(
    ("program", "statuses"),
    [
        ("def f(): f()\nf()", {SandboxStatus.ERROR}),
        ("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", TOO_DEEP),
        ("import sys\nsys.setrecursionlimit(10 ** 9)\nx = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x)", TOO_DEEP),
        ("import ctypes\nctypes.string_at(0)", {SandboxStatus.CRASHED}),
        ("import os\nos.abort()", {SandboxStatus.CRASHED}),
    ],
)  # fmt: skip
def test_crashes(sandbox: Box, program: str, statuses: set[SandboxStatus]) -> None:
    result = sandbox.run(program)
    assert result.status in statuses, result
    assert result.exit_code != 0


def test_signals_to_the_run(sandbox: Box) -> None:
    """They reach neither the run nor the warden, which still gives its report."""
    program = f"""
import os, signal
for pid in (os.getppid(), {os.getpid()}, {os.getppid()}, 1):
    if pid in (0, os.getpid()): continue
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        try: os.kill(pid, number)
        except OSError: pass
print("tried")
os.kill(-1, signal.SIGKILL)
"""
    result = sandbox.run(program)
    assert result.stdout == "tried\n" or result.status is SandboxStatus.KILLED
    assert result.status in {SandboxStatus.OK, SandboxStatus.KILLED, SandboxStatus.ERROR}, result


def test_rights_it_has_given_up(sandbox: Box) -> None:
    if not sandbox.protection.has_filter:
        pytest.skip("no system-call filter here")
    program = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
def more_memory(): resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
def namespace(): return libc.unshare(0x10000000)
def trace(): return libc.ptrace(16, os.getppid(), 0, 0)
def mount(): return libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
def limits_of_others(): return libc.prlimit(os.getppid(), 7, ctypes.byref(ctypes.c_uint64 * 2)(), None)
for attempt in (more_memory, namespace, trace, mount, lambda: os.setuid(0), lambda: os.nice(-5)):
    try:
        if not attempt(): print("DID", attempt)
    except (OSError, ValueError): pass
"""
    result = sandbox.run(program)
    assert (result.status, result.stdout) == (SandboxStatus.OK, ""), result


def test_after_all_that_it_still_works(sandbox: Box) -> None:
    result = sandbox.run("print(input())", "still here\n")
    assert (result.status, result.stdout) == (SandboxStatus.OK, "still here\n")
