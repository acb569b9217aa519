"""Programs that try to break out: to files, processes, the network, rights. The run goes on, and nothing of them stays.

One sandbox of each level makes all attempts of a table, one after the other; each prints what it got. Attempts that end
their program have sandboxes of their own, below and in `test_attacks.py`. `test_another_user.py` runs all of this again
without root's rights.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octetrl.process.levels import Level
from octetrl.process.sandbox import SandboxStatus
from octetrl.process.system_calls import ALWAYS, can_filter
from tests.unit.process.conftest import Box

ATTEMPTS = r"""
=== environment, descriptors and files that it inherits
for number in range(3, 1000):
    try: print("DID", number, os.fstat(number))
    except OSError: pass
if "secret" in str(dict(os.environ)) or open("/dev/null").read() or os.listdir("."): print("DID")
=== environment and memory of other processes
try: processes = os.listdir("/proc")
except OSError: processes = []
for pid in processes + [str(places["run"]), str(os.getppid())]:
    if not pid.isdigit() or int(pid) == os.getpid(): continue
    for name in ("environ", "mem", "maps", "fd", "cwd/x", "root/etc/hostname"):
        try:
            path = f"/proc/{pid}/{name}"
            found = os.listdir(path) if name == "fd" else open(path, "rb").read(64)
            if found: print("DID read", path, found)
        except OSError: pass
=== files of the user
for path in places["secrets"]:
    for what in (os.listdir, lambda path: open(path).read(), lambda path: open(path, "a"), os.unlink):
        try: print("DID", path, what(path))
        except OSError: pass
=== modes, times and owners of the user's files
path = places["secrets"][0]
for what in (lambda: os.chmod(path, 0), lambda: os.utime(path, (0, 0)), lambda: os.truncate(path, 0),
             lambda: os.setxattr(path, "user.x", b"x"), lambda: os.rename(path, "stolen"),
             lambda: os.link(path, "linked"), lambda: os.chown(path, -1, os.getgid())):
    try: what(); print("DID")
    except OSError: pass
=== files elsewhere, in folders that anybody may write to
for folder in places["folders"]:
    try: open(os.path.join(folder, places["left"]), "w").write("x")
    except OSError: pass
=== links out
kept = places["kept"]
os.symlink(kept, "out"); os.symlink(kept + "/secret", "file")
os.mkdir("folder"); os.symlink(kept, "folder/out"); os.symlink("..", "folder/up")
for attempt in (lambda: open("file").read(), lambda: open("out/secret").read(), lambda: os.listdir("out"),
                lambda: os.unlink("out/secret") or 1, lambda: open("out/new", "w"),
                lambda: os.link(kept + "/secret", "hard") or 1):
    try: print("DID", attempt())
    except OSError: pass
=== links swapped for folders while they are counted, and at the end
os.mkdir("real"); end = time.monotonic() + 0.3
os.mkdir("inside"); open("inside/file", "w").close()
while time.monotonic() < end:
    os.rename("real", "place"); os.rename("place", "real")
    os.symlink(places["outside"], "place"); os.unlink("place")
os.rmdir("real"); os.symlink(places["outside"], "real")
=== sockets
def tcp(): socket.create_connection(("127.0.0.1", places["tcp"]), timeout=1)
def named(): socket.socket(socket.AF_UNIX).connect(places["named"])
def abstract(): socket.socket(socket.AF_UNIX).connect(places["abstract"])
def udp(): socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", places["udp"]))
def raw(): socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
for attempt in (tcp, named, abstract, udp, raw):
    try: attempt(); print("DID", attempt.__name__)
    except OSError: pass
left, right = socket.socketpair()
left.send(b"a pair is fine")
if right.recv(99) != b"a pair is fine": print("no pair")
=== datagrams of a pair to sockets outside, such as the log of the machine
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    for name in places["datagrams"]:
        for attempt in (lambda one: one.sendto(b"x", name), lambda one: one.sendmsg([b"x"], [], 0, name),
                        lambda one: one.connect(name) or one.send(b"x"), lambda one: one.bind(name + "2")):
            try: attempt(socket.socketpair(socket.AF_UNIX, kind)[0])
            except OSError: pass
