"""Programs that try to break out: to files, processes, the network, rights. The run goes on, and nothing of them stays.

Each attack runs at each level that this machine gives; one that a level says it does not protect from is skipped, and
`test_another_user.py` runs all of this again without root's rights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from octetrl.process.levels import Level
from octetrl.process.sandbox import SandboxStatus
from tests.unit.process.conftest import Box, needs_filter

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
        program = "import os\nfor n in range(3, 1000):\n    try: print(n, os.fstat(n))\n    except OSError: pass"
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
    assert sandbox.output(program) == ""
    after = secrets[0].stat()
    assert (stat.S_IMODE(after.st_mode), after.st_mtime, after.st_size) == (0o644, before.st_mtime, before.st_size)


def test_nothing_is_written_elsewhere(sandbox: Box) -> None:
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


def test_links_out(sandbox: Box) -> None:
    """Nothing is read or deleted through one, by the program or when its folder is removed."""
    kept = Path(tempfile.mkdtemp())  # where another user may come, unlike pytest's own
    kept.chmod(0o777)
    (kept / "secret").write_text("secret")
    program = f"""
import os, shutil
os.symlink({str(kept)!r}, "out")
os.symlink({str(kept / "secret")!r}, "file")
os.mkdir("folder"); os.symlink({str(kept)!r}, "folder/out"); os.symlink("..", "folder/up")
for attempt in (lambda: open("file").read(), lambda: open("out/secret").read(), lambda: os.listdir("out"),
                lambda: os.unlink("out/secret") or 1, lambda: open("out/new", "w"),
                lambda: os.link({str(kept / "secret")!r}, "hard") or 1):
    try: print("DID", attempt())
    except OSError: pass
"""
    result = sandbox.run(program)
    assert result.ok, result
    assert "DID" not in result.stdout
    assert [path.read_text() for path in kept.iterdir()] == ["secret"]
    assert kept.is_dir()
    shutil.rmtree(kept)


def test_deleting_all_it_can(sandbox: Box) -> None:
    """What is in its own folder, and nothing else. Where files are not protected, it is not told to try."""
    program = """
import os, shutil
for place in os.environ["TMPDIR"], "..", "/tmp", "/usr/lib/python3", "/dev/null":
    shutil.rmtree(place, ignore_errors=True)
try: os.unlink(__file__)
except OSError: print("its own program stays")
"""
    assert sandbox.output(program) == "its own program stays\n"
    assert Path("/dev/null").exists()


def test_sockets(sandbox: Box) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,  # a socket's path has at most 107 bytes
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        Path(folder).chmod(0o777)
        named.bind(f"{folder}/s")
        abstract.bind(f"\0octetrl-test-{os.getpid()}")
        udp.bind(("127.0.0.1", 0))
        for listener in (named, abstract):
            listener.listen()
        program = f"""
import socket
def tcp(): socket.create_connection(("127.0.0.1", {tcp.getsockname()[1]}), timeout=1)
def named(): socket.socket(socket.AF_UNIX).connect('{folder}/s')
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
        assert sandbox.output(program) == "b'a pair is fine'\n"
        udp.setblocking(False)
        with pytest.raises(BlockingIOError):
            udp.recv(1)


def test_datagrams_to_sockets_outside(sandbox: Box) -> None:
    """Those of a pair may be sent to any socket of datagrams whose name is known: the log of the machine is one."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        Path(folder).chmod(0o755)
        names = [f"{folder}/s", f"\0octetrl-test-datagrams-{os.getpid()}"]
        for listener, name in zip((named, abstract), names, strict=True):
            listener.bind(name)
            listener.setblocking(False)
        Path(names[0]).chmod(0o777)
        program = f"""
import socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    for name in {names}:
        for attempt in (lambda one: one.sendto(b"x", name), lambda one: one.sendmsg([b"x"], [], 0, name),
                        lambda one: one.connect(name) or one.send(b"x"), lambda one: one.bind(name + "2")):
            try: attempt(socket.socketpair(socket.AF_UNIX, kind)[0])
            except OSError: pass
