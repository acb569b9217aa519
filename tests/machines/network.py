"""Machines within this machine: network namespaces with a bridge between them, for runs over a network. Needs root.

    machine 1  eth0 --- port 1 |
    machine 2  eth0 --- port 2 | bridge, in a namespace of its own
    machine 3  eth0 --- port 3 --- slow wire (slow_wire.py) --- end 3 |

Each has its address, its host name and its processes; files, memory and processors are those of this machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.house.tree import REPO

PREFIX = "10.232.0"
RAY_PORT = 6379
TOOLS = ("ip", "tc", "unshare", "hostname", "mount")
STORE_BYTES = 100_000_000


def problem() -> str | None:
    """Why this machine can't have such machines; None: it can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"there is no {', '.join(lacking)} (packages iproute2, util-linux, hostname)"
    name = f"oct{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return tried.stderr.strip() or None


class Machines:
    """`count` machines. `slow`: delay in milliseconds and share of lost frames of the last one's wire. `mbit`: the rate
    at which each sends. `folder`: for Ray's files; its path is short, because sockets lie there."""

    def __init__(self, count: int, folder: Path, *, slow: tuple[float, float] | None = None, mbit: int = 1000) -> None:
        self.folder, self._count = folder, count
        self._base = f"oct{os.getpid()}"
        self._wire: subprocess.Popen[bytes] | None = None
        self._token = f"{os.getpid()}{time.time_ns()}".ljust(32, "0")
        try:
            self._build(slow, mbit)
        except BaseException:
            self.close()
            raise

    def _build(self, slow: tuple[float, float] | None, mbit: int) -> None:
        switch = f"{self._base}sw"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number in range(1, self._count + 1):
            machine, port = self.name(number), f"port{number}"
            _ip("netns", "add", machine)
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", machine)
            _ip("-n", machine, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", machine, "link", "set", device, "up")
            _ip("-n", machine, "route", "add", "default", "via", f"{PREFIX}.254")
            rate = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _said(["ip", "netns", "exec", machine, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *rate])
            into_bridge = port
            if slow is not None and number == self._count:
                into_bridge = f"end{number}"
                _ip("-n", switch, "link", "add", into_bridge, "type", "veth", "peer", "name", "wire")
                _ip("-n", switch, "link", "set", "wire", "up")
            for device in {port, into_bridge}:
                _ip("-n", switch, "link", "set", device, "up")
            _ip("-n", switch, "link", "set", into_bridge, "master", "bridge")
            program = [sys.executable, str(Path(__file__).with_name("slow_wire.py"))]
            _said(["ip", "netns", "exec", machine, *program, "whole", "eth0"])
            if slow is not None and number == self._count:
                command = ["ip", "netns", "exec", switch, *program, port, "wire", str(slow[0]), str(slow[1])]
                self._wire = subprocess.Popen(command)

    def name(self, number: int) -> str:
        return f"{self._base}m{number}"

    def address(self, number: int) -> str:
        return f"{PREFIX}.{number}"

    @property
    def ray_address(self) -> str:
        return f"{self.address(1)}:{RAY_PORT}"

    def popen(self, number: int, command: Sequence[str], said: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine; what it prints goes into the file `said`."""
        own = "" if number == 1 else f"mount -t tmpfs none {self.folder}; "  # two Rays would choose equal names there
        shell = f'{own}hostname "$0"; exec "$@"'
        inside = ["ip", "netns", "exec", self.name(number), "unshare", "--uts", "--mount", "sh", "-c", shell]
        inside += [f"m{number}"]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            **{"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token, "RAY_USAGE_STATS_ENABLED": "0"},
            **{"RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "120"},  # also on a busy machine
            **variables,
        }
        with said.open("ab") as file:
            return subprocess.Popen([*inside, *command], stdout=file, stderr=file, env=environment, cwd=REPO)

    def start_ray(self, number: int) -> None:
        """Begin a cluster on machine 1, or join it."""
        address = self.address(number)
        where = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if number == 1 else []
        where = where or [f"--address={self.ray_address}"]
        files = [f"--temp-dir={self.folder / str(number)}"] if number == 1 else []
        limits = ["--num-cpus=1", f"--object-store-memory={STORE_BYTES}"]
        said = self.folder / f"ray_{number}.txt"
        command = ["-m", "ray.scripts.scripts", "start", *where, *files, f"--node-ip-address={address}", *limits]
        started = self.popen(number, [sys.executable, *command, "--disable-usage-stats"], said)
        assert started.wait(120.0) == 0, said.read_text()

    def cut(self, number: int) -> None:
        """Pull its cable."""
        _ip("-n", f"{self._base}sw", "link", "set", f"port{number}", "down")

    def join(self, number: int) -> None:
        """Put its cable back."""
        _ip("-n", f"{self._base}sw", "link", "set", f"port{number}", "up")

    def pids(self, number: int) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name(number)], capture_output=True, text=True, check=False)
        return [int(line) for line in found.stdout.split()]

    def switch_off(self, number: int) -> None:
        """End every process of a machine, at once."""
        until = time.monotonic() + 20.0
        while pids := self.pids(number):
            assert time.monotonic() < until, f"processes {pids} of machine {number} do not end"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def close(self) -> None:
        for number in range(1, self._count + 1):
            self.switch_off(number)
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait()
        for name in (*map(self.name, range(1, self._count + 1)), f"{self._base}sw"):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _ip(*words: str) -> None:
    _said(["ip", *words])


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