=== signals by descriptors: a pipe or socket can be told to signal a process when it is ready
word, high = struct.pack("i", places["victim"]), 1 << 32
for victim in (places["victim"], -places["victim"]):
    for kind in ("pipe", "socket"):
        if kind == "pipe": reader, writer = os.pipe()
        else: reader, writer = (end.detach() for end in socket.socketpair())
        for attempt in (lambda: fcntl.fcntl(reader, 8, victim), lambda: fcntl.fcntl(reader, 10, 9),
                        lambda: fcntl.fcntl(reader, 15, struct.pack("ii", 1, places["victim"])),
                        lambda: fcntl.ioctl(reader, 0x8901, word), lambda: fcntl.ioctl(reader, 0x8902, word),
                        lambda: 1 / (1 + libc.syscall(places["fcntl"], reader, ctypes.c_long(high | 8), victim)),
                        lambda: 1 / (1 + libc.syscall(places["fcntl"], reader, ctypes.c_long(high | 10), 9))):
            try: attempt(); print("DID", kind)
            except (OSError, ZeroDivisionError): pass
        fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(writer, b"x")
=== user ids by maps and memory by /proc: a process may write its own memory alone
for pid, name in places["maps"]:
    place = f"/proc/{os.getppid() if pid == 'parent' else pid}/{name}"
    try: os.write(os.open(place, os.O_RDWR), b"0 0 1"); print("DID write", place)
    except OSError: pass
    try:
        if name == "mem": os.close(os.open(place, os.O_RDONLY)); print("DID open", place)
    except OSError: pass
"""
WITH_FILTER = r"""
=== rare system calls: io_uring, pidfd, ptrace, key rings, namespaces and others
for name, number in places["rare"].items():
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 5) != -1 or ctypes.get_errno() != 1: print(name)
=== System V objects, which are the machine's: by their number they are read, changed and removed
libc.shmat.restype = ctypes.c_void_p
memory, semaphore = places["shared"]
place = libc.shmat(memory, None, 0)
if place != 2**64 - 1: print("DID read", ctypes.string_at(place, 6))
if libc.semop(semaphore, b"\0\0\1\0\0\0", 1) == 0: print("DID change")
space = ctypes.create_string_buffer(4096)
for kind in ("shm", "sem", "msg"):
    find = getattr(libc, kind + "ctl")
    if (find(0, 0, 3, space) if kind == "sem" else find(0, 3, space)) >= 0: print("DID count", kind)
=== what all programs of the machine share: places for asynchronous input and output, writing back all disks
place = ctypes.c_ulong(0)
for name, number in places["machine"].items():
    arguments = (ctypes.c_long(64), ctypes.byref(place)) if name == "io_setup" else (ctypes.c_long(1),)
    if libc.syscall(ctypes.c_long(number), *arguments) == 0: print("DID", name)
=== a program that the kernel runs as root when a process crashes, whatever the limit on core dumps except if it is 1
for limit in ((0, 0), (0, 1)):
    try: resource.setrlimit(resource.RLIMIT_CORE, limit); print("DID")
    except (OSError, ValueError): pass
if resource.getrlimit(resource.RLIMIT_CORE) != tuple(places["core"]): print(resource.getrlimit(resource.RLIMIT_CORE))
=== names of files as they are created, addresses, interfaces, mounts, notes on files, the host in namespaces
ids, request = (ctypes.c_uint64 * 64)(), struct.pack("IIQQQ", 32, 0, 2**64 - 1, 0, 0)
left, _ = socket.socketpair()
space = ctypes.create_string_buffer(4096)
def created(): return libc.inotify_add_watch(libc.inotify_init1(0), b"/", 0x100) > 0
def mounts(): return libc.syscall(ctypes.c_long(458), request, ids, ctypes.c_long(64), ctypes.c_long(0)) > 0
def addresses(): return fcntl.ioctl(left, 0x8912, struct.pack("iP", 4096, ctypes.addressof(space)))
def interfaces(): return fcntl.ioctl(left, 0x8910, struct.pack("16si20x", b"", 1))
def bound(): left.setsockopt(1, 62, 1); return left.getsockopt(1, 25, 16)
def notes(): return os.getxattr(places["noted"], "user.origin")
def kinds(): return os.listxattr(places["noted"])
def host(): return os.uname().nodename == places["host"]
for attempt in (created, mounts, addresses, interfaces, bound, notes, kinds, host):
    try:
        if attempt(): print("DID", attempt.__name__)
    except OSError: pass
