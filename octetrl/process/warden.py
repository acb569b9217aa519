"""The process between a run and untrusted code: starts the restricted program, watches it and ends all its processes.

Started as `python -I -S -B -c ...` with one socket, over which it gets a request and answers with a report, both JSON
behind eight bytes of length. The socket is also a lifeline: when it closes, the run is gone, and so is the sandbox.

    warden (adopts orphans; in bubblewrap it is the init of the namespace) -> program

A report says how it ended: `exit` (exit code, or minus the signal), `stopped` (the limit that ended it, or null),
`stdout`, `stderr`, `cpu_seconds`, `wall_seconds`, `memory_bytes` (the most seen), `disk_full`, `left_over` (processes
that would not end). Or it says `error`: the sandbox could not be made, or broke. Before the report comes `started`,
once the program runs. From then on a failure of this process, by an error or by a signal, is the program's doing.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time

from octetrl.process import disk, watch
from octetrl.process.linux import adopt_orphans, hide_from_other_processes
from octetrl.process.restraints import OutOfMemoryOrder, private_user, process_limit, restrain

_TICK_SECONDS = 0.02
_DISK_SHARE = 0.2  # largest share of the time that is spent counting files
_READ_BYTES = 1 << 16


def main(channel: int) -> None:
    """Serve one request and exit."""
    os.umask(0o022)
    os.set_inheritable(channel, False)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
        signal.signal(number, signal.SIG_IGN)  # the lifeline ends this process, and nothing else does
    request = _receive(channel)
    if request is None:
        return
    try:
        report = _serve(channel, request)
    except OSError as error:
        report = {"error": str(error)}
    _send(channel, report)


def _serve(channel: int, request: dict) -> dict:
    """One sandbox, from an empty folder to a report."""
    user = private_user(request["number"])
    order = OutOfMemoryOrder()  # as long as /proc shows this process its own files
    adopt_orphans()
    hide_from_other_processes()
    limits = request["limits"]
    limits["user_processes"] = process_limit(limits["processes"], alone=request["level"] == "bubblewrap")
    os.mkdir(request["folder"], 0o711)
    try:
        work, program = os.path.join(request["folder"], "work"), os.path.join(request["folder"], "program")
        os.mkdir(program, 0o755)
        with open(os.path.join(program, "main.py"), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(request["source"])
        os.mkdir(work, 0o700)
        os.chown(work, user, user if os.geteuid() == 0 else -1)
        return Watch(channel, request, user, work, program, order).run()
    finally:
        # in bubblewrap the folder is in memory that ends with this process; what still lives could lead us astray
        if request["level"] != "bubblewrap" and not watch.processes():
            disk.empty_and_remove(request["folder"])


class Watch:
    """One program from its start to its end, and what it used."""

    def __init__(
        self, channel: int, request: dict, user: int, work: str, program: str, order: OutOfMemoryOrder
    ) -> None:
        self._channel, self._request, self._user, self._order = channel, request, user, order
        self._work, self._program = work, program
        self._limits = request["limits"]
        self._taken: dict[int, bytearray] = {}
        self._stopped: str | None = None
        self._cpu = 0.0
        self._memory = 0
        self._measure_due = self._disk_due = 0.0

    def run(self) -> dict:
        started = time.monotonic()
        pid, stdin, outputs = self._start()
        try:
            failure = self._follow(pid, stdin, outputs, started + self._limits["wall_seconds"])
            seconds = time.monotonic() - started
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        finally:
            left_over = not watch.end_all(pid)
        if failure:
            return {"error": failure}
        for descriptor in outputs:
            while self._stopped is None and self._take(descriptor):
                pass
        texts = [self._taken[descriptor].decode("utf-8", "replace") for descriptor in outputs]
        used = os.times()
        code = None
        if ended is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return {
            "exit": code,
            "stopped": self._stopped,
            "stdout": texts[0],
            "stderr": texts[1],
            "cpu_seconds": max(self._cpu, used.children_user + used.children_system),
            "wall_seconds": seconds,
            "memory_bytes": self._memory,
            "disk_full": self._disk_is_full(),
            "left_over": left_over,
        }

    def _start(self) -> tuple[int, int, list[int]]:
        """The program's process, where to write its input, and where it writes: stdout and stderr."""
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        stderr_read, stderr_write = os.pipe()
        self._failure, failure_write = os.pipe()
        theirs = [stdin_read, stdout_write, stderr_write]
        if os.geteuid() == 0:
            for descriptor in theirs:
                os.fchown(descriptor, self._user, self._user)  # it may open /dev/stdin, which is this pipe
        if self._request["link"] is not None:
            theirs.append(self._request["link"])
        self._order.first_to_go()
        pid = os.fork()
        if pid == 0:
            failure_write = fcntl.fcntl(failure_write, fcntl.F_DUPFD_CLOEXEC, 64)  # out of the way of 0 to 3
            try:
                theirs = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 64) for descriptor in theirs]
                readable = [*self._request["folders"], self._program]
                restrain(
                    theirs, self._request, self._user, self._work, (readable, [self._work, *self._request["devices"]])
                )
                command = [word.replace("{program}", self._program) for word in self._request["command"]]
                environment = {
                    name: text.replace("{work}", self._work) for name, text in self._request["environment"].items()
                }
                os.execve(command[0], command, environment)
            except (OSError, ValueError) as error:
                os.write(failure_write, str(error).encode()[:1000])
            finally:
                os._exit(127)
        self._order.as_before()
        for descriptor in (*theirs, failure_write):
            os.close(descriptor)
        for descriptor in (stdin_write, stdout_read, stderr_read):
            os.set_blocking(descriptor, False)
        self._taken = {stdout_read: bytearray(), stderr_read: bytearray()}
        return pid, stdin_write, [stdout_read, stderr_read]

    def _follow(self, pid: int, stdin: int, outputs: list[int], deadline: float) -> str:
        """Watch until the program ends or exceeds a limit. If it did not start, returns the reason."""
        pending = memoryview(self._request["stdin"].encode("utf-8", "surrogatepass"))
        poll = select.poll()
        for descriptor in (*outputs, self._channel, self._failure):
            poll.register(descriptor, select.POLLIN)
        has_ended = os.pidfd_open(pid)
        poll.register(has_ended, select.POLLIN)
        poll.register(stdin, select.POLLOUT)
        started, failure = False, b""
        while self._stopped is None:
            ready = [descriptor for descriptor, _ in poll.poll(_TICK_SECONDS * 1000)]
            if self._failure in ready and not started:
                failure = os.read(self._failure, 1000)
                if failure:
                    return failure.decode()
                started = True
                poll.unregister(self._failure)
                _send(self._channel, {"started": True})
            if stdin in ready:
                pending = _feed(stdin, pending)
                if not pending:
                    poll.unregister(stdin)
                    os.close(stdin)
            for descriptor in outputs:
                if descriptor in ready and not self._take(descriptor):
                    poll.unregister(descriptor)
            if self._channel in ready:
                self._stopped = "abandoned"
            elif time.monotonic() >= deadline:
                self._stopped = "wall_timeout"
            elif has_ended in ready:
                break
            elif started:
                self._measure()
        return ""

    def _take(self, descriptor: int) -> bool:
        """Read once. Returns whether there was something to read."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        room_left = self._limits["output_bytes"] - sum(map(len, self._taken.values()))
        self._taken[descriptor] += data[:room_left]
        if len(data) > room_left:
            self._stopped = self._stopped or "output_limit"
        return bool(data)

    def _measure(self) -> None:
        if time.monotonic() < self._measure_due:
            return
        self._measure_due = time.monotonic() + _TICK_SECONDS
        pids = watch.processes()
        self._cpu = max(self._cpu, watch.cpu_seconds(pids))
        buffers = watch.buffer_bytes(pids, self._limits["open_files"])
        memory = buffers + watch.memory_bytes(pids, self._limits["memory_bytes"] - buffers)
        self._memory = max(self._memory, memory)
        if self._stopped is not None:
            return
        if memory > self._limits["memory_bytes"]:
            self._stopped = "memory_limit"
        elif self._cpu > self._limits["cpu_seconds"]:
            self._stopped = "cpu_limit"
        elif time.monotonic() >= self._disk_due:
            began = time.monotonic()
            size, files = disk.folder_use(self._work, self._limits["files"])
            if self._request["level"] != "bubblewrap":  # there the deleted have no more room than the others
                more, of_deleted = disk.deleted_use(pids, self._work, self._limits["files"])
                size, files = size + more, files + of_deleted
            self._disk_due = time.monotonic() + (time.monotonic() - began) / _DISK_SHARE
            if size > self._limits["disk_bytes"] or files > self._limits["files"]:
                self._stopped = "disk_limit"

    def _disk_is_full(self) -> bool:
        size, files = disk.folder_use(self._work, self._limits["files"])
        return size >= self._limits["disk_bytes"] or files > self._limits["files"]


def _feed(descriptor: int, pending: memoryview) -> memoryview:
    try:
        return pending[os.write(descriptor, pending) :] if pending else pending
    except BlockingIOError:
        return pending
    except BrokenPipeError:  # it reads no more
        return memoryview(b"")


def _receive(channel: int) -> dict | None:
    data = bytearray()
    while len(data) < 8 or len(data) < 8 + int.from_bytes(data[:8], "big"):
        part = os.read(channel, _READ_BYTES)
        if not part:
            return None
        data += part
    request: dict = json.loads(data[8:])
    return request


def _send(channel: int, report: dict) -> None:
    data = json.dumps(report).encode()
    data = len(data).to_bytes(8, "big") + data
    while data:
        try:
            data = data[os.write(channel, data) :]
        except (BrokenPipeError, ConnectionResetError):  # nobody is left to read it
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