print("tried")
"""
        assert sandbox.output(program) == "tried\n"
        for listener in (named, abstract):
            with pytest.raises(BlockingIOError):
                listener.recv(1)


@needs_filter
def test_names_and_addresses(sandbox: Box) -> None:
    """Names of files as they are created, addresses and interfaces, mounts, and notes that files carry; in namespaces
    of its own the host's name too."""
    host = os.uname().nodename if sandbox.level is Level.BUBBLEWRAP else None
    noted = Path(tempfile.mkdtemp())
    noted.chmod(0o755)
    with contextlib.suppress(OSError):  # a filesystem without attributes
        os.setxattr(noted, "user.origin", b"secret")
    program = f"""
import ctypes, fcntl, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
ids, request = (ctypes.c_uint64 * 64)(), struct.pack("IIQQQ", 32, 0, 2**64 - 1, 0, 0)
left, _ = socket.socketpair()
space = ctypes.create_string_buffer(4096)
def created(): return libc.inotify_add_watch(libc.inotify_init1(0), b"/", 0x100) > 0
def mounts(): return libc.syscall(ctypes.c_long(458), request, ids, ctypes.c_long(64), ctypes.c_long(0)) > 0
def addresses(): return fcntl.ioctl(left, 0x8912, struct.pack("iP", 4096, ctypes.addressof(space)))
def interfaces(): return fcntl.ioctl(left, 0x8910, struct.pack("16si20x", b"", 1))
def bound(): left.setsockopt(1, 62, 1); return left.getsockopt(1, 25, 16)
def notes(): return os.getxattr({str(noted)!r}, "user.origin")
def kinds(): return os.listxattr({str(noted)!r})
def host(): return os.uname().nodename == {host!r}
for attempt in (created, mounts, addresses, interfaces, bound, notes, kinds, host):
    try:
        if attempt(): print("DID", attempt.__name__)
    except OSError: pass
print("tried")
"""
    try:
        result = sandbox.run(program)
    finally:
        noted.rmdir()
    assert (result.status, result.stdout) == (SandboxStatus.OK, "tried\n"), result


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


@needs_filter
def test_rights_it_has_given_up(sandbox: Box) -> None:
    program = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
def more_memory(): resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
def namespace(): return libc.unshare(0x10000000)
def trace(): return libc.ptrace(16, os.getppid(), 0, 0)
def mount(): return libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
for attempt in (more_memory, namespace, trace, mount, lambda: os.setuid(0), lambda: os.nice(-5)):
    try:
        if not attempt(): print("DID", attempt)
    except (OSError, ValueError): pass
"""
    assert sandbox.output(program) == ""


@needs_filter
def test_the_watching_process_is_out_of_reach(sandbox: Box) -> None:
    """Where the program has the warden's user id, the kernel itself would let it take the warden's time and limits,
    and pass it signals that an interpreter handles."""
    program = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
def call(name, *arguments):
    if getattr(libc, name)(*arguments): raise OSError(name)
none, idle = (ctypes.c_uint64 * 2)(0, 0), ctypes.byref(ctypes.c_int(0))
for warden in {os.getppid(), 1}:
    for attempt in (
        lambda: os.kill(warden, signal.SIGINT),
        lambda: call("tgkill", warden, warden, signal.SIGINT),
        lambda: signal.pidfd_send_signal(os.open(f"/proc/{warden}", os.O_RDONLY), signal.SIGINT),
        lambda: call("setpriority", 0, warden, 19),
        lambda: call("setpriority", 2, 0, 19),
        lambda: call("sched_setaffinity", warden, 8, ctypes.byref(ctypes.c_uint64(1))),
        lambda: call("sched_setscheduler", warden, 5, idle),
        lambda: call("sched_setparam", warden, idle),
        lambda: call("prlimit", warden, 7, None, none),
        *(lambda kind=kind: call("prlimit", warden, kind, none, None) for kind in (7, 9, 0)),
    ):
        try: attempt(); print("DID", warden)
        except OSError: pass
print("tried")
"""
    assert sandbox.output(program) == "tried\n"


def test_after_all_that_it_still_works(sandbox: Box) -> None:
    assert sandbox.output("print(input())", "still here\n") == "still here\n"
