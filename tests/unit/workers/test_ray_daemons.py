"""Ray's daemons as children of this process: while one is stopped no call begins, and it goes on or is killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from octetrl.workers.ray_daemons import Daemons, RayLost


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child process of that name that does nothing."""
    program = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    child = subprocess.Popen([program, "600"])
    comm = Path("/proc", str(child.pid), "comm")
    while comm.read_text().strip() != "raylet":
        time.sleep(0.01)
    yield child
    child.kill()
    child.wait()


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    while Path("/proc", str(child.pid), "stat").read_text().split()[2] != "T":
        time.sleep(0.01)


def test_calls_wait_for_a_stopped_daemon_that_goes_on(raylet: subprocess.Popen[bytes]) -> None:
    daemons = Daemons(silent_seconds=600)
    try:
        daemons.await_answer()
        stop(raylet)
        assert not daemons.answer
        waited = threading.Thread(target=daemons.await_answer)
        waited.start()
        waited.join(0.2)
        assert waited.is_alive()
        raylet.send_signal(signal.SIGCONT)
        waited.join(30)
        assert not waited.is_alive() and daemons.answer
    finally:
        daemons.close()


def test_a_daemon_that_stays_stopped_is_killed_and_named(raylet: subprocess.Popen[bytes]) -> None:
    daemons = Daemons(silent_seconds=0.5)
    try:
        stop(raylet)
        with pytest.raises(RayLost, match=r"raylet was stopped for \d+ s and then ended"):
            daemons.await_answer()
    finally:
        daemons.close()
    assert raylet.wait(30) == -signal.SIGKILL