=== rights that it has given up
def more_memory(): resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
def namespace(): return libc.unshare(0x10000000)
def trace(): return libc.ptrace(16, os.getppid(), 0, 0)
def mount(): return libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
for attempt in (more_memory, namespace, trace, mount, lambda: os.setuid(0), lambda: os.nice(-5)):
    try:
        if not attempt(): print("DID", attempt)
    except (OSError, ValueError): pass
=== time, limits and signals of the watching process, which may have the program's user id
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
=== memory that nobody counts: in files without a name, shared, in pipes and buffers, of futexes
file, ends = os.open(__file__, os.O_RDONLY), socket.socketpair()
for number, attempt in enumerate((
    lambda: os.memfd_create("x"),
    lambda: libc.shmget(0, 1 << 30, 0o1600) >= 0,
    lambda: mmap.mmap(-1, 1 << 20),
    lambda: libc.vmsplice(1, None, ctypes.c_ulong(0), 0) >= 0,
    lambda: os.sendfile(1, file, 0, 1),
    lambda: libc.splice(file, None, 1, None, 1, 0) >= 0,
    lambda: ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20),
    lambda: fcntl.fcntl(1, 1031, 1 << 20),
    lambda: libc.prctl(78, 1, 1 << 20, 0) >= 0,
)):
    try:
        if attempt() is not False: print("DID", number)
    except OSError: pass
"""
LAST = r"""
=== its own folder renamed
above = os.path.dirname(os.getcwd())
try: os.rename(above, above + "-moved"); os.rename(above + "-moved", above)
except OSError: pass
=== a name that is no text, which /proc shows to the watching process
libc.prctl(15, b"\xff) \n(\xfe", 0, 0, 0); time.sleep(0.2)
=== all it can delete, its own folder among it
for place in os.environ["TMPDIR"], "..", os.path.dirname(os.getcwd()), "/tmp", "/usr/lib/python3", "/dev/null":
    shutil.rmtree(place, ignore_errors=True)
try: os.unlink(__file__); print("DID unlink its own program")
except OSError: pass
"""
PROGRAM = """
import contextlib, ctypes, fcntl, io, json, mmap, os, resource, shutil, signal, socket, struct, sys, time
given = json.load(sys.stdin)
names = globals() | {"places": given["places"], "libc": ctypes.CDLL(None, use_errno=True)}
for name, source in given["attempts"]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try: exec(source, dict(names))
        except Exception as error: print("it raised", repr(error))
    if said.getvalue(): print(name + ":", said.getvalue()[:200])
