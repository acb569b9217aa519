"""Three moments of faults.py: Ray's daemons and the driver are killed; the run is that of threads nobody kills."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.installed_ray import ray  # noqa: F401  # isort: skip: the imports of octetrl.workers.ray_* need it

from octetrl.run.loop import train
from tests.e2e.faults import CHANGES, Moment, assert_same_run, moments, struck_run
from tests.e2e.tiny_run import tiny_recipe
from tests.unit.workers.many.thread_team import RunTeam


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_is_the_run_that_nobody_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tmp_path / "whole"
    with monkeypatch.context() as patch:
        patch.setattr("octetrl.workers.ray.RayTeam", RunTeam)
        train(tiny_recipe(model, whole, CHANGES | {"cluster.cpus": 2}))
    strikes = [
        Moment("gcs_server", signal.SIGKILL, 1, 0.1),
        Moment("driver", signal.SIGKILL, 0, 0.1),
        Moment("raylet", signal.SIGKILL, 0, 0.2, restarts=1),
    ]
    struck_run(model, tmp_path / "struck", 2, strikes, seed=5)
    aside = {"cursor.json"}  # has the random generators of this process
    assert_same_run(tmp_path / "struck" / "run", whole, aside)


def test_a_seed_names_its_moments_and_strikes_everything() -> None:
    assert moments(7, 20) == moments(7, 20) != moments(8, 20)
    assert len({(moment.victim, moment.signal) for moment in moments(7, 10)}) == 10
