"""The process between a run and foreign code: starts one child, watches it with all processes below it, and reports.

    run -- supervisor (adopts orphans) -- child (a session of its own) -- whatever the child starts

Two programs use it: `worker.py`, whose child answers calls of a function, and `warden.py`, whose child is a program in
a sandbox. A socket connects run and supervisor: the run sends an order, the supervisor answers with {"started": pid}
when the child runs, and with a report when everything below it has ended. The socket is also a lifeline. When its other
end closes, the run is gone, and the supervisor ends all processes below it, also those in sessions of their own and
without parents. Messages are JSON behind eight bytes of length.

A report has `exit` (the child's exit code, or minus the signal; null if the supervisor ended it), `stopped` (the limit
that was exceeded, "abandoned" if the run ended the child, or null), `stdout`, `stderr`, `cpu_seconds`, `wall_seconds`,
`memory_bytes` (the most seen), `disk_full`, and `left_over` (whether processes would not end). It has only `error` if
the child did not start.

Everything here uses the standard library alone and starts fast: a sandbox is started for each test of each completion.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from octetrl.process import usage
from octetrl.process.kernel import adopt_orphans, die_with_parent
from octetrl.process.plain_data import read_frame, write_frame

_MIB = 1 << 20
_READ_BYTES = 1 << 16
_PIECE = 4096  # bytes that a pipe accepts without blocking if it polls as writable
_MOST_ORPHANS = 64  # reaped between two looks, so that a fork bomb cannot block the supervisor
_END_SECONDS = 10.0
_NESTED_SECONDS = 3.0  # for supervisors below a worker: sandboxes remove their folders
_NESTED = b"from octetrl.process."  # in the command line of every supervisor
_PROGRAM_LOOKS = (0.02, 0.02)  # seconds between two looks at what the processes use, the shortest and the longest
_WORKER_LOOKS = (0.01, 0.25)
_FASTEST_FILL = 8 << 30  # largest expected growth of memory, in bytes per second
_DISK_SHARE = 0.2  # largest share of the time that is spent counting files


class Supervisor:
    """One child from its start to its end, and what it used.

    lifeline: descriptor of the socket to the run. limits: `wall_seconds`, `cpu_seconds`, `memory_bytes`,
    `output_bytes`, and with `folder` also `disk_bytes`, `files` and `open_files`; a missing one is no limit. folder:
    where files are counted. counts_deleted: also deleted files that are still open. is_worker: the child runs the
    user's own code. Its output is then printed as it comes, up to `output_bytes`, SIGTERM ends it, and supervisors that
    it has started get time to end by themselves."""

    def __init__(
        self,
        lifeline: int,
        limits: dict,
        *,
        folder: str = "",
        counts_deleted: bool = False,
        is_worker: bool = False,
    ) -> None:
        self._lifeline, self._limits, self._is_worker = lifeline, limits, is_worker
        self._folder, self._counts_deleted = folder, counts_deleted
        self._looks = _WORKER_LOOKS if is_worker else _PROGRAM_LOOKS
        self._oom_files: list[int] = []  # opened while /proc shows this process its own files; none: it is read-only
        with contextlib.suppress(OSError):
            self._oom_files = [os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)]
        self._outputs: dict[int, bytearray] = {}
        self._num_printed = 0
        self._stopped: str | None = None
        self._cpu, self._memory = 0.0, 0
        self._measure_due = self._disk_due = 0.0
        self._wakes, wakes = os.pipe()
        self._own = [lifeline, self._wakes, wakes, *self._oom_files]
        os.set_inheritable(lifeline, False)
        for descriptor in (self._wakes, wakes):
            os.set_blocking(descriptor, False)
        for number in (signal.SIGCHLD, signal.SIGTERM) if is_worker else (signal.SIGCHLD,):
            signal.signal(number, _do_nothing)  # the wake-up descriptor receives its number
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        if sys.platform == "linux":
            adopt_orphans()

    def start(
        self, enter: Callable[[], None], *, stdin: str = "", owner: int | None = None, link: int | None = None
    ) -> bool:
        """Fork the child, whose streams are pipes of this process. Returns True in the child when `enter` has returned,
        and False in this process. An OSError of `enter` ends the child and is the report's `error`.

        owner: the user who may open the streams by their names; link: becomes the child's descriptor 3."""
        self._began = time.monotonic()
        self._pending = memoryview(stdin.encode("utf-8", "surrogatepass"))
        stdin_read, self._stdin = os.pipe()
        outputs = [os.pipe() for _ in range(1 if self._is_worker else 2)]
        self._failure, failure_write = os.pipe()
        self._outputs = {read: bytearray() for read, _ in outputs}
        self._own += [self._stdin, self._failure, *self._outputs]
        streams = [stdin_read, outputs[0][1], outputs[-1][1]]
        if owner is not None:
            for descriptor in streams:
                os.fchown(descriptor, owner, owner)
        streams += [] if link is None else [link]
        supervisor = os.getpid()
        own_scores = [os.pread(file, 16, 0) for file in self._oom_files]
        for file in self._oom_files:  # the kernel kills the highest score first when memory is out: the child, and not
            os.pwrite(file, b"1000", 0)  # the process that watches it, whose end would cost the report
        self._pid = os.fork()
        if self._pid == 0:
            self._become_child(enter, streams, failure_write, supervisor)
            return True
        for file, score in zip(self._oom_files, own_scores, strict=True):
            os.pwrite(file, score, 0)
        for descriptor in {*streams, failure_write}:
            os.close(descriptor)
        for descriptor in (self._stdin, *self._outputs):
            os.set_blocking(descriptor, False)
        return False

    def watch(self) -> dict:
        """Watch until the child ends, exceeds a limit or the run ends it; then end all processes. Returns the
        report."""
        try:
            failure = self._follow(self._began + self._limits.get("wall_seconds", math.inf))
            seconds = time.monotonic() - self._began
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        finally:
            left_over = not self._end_all()
        if failure:
            return {"error": failure}
        for descriptor in self._outputs:
            while (self._is_worker or self._stopped is None) and self._take(descriptor):
                pass
        used, texts = os.times(), [text.decode("utf-8", "replace") for text in self._outputs.values()]
        code = None
        if ended is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return {
            "exit": code,
            "stopped": self._stopped,
            "stdout": texts[0],
            "stderr": texts[-1],
            "cpu_seconds": max(self._cpu, used.children_user + used.children_system),
            "wall_seconds": seconds,
            "memory_bytes": self._memory,
            "disk_full": bool(self._folder) and self._disk_is_full(),
            "left_over": left_over,
        }

    # ------------------------------------------------------------ the child

    def _become_child(self, enter: Callable[[], None], streams: Sequence[int], failure: int, supervisor: int) -> None:
        """Create a session, whose group can be killed; end together with the supervisor; take the streams; enter."""
        has_entered = False
        signal.set_wakeup_fd(-1)
        self._own.append(failure)
        failure = fcntl.fcntl(failure, fcntl.F_DUPFD_CLOEXEC, 64)  # out of the way of 0 to 3
        try:
            for changed in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(changed, signal.SIG_DFL)
            os.setsid()
            for descriptor in self._own:
                os.close(descriptor)
            aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in streams]
            for number, descriptor in enumerate(aside):
                os.dup2(descriptor, number)
            for descriptor in {*aside, *streams} - {*range(len(streams))}:
                os.close(descriptor)
            if sys.platform == "linux":
                die_with_parent(signal.SIGKILL)
            if os.getppid() == supervisor:
                enter()
                has_entered = True
        except (OSError, ValueError) as error:
            os.write(failure, str(error).encode()[:1000])
        finally:
            if not has_entered:
                os._exit(127)
        os.close(failure)

    # ------------------------------------------------------------ watching it

    def _follow(self, deadline: float) -> str:
        """Watch until the child has ended or `_stopped` says why it must. If it did not start, returns the reason."""
        poll = select.poll()
        for descriptor in (*self._outputs, self._lifeline, self._wakes, self._failure):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._stdin, select.POLLOUT)
        has_started = False
        while self._stopped is None:
            wait = min(deadline, self._measure_due if has_started else math.inf) - time.monotonic()
            ready = {at for at, _ in poll.poll(None if wait == math.inf else max(1.0, wait * 1000))}
            if self._failure in ready and not has_started:
                if failure := os.read(self._failure, 1000):
                    return failure.decode()
                has_started = True
                poll.unregister(self._failure)
                send(self._lifeline, {"started": self._pid})
            if self._stdin in ready and self._has_fed():
                poll.unregister(self._stdin)
                os.close(self._stdin)
            for descriptor in self._outputs:
                if descriptor in ready and not self._take(descriptor):
                    poll.unregister(descriptor)
            if self._lifeline in ready or (self._wakes in ready and signal.SIGTERM in os.read(self._wakes, 4096)):
                self._stopped = "abandoned"
            elif time.monotonic() >= deadline:
                self._stopped = "wall_timeout"
            elif self._has_ended():
                break
            elif has_started and time.monotonic() >= self._measure_due:  # before, a program can't be looked into
                self._measure()
        return ""

    def _has_ended(self) -> bool:
        """Reap orphans that have ended. Returns whether the child has. It stays a zombie, so that its process id keeps
        identifying its group."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for _ in range(_MOST_ORPHANS):
            ended = os.waitid(os.P_ALL, 0, flags)
            if ended is None or ended.si_pid == self._pid:
                break
            os.waitpid(ended.si_pid, 0)
        return os.waitid(os.P_PID, self._pid, flags) is not None

    def _has_fed(self) -> bool:
        """Write to the child's stdin. Returns whether that is done."""
        try:
            self._pending = self._pending[os.write(self._stdin, self._pending) :] if self._pending else self._pending
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it reads no more
            return True
        return not self._pending

    def _take(self, descriptor: int) -> bool:
        """Read once. Returns whether there was something to read."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if self._is_worker:
            self._print(data)
            return bool(data)
        room = self._limits["output_bytes"] - sum(map(len, self._outputs.values()))
        self._outputs[descriptor] += data[:room]
        if len(data) > room:
            self._stopped = self._stopped or "output_limit"
        return bool(data)

    def _print(self, data: bytes) -> None:
        """Print the first `output_bytes` of a worker."""
        most = self._limits["output_bytes"]
        room = most - self._num_printed
        self._num_printed += len(data)
        if room > 0:
            print_error(data[:room])
            if self._num_printed >= most:
                what = f"process {self._pid} printed {most // _MIB} MiB; what more it prints is left out"
                print_error(f"\noctetrl: {what}\n".encode())

    # ------------------------------------------------------------ what it uses

    def _measure(self) -> None:
        limits, pids = self._limits, usage.processes()
        most_memory, most_cpu = limits.get("memory_bytes", math.inf), limits.get("cpu_seconds", math.inf)
        if most_memory == most_cpu == math.inf:
            self._measure_due = math.inf
            return
        if most_cpu < math.inf:
            self._cpu = max(self._cpu, usage.cpu_seconds(pids))
        buffers = usage.buffer_bytes(pids, limits["open_files"]) if self._folder else 0
        memory = buffers + usage.memory_bytes(pids, most_memory - buffers)
        self._memory = max(self._memory, memory)
        if memory > most_memory:
            self._stopped = "memory_limit"
        elif self._cpu > most_cpu:
            self._stopped = "cpu_limit"
        elif self._folder and time.monotonic() >= self._disk_due and self._exceeds_disk(pids):
            self._stopped = "disk_limit"
        shortest, longest = self._looks
        self._measure_due = time.monotonic() + min(longest, max(shortest, (most_memory - memory) / _FASTEST_FILL))

    def _exceeds_disk(self, pids: list[int]) -> bool:
        began, most = time.monotonic(), self._limits["files"]
        size, files = usage.folder_use(self._folder, most)
        if self._counts_deleted:
            more, num_deleted = usage.deleted_use(pids, self._folder, most)
            size, files = size + more, files + num_deleted
        self._disk_due = time.monotonic() + (time.monotonic() - began) / _DISK_SHARE
        return size > self._limits["disk_bytes"] or files > most

    def _disk_is_full(self) -> bool:
        size, files = usage.folder_use(self._folder, self._limits["files"])
        return size >= self._limits["disk_bytes"] or files > self._limits["files"]

    # ------------------------------------------------------------ its end

    def _end_all(self) -> bool:
        """Kill every process below this one and wait for each. Returns whether none is left.

        One signal goes to all at once, which a fork bomb can't outrun: to the child's group, or to the whole namespace
        if this process is its first. Processes that left the group are killed one by one."""
        group = [-1] if os.getpid() == 1 else [-self._pid]
        began = time.monotonic()
        while (waited := time.monotonic() - began) < _END_SECONDS:
            spares = self._is_worker and waited < _NESTED_SECONDS
            for pid in (*group, *usage.processes()):
                if pid < 0 or not spares or not _is_supervisor(pid):
                    with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                        os.kill(pid, signal.SIGKILL)
            try:
                while ended := os.waitpid(-1, os.WNOHANG)[0]:
                    group = [] if ended == self._pid else group  # the kernel may give its number to another process
            except ChildProcessError:
                return True
            time.sleep(0.001)
        return False


def receive_order(lifeline: int) -> dict | None:
    """The run's order; None if the run is gone."""
    message = read_frame(lifeline, bytearray())
    return None if message is None else json.loads(message)


def send(lifeline: int, message: dict) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody is left to read it
        write_frame(lifeline, json.dumps(message).encode())


def print_error(data: bytes) -> None:
    """Write to stderr without ever blocking: a blocked supervisor would not watch its child."""
    writable = select.poll()
    writable.register(2, select.POLLOUT)
    for start in range(0, len(data), _PIECE):
        if not writable.poll(20):
            return
        try:
            os.write(2, data[start : start + _PIECE])
        except OSError:  # stderr has no reader any more
            return


def _is_supervisor(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as words:
            return _NESTED in words.read()
    except OSError:  # it has ended
        return False


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass
