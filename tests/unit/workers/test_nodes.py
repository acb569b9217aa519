"""Machines that can't run a recipe's workers are named in one line, before a model is loaded."""

from __future__ import annotations

import importlib
import sys
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


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """It names a folder of this machine, a name of a hub, and a module that the run has imported."""
    for name in ("model", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "my_losses.py").write_text("def bandit(fields):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    importlib.import_module("my_losses")
    model = ModelConfig(path=str(tmp_path / "model"), tokenizer="a name of a hub")
    return Recipe(model=model, algorithm=OwnObjectiveConfig(name="my_losses:bandit"))


@pytest.mark.parametrize(
    ("versions", "unseen", "field", "named"),
    [
        ("torch 2.0 and OctetRL 0.1.0", "", "cluster.address", "torch 2.0 and OctetRL 0.1.0"),
        (None, "model", "model.path", "/model'"),
        (None, ".seen", "output_dir", "/run'"),
        (None, "my_losses", "algorithm.name", "/my_losses.py'"),
    ],
)
def test_a_machine_that_differs(
    versions: str | None, unseen: str, field: str, named: str, recipe: Recipe, tmp_path: Path
) -> None:
    team: Any = Machines(versions, unseen)
    with pytest.raises(UserError) as refused:
        check_nodes(team, recipe, tmp_path / "run")
    line = str(refused.value)
    assert line.startswith(f"{field}: worker 1 (host b, GPU 0) ") and named in line and "\n" not in line
    assert not list((tmp_path / "run").iterdir())


def test_equal_machines(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines: Any = Machines()
    check_nodes(machines, recipe, None)
    assert machines.asked == [str(tmp_path / name) for name in ("model", "my_losses.py")]  # what is here
    assert look(("/", str(tmp_path / "gone"))).missing == (str(tmp_path / "gone"),)
    assert look(()).versions.endswith(f"(source {source_digest(ending='.py')[:8]})"), "another checkout differs"
    monkeypatch.setattr("sys.prefix", str(tmp_path))  # the module is installed
    check_nodes(machines, recipe, None)
    assert machines.asked == [str(tmp_path / "model")]
