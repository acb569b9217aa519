"""What goes in and what comes out of a sandbox, and which one a machine gives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from octetrl.config.sandbox import SandboxConfig
from octetrl.process import levels
from octetrl.process.levels import Level
from octetrl.process.sandbox import MIB, Limits, Program, SandboxStatus, find_sandbox, run_python, sandbox_for
from octetrl.process.usage import lists_children, processes
from octetrl.system.errors import UserError
from tests.unit.process.conftest import SMALL, Box, sandbox_or_skip
from tests.unit.process.traces import sandbox_folders, sandbox_processes


def test_what_it_prints_and_how_it_ends(sandbox: Box) -> None:
    result = sandbox.run("import sys\nprint(input() * 2)\nprint('ü', file=sys.stderr)\nsys.exit(3)", "ab\n")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (SandboxStatus.ERROR, 3, "abab\n", "ü\n")
    assert result.detail is None
    assert 0.0 < result.seconds < 30.0


def test_an_ordinary_program(sandbox: Box) -> None:
    """Threads, temporary files, copies, child processes, what they share by a file or a pipe, asyncio and exit()
    work."""
    program = """
import asyncio, json, mmap, multiprocessing, shutil, subprocess, sys, tempfile, threading
found = []
def child(): found.append(subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True).stdout)
thread = threading.Thread(target=child)
thread.start(); thread.join()
with tempfile.TemporaryDirectory() as folder:
    with open(folder + "/x", "w") as file: json.dump(found, file)
    shutil.copyfile(folder + "/x", folder + "/y")
    found += json.load(open(folder + "/y"))
    with open(folder + "/y", "r+b") as file: shared = mmap.mmap(file.fileno(), 0)
near, far = multiprocessing.Pipe()
def fill(): shared[0] = 7; far.send("piped")
other = multiprocessing.get_context("fork").Process(target=fill)
other.start(); found.append(near.recv()); other.join(); found.append(shared[0])
async def one(): await asyncio.sleep(0.01); return 1
found.append(asyncio.run(one()))
print(found)
exit()
"""
    assert sandbox.output(program) == "['42\\n', '42\\n', 'piped', 7, 1]\n"


def test_libraries_that_ask_the_kernel_for_more(sandbox: Box) -> None:
    """Programs of the shell, child processes of asyncio, pools of threads, archives, locks, a database and selectors
    work."""
    program = """
import asyncio, fcntl, selectors, shutil, socket, sqlite3, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
async def child():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(1)", stdout=-1)
    return (await process.communicate())[0], await asyncio.to_thread(int, "5")
print(asyncio.run(child()))
print(subprocess.run("printf 'b\\\\na\\\\n' | sort > x; cp x y; ls -l y > z; cat y", shell=True, capture_output=True))
with ThreadPoolExecutor(3) as pool: print(list(pool.map(abs, [-1, 2])))
with open("lock", "w") as lock: fcntl.flock(lock, fcntl.LOCK_EX); fcntl.lockf(lock, fcntl.LOCK_EX)
with sqlite3.connect("base") as base: base.execute("create table t (a)"); base.execute("insert into t values (1)")
print(base.execute("select * from t").fetchall())
with tempfile.TemporaryDirectory(dir=".") as folder:
    shutil.unpack_archive(shutil.make_archive("all", "zip", ".", "y"), folder); print(open(folder + "/y").read())
left, right = socket.socketpair(type=socket.SOCK_SEQPACKET); right.send(b"x")
with selectors.DefaultSelector() as selector: selector.register(left, 1); print(len(selector.select()))
"""
    said = "(b'1\\n', 5)", "stdout=b'a\\nb\\n', stderr=b'')", "[1, 2]", "[(1,)]", "a\nb\n\n1\n"
    result = sandbox.run(program, cpu_seconds=5)
    assert result.status is SandboxStatus.OK and all(part in result.stdout for part in said), result


def test_numpy_of_the_runs_environment(sandbox: Box) -> None:
    try:
        box = find_sandbox(sandbox.level, python=sys.executable)
    except UserError:
        pytest.skip("the run's interpreter is in a private folder, which another user may not read")
    program = "import numpy\nprint(numpy.linalg.inv(2 * numpy.eye(3)).sum(), numpy.random.default_rng(0).integers(9))"
    outcome = box.run(Program(program, limits=Limits(wall_seconds=60.0, cpu_seconds=30)))
    assert (outcome.status, outcome.stdout) == (SandboxStatus.OK, "1.5 7\n"), outcome


def test_much_input_and_text_that_is_no_text(sandbox: Box) -> None:
    program = "import sys\nprint(len(sys.stdin.read()), flush=True)\nsys.stdout.buffer.write(b'\\xff')"
    assert sandbox.output(program, "x" * 1_000_000) == "1000000\n�"
    assert sandbox.run("pass", "x" * 1_000_000).ok  # that nobody reads
    assert sandbox.run("print('\ud800' == '')").status is SandboxStatus.ERROR  # no source


def test_a_pair_is_joined(sandbox: Box) -> None:
    first = "import socket\ns = socket.socket(fileno=3)\ns.send(b'question')\nprint(s.recv(99), s.recv(99))"
    second = "import os\nprint(os.read(3, 99))\nos.write(3, b'answer')"
    one, other = sandbox.run_pair(first, second)
    assert (one.stdout, other.stdout) == ("b'answer' b''\n", "b'question'\n"), (one, other)


def test_one_of_a_pair_sees_nothing_of_the_other(sandbox: Box) -> None:
    spy = """
