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
from contextlib import contextmanager
from pathlib import Path

import pytest

from octetrl.workers import ray_daemons
from octetrl.workers.ray_daemons import Daemons, RayLost

SLEEP = shutil.which("sleep") or "/bin/sleep"


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child process of that name that does nothing."""
    program = tmp_path / "raylet"
    shutil.copy(SLEEP, program)
    child = subprocess.Popen([program, "600"])
    comm = Path("/proc", str(child.pid), "comm")
    while comm.read_text().strip() != "raylet":
        time.sleep(0.01)
    yield child
    child.kill()
    child.wait()


@contextmanager
def watched(silent_seconds: float) -> Iterator[Daemons]:
    """The daemons of a Ray that has started."""
    daemons = Daemons(silent_seconds)
    try:
        with daemons.starting(list, lambda: None):
            pass
        yield daemons
    finally:
        daemons.close()


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGSTOP)
    while Path("/proc", str(child.pid), "stat").read_text().split()[2] != "T":
        time.sleep(0.01)


def test_calls_wait_for_a_stopped_daemon_that_goes_on(raylet: subprocess.Popen[bytes]) -> None:
    with watched(600) as daemons:
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


def test_a_daemon_that_stays_stopped_is_killed_and_named(raylet: subprocess.Popen[bytes]) -> None:
    with watched(0.5) as daemons:
        stop(raylet)
        with pytest.raises(RayLost, match=r"raylet was stopped for \d+ s"):
            daemons.await_answer()
    assert raylet.wait(120) == -signal.SIGKILL


def test_a_daemon_that_ends_as_it_is_killed_does_not_end_the_watch(
    raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_daemons, "LOOK_SECONDS", 0.01)
    with watched(0.0) as daemons:
        monkeypatch.setattr(ray_daemons, "state_of", lambda pid: "T")  # when it was looked at
        raylet.kill()
        raylet.wait()
        while not daemons._killed:
            time.sleep(0.01)
        daemons._threads[-1].join(0.1)
        assert daemons._threads[-1].is_alive()


# --- while Ray starts ----------------------------------------------------------------------------------------


def why_it_ended(strike: Callable[[], None], silent_seconds: float = 600.0) -> str | None:
    """Why a start is given up after `strike`: then the other processes are killed. `ray.init` is the inner block, which
    raises."""
    other, daemons = subprocess.Popen([SLEEP, "600"]), Daemons(silent_seconds)
    with daemons.starting(lambda: [other.pid], lambda: None):
        time.sleep(2 * ray_daemons.LOOK_SECONDS)  # it has seen the daemon
        strike()
        assert other.wait(120) == -signal.SIGKILL
    daemons.close()
    return daemons.why_not_started


@pytest.mark.parametrize(
    ("strike", "silent_seconds", "why"),
    [
        (stop, 0.2, r"its process raylet was stopped for \d+ s"),
        (subprocess.Popen.kill, 600.0, "its process raylet died"),
    ],
)
def test_a_daemon_that_dies_or_stays_stopped_ends_the_start(
    strike: Callable[[subprocess.Popen[bytes]], None], silent_seconds: float, why: str, raylet: subprocess.Popen[bytes]
) -> None:
    assert re.match(why, str(why_it_ended(lambda: strike(raylet), silent_seconds)))


def test_a_start_that_takes_too_long_names_what_is_missing(
    raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_daemons, "START_SECONDS", 1.0)
    assert re.match(r"its process gcs_server was awaited for \d+ s", str(why_it_ended(lambda: None)))


def test_a_start_that_ends_well_leaves_everything_alone(raylet: subprocess.Popen[bytes]) -> None:
    daemons = Daemons(600.0)
    with daemons.starting(lambda: [raylet.pid], lambda: None):
        time.sleep(2 * ray_daemons.LOOK_SECONDS)
    daemons.close()
    assert daemons.why_not_started is None and raylet.poll() is None


HANGS = """
import os, sys, time
from octetrl.workers import ray_daemons
ray_daemons.RAISE_SECONDS, ray_daemons.START_SECONDS = 0.1, 0.1
with ray_daemons.Daemons(600).starting(list, lambda: os.write(1, b"dismissed")):
    time.sleep(600)
"""


def test_a_start_that_does_not_raise_ends_the_process_with_one_line() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "dismissed", 1)
    assert ended.stderr.startswith("octetrl: Ray did not start: its process gcs_server was awaited for ")
