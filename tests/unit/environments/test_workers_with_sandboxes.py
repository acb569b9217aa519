"""A worker that ends while it runs a sandbox: the sandbox has time to remove its folder, on a busy machine too."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octetrl.environments.reward_workers import RewardWorkers
from octetrl.process.levels import Level
from octetrl.process.sandbox import find_sandbox
from octetrl.records import Task
from octetrl.system.errors import UserError
from tests.required import missing
from tests.unit.environments import misbehaving_rewards


@pytest.fixture(autouse=True)
def sandbox() -> None:
    try:
        find_sandbox(Level.LANDLOCK)
    except UserError as error:
        missing(Level.LANDLOCK, str(error))


def wait_for(found: Callable[[], object]) -> None:
    until = time.monotonic() + 60.0
    while not found():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


def folders_of(worker: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"octetrl-sandbox-{worker}-*"))


def warden_of(worker: int) -> int:
    lists = (path.read_text() for path in Path(f"/proc/{worker}/task").glob("*/children"))
    pids = [int(word) for text in lists for word in text.split()]
    (warden,) = (pid for pid in pids if b"process.warden" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return warden


def test_a_sandbox_that_gets_no_core_still_removes_its_folder(tmp_path: Path) -> None:
    """Its warden is stopped while the worker that runs it is killed, and goes on a second later."""
    note = tmp_path / "worker"

    def strike() -> int:
        wait_for(lambda: note.exists() and note.read_text())
        worker = int(note.read_text())
        wait_for(lambda: any((folder / "work").exists() for folder in folders_of(worker)))
        warden = warden_of(worker)
        os.kill(warden, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        time.sleep(1.0)
        with contextlib.suppress(ProcessLookupError):  # it was killed, and its folder stays
            os.kill(warden, signal.SIGCONT)
        return worker

    with RewardWorkers(misbehaving_rewards.in_a_sandbox_once, timeout_seconds=60.0) as workers:
        with ThreadPoolExecutor(1) as threads:
            striker = threads.submit(strike)
            (score,) = workers.score([(Task(id=str(note), prompt="?"), "")])
        assert (score.reward, workers.restarts) == (1.0, 1)
    assert not folders_of(striker.result())
