"""Machines that can't run a recipe's workers are named in one line, before a model is loaded."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.algorithm import OwnObjectiveConfig
from octetrl.config.schema import ModelConfig, Recipe
from octetrl.system.errors import UserError
from octetrl.telemetry.provenance import source_digest
from octetrl.workers.nodes import NodeInfo, check_nodes, look


class Machines:
    """A team of two; what the second one has is said by the test."""

    size = 2

    def __init__(self, versions: str | None = None, unseen: str = "") -> None:
        self.versions, self.unseen = versions, unseen
        self.asked: list[str] = []

    def ask(self, phase: str, verb: str, paths: Sequence[str]) -> list[NodeInfo]:
        assert (phase, verb) == ("start", "look")
        self.asked = list(paths)
        first = look(paths)
        missing = tuple(path for path in paths if self.unseen and self.unseen in path)
        return [first, NodeInfo(self.versions or first.versions, missing)]

    def place(self, worker: int) -> str:
        return f"worker {worker} (host b, GPU 0)"


def checked(machines: Machines, recipe: Recipe, folder: Path | None) -> None:
    team: Any = machines
    check_nodes(team, recipe, folder)


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        (
            Machines("torch 2.0 and OctetRL 0.1.0"),
            r"worker 1 \(host b, GPU 0\) has torch 2\.0 and .*, this machine has",
        ),
        (Machines(unseen="model"), r"model\.path: worker 1 \(.*\) does not see '.*/model'; put it on a file system"),
        (Machines(unseen=".seen"), r"output_dir: worker 1 \(.*\) does not see '.*/run'; put it on a file system"),
    ],
)
def test_a_machine_that_differs(machines: Machines, message: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "run").mkdir()
    recipe = Recipe(model=ModelConfig(path=str(tmp_path / "model")))
    with pytest.raises(UserError, match=message) as refused:
        checked(machines, recipe, tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not list((tmp_path / "run").iterdir())


def test_equal_machines(tmp_path: Path) -> None:
    machines = Machines()
    (tmp_path / "model").mkdir()
    recipe = Recipe(model=ModelConfig(path=str(tmp_path / "model"), tokenizer="a name of a hub"))
    checked(machines, recipe, None)
    assert machines.asked == [str(tmp_path / "model")]  # what this machine lacks is refused elsewhere
    assert look(("/", str(tmp_path / "gone"))).missing == (str(tmp_path / "gone"),)


def test_another_checkout_of_the_same_version_differs() -> None:
    assert look(()).versions.endswith(f"(source {source_digest(ending='.py')[:8]})")


def test_the_file_of_an_own_objective_must_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text("def bandit(fields):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("my_losses")
    recipe = Recipe(
        model=ModelConfig(preset="tiny", init="random"), algorithm=OwnObjectiveConfig(name="my_losses:bandit")
    )
    message = r"algorithm\.name: worker 1 \(.*\) does not see '.*/my_losses\.py'; put it on a file system"
    with pytest.raises(UserError, match=message):
        checked(Machines(unseen="my_losses"), recipe, None)
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    checked(Machines(unseen="my_losses"), recipe, None)  # installed
