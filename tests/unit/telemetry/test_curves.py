"""Experiment trackers, with a double of their clients. test_real_trackers.py has the real ones."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.config.schema import LoggingConfig
from octetrl.system.errors import UserError
from octetrl.telemetry import curves
from octetrl.telemetry.sinks import open_sinks

NAMES = ("wandb", "mlflow", "trackio", "swanlab")
Begun, Logged = list[dict[str, Any]], list[tuple[int, dict[str, float]]]


class Double:
    """The functions of all four clients that we call, which keep what they are given."""

    def __init__(self) -> None:
        self.begun: Begun = []
        self.logged: Logged = []
        self.finished: list[Any] = []
        self.params: list[dict[str, Any]] = []
        self.logs: Callable[[int], None] = lambda step: None

    def init(self, **given: Any) -> Any:
        self.begun.append(given)
        return SimpleNamespace(log=self._log, finish=lambda **how: self.finished.append(how))

    def _log(self, numbers: dict[str, float], step: int) -> None:
        self.logs(step)
        self.logged.append((step, numbers))

    # mlflow's
    def set_experiment(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=f"id of {name}")

    def search_runs(self, experiments: list[str], filter_string: str, **_: Any) -> list[Any]:
        wanted = filter_string.split("'")[1]
        known = [at for at, run in enumerate(self.begun) if wanted in run.get("tags", {}).values()]
        return [SimpleNamespace(info=SimpleNamespace(run_id=f"run {at}")) for at in known]

    def start_run(self, **given: Any) -> Any:
        self.begun.append(given)
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run {len(self.begun) - 1}"))

    def log_params(self, params: dict[str, Any], run_id: str) -> None:
        self.params.append(params)

    def log_metrics(self, numbers: dict[str, float], step: int, run_id: str) -> None:
        self._log(numbers, step)

    def end_run(self, status: str) -> None:
        self.finished.append(status)


@pytest.fixture
def double(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Double:
    double = Double()
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, double)
    return double


def config(name: str, **fields: Any) -> LoggingConfig:
    return LoggingConfig(report_to=(name,), tensorboard=False, **fields)  # type: ignore[arg-type]


def run(folder: Path, logging: LoggingConfig, steps: range, fails: bool = False) -> list[str]:
    """Write these steps. Returns the warnings."""
    said: list[str] = []
    recipe = {"seed": 3, "trainer": {"optimizer": {"lr": 0.5}, "bias": None}}
    try:
        with open_sinks(folder, logging, recipe, steps.start - 1, said.append, "0123456789ab") as sinks:
            for step in steps:
                sinks.write(step, {"loss": step / 4, "eval/pass@4": 0.5})
            if fails:
                raise RuntimeError("out of memory")
    except RuntimeError:
        pass
    return said


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_continues_in_the_same_run(name: str, double: Double, tmp_path: Path) -> None:
    logging = config(name, project="fp8", run_name="first", group="sweep", tags=("a", "b"))
    assert run(tmp_path, logging, range(1, 3), fails=True) == []
    assert run(tmp_path, logging, range(3, 4)) == []
    assert [(step, numbers["loss"]) for step, numbers in double.logged] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    first, second = double.begun
    if name == "mlflow":
        assert first["run_name"] == "first" and second == {"run_id": "run 0"}
        assert first["tags"] == {curves.RUN_TAG: "0123456789ab", "group": "sweep", "a": "true", "b": "true"}
        assert double.params == [{"seed": 3, "trainer.optimizer.lr": 0.5}]
        assert double.finished == ["FAILED", "FINISHED"] and "eval/pass_4" in double.logged[0][1]
        return
    assert first == second and (first["project"], first["name"], first["group"]) == ("fp8", "first", "sweep")
    assert first["resume"] == "allow" and first["config"]["seed"] == 3
    assert (first["config"]["tags"] if name == "trackio" else first["tags"]) == ["a", "b"]
    assert name == "trackio" or first["id"] == "0123456789ab"
    ends = {"wandb": [1, 0], "swanlab": ["crashed", "success"], "trackio": [None, None]}[name]
    assert [how.get("exit_code", how.get("state")) for how in double.finished] == ends


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_fails_is_counted_and_said_once(
    name: str, kind: type[BaseException], double: Double, tmp_path: Path
) -> None:
    def fails(step: int) -> None:
        if step != 2:
            raise kind("no route")

    double.logs = fails
    first, last = run(tmp_path, config(name), range(1, 5))
    assert f"{kind.__name__}: no route" in first and f"{name}: 3 writes failed" in last
    assert [step for step, _ in double.logged] == [2] and len(double.finished) == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("kind", [ConnectionError, SystemExit])
@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_cannot_start_is_left_out(
    name: str, kind: type[BaseException], double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(**_: Any) -> Any:
        raise kind("no key")

    monkeypatch.setattr(double, "init", refuses)
    monkeypatch.setattr(double, "start_run", refuses)
    (said,) = run(tmp_path, config(name), range(1, 5))
    assert name in said and "no key" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_client_that_starts_late_gets_all_steps(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "STARTING", 0.01)
    written, start = threading.Event(), double.init

    def late(**given: Any) -> Any:
        assert written.wait(60)
        return start(**given)

    monkeypatch.setattr(double, "init", late)
    said: list[str] = []
    with open_sinks(tmp_path, config("trackio"), {}, 0, said.append) as sinks:
        sinks.write(1, {"loss": 0.5})
        sinks.write(2, {"loss": 0.25})
        written.set()
    assert [step for step, _ in double.logged] == [1, 2] and len(said) == 1


def test_a_client_that_hangs_holds_up_no_step(double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "CLOSING", 0.05)
    double.logs = lambda step: time.sleep(60)
    first, _ = run(tmp_path, config("mlflow"), range(1, 5))
    assert "3 steps not sent" in first


@pytest.mark.parametrize(
    "logging", [{"report_to": ("wandb", "mlflow")}, {"wandb_project": "p"}, {"report_to": ("swanlab",)}]
)
def test_a_missing_client_names_its_extra_and_writes_nothing(
    logging: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    asked = logging.get("report_to", ("wandb",))
    problems = list(curves.missing_clients(LoggingConfig(**logging)))
    assert [f"octetrl[{name}]" in problem for name, problem in zip(asked, problems, strict=True)] == [True] * len(asked)
    with pytest.raises(UserError):
        open_sinks(tmp_path, LoggingConfig(**logging), {})
    assert list(tmp_path.iterdir()) == []
