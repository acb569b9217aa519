"""A moment of faults.py, and signals while Ray starts: nothing is left behind.

`make test-faults` also resumes such runs, and compares them with those that nobody killed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.installed_ray import ray  # noqa: F401  # isort: skip: the imports of octetrl.workers.ray_* need it

from octetrl.config.load import dump_recipe
from octetrl.system.errors import TERMINATED
from octetrl.workers.ray_watcher import processes_of
from tests.e2e.faults import (
    AHEAD,
    CHANGES,
    Attempt,
    Moment,
    command_lines,
    moments,
    parent_of,
    ray_folder_of,
    wait_for,
)
from tests.e2e.tiny_run import tiny_recipe
from tests.house.tree import REPO


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_driver_that_is_killed_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    """Beside a worker that is stopped, so that it could not end by itself."""
    moment = Moment("driver", signal.SIGKILL, 0, 0.1)
    attempt = Attempt(model, tmp_path, AHEAD, moment.restarts)
    try:
        assert attempt.strike(moment, random.Random(5))
        assert attempt.wait() == -signal.SIGKILL
        attempt.check_end(moment)
    finally:
        attempt.driver.kill()


def test_a_seed_names_its_moments_and_strikes_everything() -> None:
    assert moments(7, 20) == moments(7, 20) != moments(8, 20)
    assert len({(moment.victim, moment.signal) for moment in moments(7, 10)}) == 10


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("how", "code", "line"),
    [
        (signal.SIGTERM, TERMINATED, "octetrl: stopped by SIGTERM\n"),
        (signal.SIGINT, 130, "octetrl: stopped before the run began; nothing was written\n"),
    ],
)
def test_a_signal_while_ray_starts_ends_the_run_with_one_line_and_leaves_nothing(
    how: signal.Signals, code: int, line: str, model: Path, tmp_path: Path
) -> None:
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(dump_recipe(tiny_recipe(model, run, CHANGES | {"cluster.cpus": 2})))
    driver = subprocess.Popen(
        [sys.executable, "-m", "octetrl", "train", str(recipe)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    try:
        wait_for(lambda: driver.poll() is not None or child_of(driver.pid, "gcs_server") is not None, "gcs_server")
        folder = ray_folder_of(driver.pid)
        driver.send_signal(how)
        _, said = driver.communicate(timeout=600)
    finally:
        driver.kill()
    assert (driver.returncode, said) == (code, line)
    assert folder is not None and not run.exists()
    wait_for(lambda: not folder.exists() and not processes_of(folder, exempt=set()), "Ray to be gone", 300.0)


def child_of(driver: int, name: str) -> int | None:
    found = (pid for pid, parts in command_lines() if parent_of(pid) == driver and Path(parts[0]).name == name)
    return next(found, None)


STARTS = """
import os, signal
from ray._private import services
from octetrl.config.cluster import ClusterConfig, DeadlineConfig
from octetrl.workers import ray_daemons
from octetrl.workers.ray_cluster import connect
from octetrl.workers.ray_daemons import children
ray_daemons.RAISE_SECONDS, start = 1.0, services.start_raylet
def start_and_stop_the_other(*arguments, **options):
    started = start(*arguments, **options)
    (gcs_server,) = (pid for pid, name in children() if name == "gcs_server")
    os.kill(gcs_server, signal.SIGSTOP)
    return started
services.start_raylet = start_and_stop_the_other
connect(ClusterConfig(cpus=2, deadlines=DeadlineConfig(silent_seconds=2.0)), None)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_start_whose_gcs_server_stops_ends_with_one_line_and_leaves_nothing() -> None:
    """As soon as raylet is there. `ray.init` alone would never return."""
    driver = subprocess.Popen([sys.executable, "-c", STARTS], stderr=subprocess.PIPE, text=True, cwd=REPO)
    try:
        wait_for(lambda: driver.poll() is not None or ray_folder_of(driver.pid) is not None, "Ray's folder")
        folder = ray_folder_of(driver.pid)
        _, said = driver.communicate(timeout=600)
    finally:
        driver.kill()
    assert (driver.returncode, len(said.splitlines())) == (1, 1), said
    assert said.startswith("octetrl: Ray did not start: its process gcs_server was stopped for ")
    assert folder is not None
    wait_for(lambda: not folder.exists() and not processes_of(folder, exempt=set()), "Ray to be gone", 300.0)