print("all tried")
"""


def attempts_of(table: str) -> list[tuple[str, str]]:
    return [(name, source) for name, _, source in (part.partition("\n") for part in table.split("\n=== ")[1:])]


def local_socket(name: str, kind: socket.SocketKind) -> socket.socket:
    """At the path `name`, for everybody, or under a name that begins with NUL, which only the kernel knows."""
    local = socket.socket(socket.AF_UNIX, kind)
    local.bind(name)
    if not name.startswith("\0"):
        Path(name).chmod(0o777)
    if kind is socket.SOCK_STREAM:
        local.listen()
    return local


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What attempts aim at, readable by everybody and where another user may come, unlike a test's own folder."""
    column = ["x86_64", "aarch64"].index(platform.machine())
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    memory, semaphore = libc.shmget(0, 4096, 0o1666), libc.semget(0, 1, 0o1666)
    assert memory >= 0 and semaphore >= 0
    ctypes.memmove(libc.shmat(memory, None, 0), b"secret", 6)
    home = Path.home() / f".octetrl-test-secret-{os.getpid()}"
    tmp_path.chmod(0o755)
    secrets = [tmp_path / "secret", Path(__file__), Path.home(), Path("/etc/passwd"), Path("/etc/hostname"), Path.cwd()]
    with contextlib.ExitStack() as stack:
        held, others = (Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp"))) for _ in range(2))
        folders = [held / name for name in ("kept", "outside", "noted")]
        for folder in (held, others, *folders):  # a socket's path has at most 107 bytes
            folder.mkdir(exist_ok=True)
            folder.chmod(0o777)
        (held / "outside").chmod(0o751)
        for file in (secrets[0], held / "kept/secret", held / "outside/kept"):
            file.write_text("secret")
            file.chmod(0o644)
        with contextlib.suppress(OSError):  # a filesystem without attributes
            os.setxattr(held / "noted", "user.origin", b"secret")
        with contextlib.suppress(OSError):  # a home that can't be written
            home.write_text("secret at home")
            secrets.append(home)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        names = [f"{others}/s", f"\0octetrl-test-{os.getpid()}", f"{others}/d", f"\0octetrl-test-d-{os.getpid()}"]
        kinds = (socket.SOCK_STREAM, socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_DGRAM)
        local = [stack.enter_context(local_socket(*one)) for one in zip(names, kinds, strict=True)]
        victim = stack.enter_context(subprocess.Popen(["sleep", "60"]))
        stack.callback(victim.kill)
        maps = [("self", name) for name in ("uid_map", "gid_map", "setgroups")]
        maps += [(pid, name) for pid in ("parent", str(os.getpid())) for name in (*(name for _, name in maps), "mem")]
        calls = {"io_setup": (206, 0), "sync": (162, 81), "syncfs": (306, 267)}
        before = secrets[0].stat()
        yield {
            "run": os.getpid(), "secrets": list(map(str, secrets)), "victim": victim.pid, "maps": maps,
            "left": f"octetrl-left-by-a-test-{os.getpid()}", "shared": (memory, semaphore), "fcntl": (72, 25)[column],
            "folders": ["/dev/shm", "/var/tmp", "/tmp", "/usr/lib", "/run", "/", str(Path.cwd()), "/program", ".."],
            "named": names[0], "abstract": names[1], "datagrams": names[2:], "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1], **{folder.name: str(folder) for folder in folders},
            "rare": {name: row[column] for name, row in ALWAYS.items() if row[column] is not None},
            "machine": {name: row[column] for name, row in calls.items()},
            "core": (0, 0) if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else (1, 1),
        }  # fmt: skip
        assert victim.poll() is None, "a process of the user was signalled"
        after = secrets[0].stat()
        assert (stat.S_IMODE(after.st_mode), after.st_mtime, after.st_size) == (0o644, before.st_mtime, before.st_size)
        assert all(path.exists() for path in secrets) and secrets[0].read_text() == "secret"
        assert [path.read_text() for path in (held / "kept").iterdir()] == ["secret"]
        assert (held / "outside").stat().st_mode & 0o777 == 0o751 and (held / "outside/kept").read_text() == "secret"
        for listener in (udp, *local[2:]):
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.recv(1)
    home.unlink(missing_ok=True)
    libc.shmctl(memory, 0, None)
    libc.semctl(semaphore, 0, 0)


def test_no_attempt_gets_anything(sandbox: Box, places: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "very secret")
    attempts = attempts_of(ATTEMPTS) + (attempts_of(WITH_FILTER) if can_filter() else []) + attempts_of(LAST)
    assert len(attempts) == (len({name for name, _ in attempts}) if can_filter() else len(attempts)) > 12
    host = os.uname().nodename if sandbox.level is Level.BUBBLEWRAP else None
    given = {"places": {**places, "host": host}, "attempts": attempts}
    with open(places["secrets"][0]) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        outcome = sandbox.run(PROGRAM, json.dumps(given), cpu_seconds=10)
    assert (outcome.status, outcome.stdout) == (SandboxStatus.OK, "all tried\n"), outcome
    given["attempts"] = [attempt for attempt in attempts if attempt[0].startswith("links")]
    outcome = sandbox.run(PROGRAM, json.dumps(given))  # the links are still there when the warden removes the folder
    assert (outcome.status, outcome.stdout, len(given["attempts"])) == (SandboxStatus.OK, "all tried\n", 2), outcome
    assert not [folder for folder in places["folders"] if Path(folder, places["left"]).exists()]
    assert Path("/dev/null").exists()


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
    assert sandbox.output("print(input())", "still here\n") == "still here\n"
