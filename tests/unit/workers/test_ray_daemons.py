"""Ray's daemons as children of this process: while one is stopped no call begins, and it goes on or is killed.

While Ray starts, one that stops or dies ends the start.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octetrl.workers import ray_daemons
from octetrl.workers.ray_daemons import Daemons, RayLost, StartGuard


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
        waited.join(120)
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
    assert raylet.wait(120) == -signal.SIGKILL


def test_a_daemon_that_ends_as_it_is_killed_does_not_end_the_watch(
    raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_daemons, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(ray_daemons, "state_of", lambda pid: "T")  # when it was looked at
    daemons = Daemons(silent_seconds=0.0)
    try:
        raylet.kill()
        raylet.wait()
        while not daemons._killed:
            time.sleep(0.01)
        daemons._thread.join(0.1)
        assert daemons._thread.is_alive()
    finally:
        daemons.close()


# --- while Ray starts ----------------------------------------------------------------------------------------


def why_it_ended(strike: Callable[[], None], silent_seconds: float = 600.0) -> tuple[str | None, list[int]]:
    """Why a start is given up after `strike`, and the processes that are then killed. `ray.init` is the inner block,
    which raises."""
    other = subprocess.Popen([shutil.which("sleep") or "/bin/sleep", "600"])
    guard = StartGuard(silent_seconds, lambda: [other.pid], lambda: None)
    with guard:
        time.sleep(2 * ray_daemons.LOOK_SECONDS)  # it has seen the daemon
        strike()
        code = other.wait(120)
    return guard.why, [code]


def test_a_daemon_that_dies_or_stays_stopped_ends_the_start(raylet: subprocess.Popen[bytes]) -> None:
    why, codes = why_it_ended(lambda: stop(raylet), silent_seconds=0.2)
    assert re.fullmatch(r"its process raylet was stopped for \d+ s; start the run again", str(why))
    assert codes == [-signal.SIGKILL]
    raylet.send_signal(signal.SIGCONT)
    assert why_it_ended(raylet.kill) == ("its process raylet died; start the run again", [-signal.SIGKILL])


def test_a_start_that_takes_too_long_names_what_is_missing(
    raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_daemons, "START_SECONDS", 1.0)
    why, _ = why_it_ended(lambda: None)
    assert re.fullmatch(r"its process gcs_server was awaited for \d+ s; start the run again", str(why))


def test_a_start_that_ends_well_leaves_everything_alone(raylet: subprocess.Popen[bytes]) -> None:
    with StartGuard(0.1, lambda: [raylet.pid], lambda: None) as guard:
        time.sleep(2 * ray_daemons.LOOK_SECONDS)
    assert guard.why is None and raylet.poll() is None


HANGS = """
import os, sys, time
from octetrl.workers import ray_daemons
ray_daemons.RAISE_SECONDS, ray_daemons.START_SECONDS = 0.1, 0.1
with ray_daemons.StartGuard(600, lambda: [], lambda: os.write(1, b"dismissed")):
    time.sleep(600)
"""


def test_a_start_that_does_not_raise_ends_the_process_with_one_line() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout) == (1, "dismissed")
    said = r"octetrl: Ray did not start: its process gcs_server was awaited for \d+ s; start the run again\n"
    assert re.fullmatch(said, ended.stderr)