import os, time
time.sleep(0.3)
for pid in range(2, 40000) if os.getpid() < 40000 else ():
    try:
        if pid not in (os.getpid(), os.getppid()): os.kill(pid, 9); print("DID kill", pid)
    except OSError: pass
try: print("DID list", os.listdir(os.path.dirname(os.path.dirname(os.getcwd()))))
except OSError: pass
"""
    one, kept = sandbox.run_pair(spy, "import time\ntime.sleep(1.0)\nprint('alive')")
    assert kept.stdout == "alive\n"
    if sandbox.level is Level.LANDLOCK:
        assert "DID" not in one.stdout


def test_a_watching_process_that_fails_is_the_programs_doing(sandbox: Box) -> None:
    """Else a program that knew how to make it fail would be left out instead of scored. Here a limit that is no number
    makes it fail at the first output."""
    program = "import os, time\nos.fork()\nprint(1, flush=True)\ntime.sleep(60)"
    result = sandbox.run(program, output_bytes=float("nan"))
    assert result.status is SandboxStatus.BROKE_SANDBOX, result
    assert result.detail is not None and "the sandbox ended without a report" in result.detail
    assert "slice indices must be integers" in result.detail
    before_the_start = sandbox.run(program, open_files=-7)
    assert before_the_start.status is SandboxStatus.FAILED_SANDBOX, before_the_start


def test_the_watching_process_ignores_signals() -> None:
    box = sandbox_or_skip(Level.LANDLOCK)
    waits = "from signal import *\npthread_sigmask(SIG_BLOCK, {SIGCONT})\nsigwait({SIGCONT})\nprint('done')"
    program = Program(waits, limits=SMALL)
    with ThreadPoolExecutor(1) as threads:
        outcome = threads.submit(box.run, program)
        while not (programs := [pid for pid in sandbox_processes() if parent(pid) != os.getpid()]):
            assert not outcome.done(), "the program ended before it was seen"
            time.sleep(0.01)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM):
            os.kill(parent(programs[0]), number)
        while not outcome.done():  # now it may end; as long as it doesn't wait for the signal, it ignores it
            with contextlib.suppress(ProcessLookupError):
                os.kill(programs[0], signal.SIGCONT)
            time.sleep(0.01)
        assert (outcome.result().status, outcome.result().stdout) == (SandboxStatus.OK, "done\n")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])


def test_many_callers(sandbox: Box) -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda number: sandbox.run(f"print({number})"), range(8)))
    assert [result.stdout for result in results] == [f"{number}\n" for number in range(8)]


def test_the_run_can_be_cut_off(sandbox: Box) -> None:
    """A killed reward worker must leave nothing: the socket's end is the sandbox's."""
    code = (
        "from octetrl.process.sandbox import *\n"
        f"sandbox = find_sandbox(Level('{sandbox.level}'))\n"
        "print('go', flush=True)\n"
        "sandbox.run(Program('import time; time.sleep(600)', limits=Limits(wall_seconds=600.0)))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        time.sleep(0.5)
        caller.kill()
    deadline = time.monotonic() + 60.0
    while sandbox_folders(caller.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not sandbox_folders(caller.pid)  # and the fixture sees that no process is left


def test_run_python() -> None:
    box = sandbox_or_skip()
    assert f"level {box.level}, which does not protect from a flaw of the kernel" in str(box)
    result = run_python("print(input())", stdin="hello\n", limits=Limits(wall_seconds=30.0))
    assert (result.status, result.stdout) == (SandboxStatus.OK, "hello\n")


def test_a_recipe_asks_for_limits_and_a_python() -> None:
    config = SandboxConfig(memory_mib=64, disk_mib=2, output_kib=1, wall_seconds=3.0, processes=4)
    limits = Limits.from_config(config)
    assert (limits.memory_bytes, limits.disk_bytes, limits.output_bytes) == (64 * MIB, 2 * MIB, 1024)
    assert (limits.wall_seconds, limits.processes) == (3.0, 4)
    assert Limits.from_config(SandboxConfig()) == Limits()
    with pytest.raises(UserError, match=r"environment.sandbox.python: '/nowhere/python' does not run as a Python"):
        sandbox_for(SandboxConfig(python="/nowhere/python"))


def test_a_caller_waits_for_a_free_core(monkeypatch: pytest.MonkeyPatch) -> None:
    box = sandbox_or_skip()
    monkeypatch.setattr("octetrl.process.sandbox._slots", threading.BoundedSemaphore(1))
    program = Program("from time import *\nbegan = monotonic()\nsleep(0.3)\nprint(began, monotonic())")
    with ThreadPoolExecutor(3) as threads:
        spans = sorted(tuple(map(float, one.stdout.split())) for one in threads.map(box.run, [program] * 3))
    assert all(ended <= began for (_, ended), (began, _) in pairwise(spans))


def test_a_kernel_that_lists_no_children_is_said_to_limit_each_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it lists them, a child is found; where it does not, every level has that gap."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert lists_children() == (child.pid in processes())
    said = "memory and time of several processes together: this kernel lists no children"
    for listed in (True, False):
        monkeypatch.setattr(levels, "lists_children", lambda listed=listed: listed)
        for level in Level:
            gaps = level.gaps()
            assert any(gap.startswith(said) for gap in gaps) != listed
            assert listed or level is Level.BUBBLEWRAP or any("open and deleted" in gap for gap in gaps)
