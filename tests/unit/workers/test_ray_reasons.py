"""What a lost worker's line says of Ray's own reason."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.installed_ray import ray  # isort: skip: the imports of octetrl.workers.ray need it

from ray.exceptions import RayActorError

from octetrl.config.cluster import ClusterConfig
from octetrl.system.errors import RunFailed
from octetrl.workers.ray import RayTeam, _why, lacking_module
from octetrl.workers.ray_cluster import _kept_stderr, connect, other_versions, variables_of_ray
from octetrl.workers.status import WorkerStatus

EXIT = "Worker exit type: {} Worker exit detail: {}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("The actor died because of an error.", "its process died"),
        (
            EXIT.format("SYSTEM_ERROR", "Worker exits with a connection error code 2. (1) OOM killer."),
            "its process died",
        ),
        (EXIT.format("NODE_OUT_OF_MEMORY", "Killed: the node runs low on memory."), "its process died (out of memory)"),
        (EXIT.format("INTENDED_EXIT", "It was idle. More."), "its process died (Ray: INTENDED_EXIT, It was idle)"),
    ],
)
def test_only_what_ray_itself_did_is_repeated(text: str, why: str) -> None:
    assert _why(RayActorError(error_msg=f"The actor died unexpectedly.\n\tclass_name: _RayWorker\n{text}")) == why


def test_a_machine_without_this_package_is_told_from_a_worker_that_died() -> None:
    text = """The actor died because of an error raised in its creation task
RuntimeError: The actor with name _RayWorker failed to import on the worker. This may be because needed library:

Traceback (most recent call last):
  File "function_manager.py", line 1, in _load_actor_class_from_gcs
ModuleNotFoundError: No module named 'octetrl'"""
    assert lacking_module(RayActorError(error_msg=text)) == "No module named 'octetrl'"
    assert lacking_module(RayActorError(error_msg="The actor died.\nModuleNotFoundError: in its own work")) is None


def test_another_ray_is_refused_in_one_line() -> None:
    """As Ray 2.60 says it of a cluster of Ray 2.49."""
    text = """Version mismatch: The cluster was started with:
    Ray: 2.49.2
    Python: 3.12.1
This process on node 192.0.2.2 was started with:
    Ray: 2.60.0
    Python: 3.11.7
"""
    said = other_versions("head:6379", RuntimeError(text))
    assert "has Ray 2.49.2 and Python 3.12.1, this machine has Ray" in said and ray.__version__ in said
    assert not any("\n" in one for one in (said, other_versions("head:6379", RuntimeError("Version mismatch:\nmore"))))


def test_what_a_library_prints_while_it_connects_is_shown_unless_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    with _kept_stderr() as printed:
        os.write(2, b"a warning\n")
        assert printed() == "a warning\n"
        os.write(2, b"another\n")
    assert capfd.readouterr().err == "a warning\nanother\n"
    with pytest.raises(ConnectionError), _kept_stderr():
        os.write(2, b"InvalidAuthToken\n")
        raise ConnectionError
    assert capfd.readouterr().err == ""


def test_ray_starts_no_more_idle_processes_than_there_are_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts one for each CPU that `ray.init` names."""
    given: dict[str, object] = {}

    def init(**arguments: object) -> None:
        given.update(arguments)
        raise ConnectionError("not in this test")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(RunFailed, match="not in this test"):
        connect(ClusterConfig(cpus=3), None)
    assert given["num_cpus"] == 3


def test_threads_of_workers_wait_for_a_short_time_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    usual = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    assert variables_of_ray() == usual | {"GOMP_SPINCOUNT": "10000"}
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "7")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert variables_of_ray() == usual


@pytest.mark.parametrize(("lines", "end"), [((), "it died"), (("last",), "it died; it printed:\n    last")])
def test_a_lost_worker_that_printed_nothing_says_nothing_of_it(lines: tuple[str, ...], end: str) -> None:
    status = WorkerStatus(0, "here", "", 7, "train", 1.0, True, 0.5, last_lines=lines)
    team: Any = SimpleNamespace(_check_ray=lambda: None, _heard=[status], _logs=None, place=lambda worker: "worker 0")
    assert str(RayTeam.lose(team, 0, "train", 2.0, "it died")) == f"worker 0 was lost in phase train after 2.0 s: {end}"
