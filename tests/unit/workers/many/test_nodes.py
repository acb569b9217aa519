"""Machines that can't run a recipe's workers are named in one line, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.errors import UserError
from octetrl.config.schema import ModelConfig, Recipe
from octetrl.workers.many.nodes import Sight, check_nodes, look


class Machines:
    """A team of two; what the second one has is said by the test."""

    size = 2

    def __init__(self, versions: str | None = None, unseen: str = "") -> None:
        self.versions, self.unseen = versions, unseen
        self.asked: list[str] = []

    def ask(self, phase: str, verb: str, paths: Sequence[str]) -> list[Sight]:
        assert (phase, verb) == ("start", "look")
        self.asked = list(paths)
        first = look(paths)
        missing = tuple(path for path in paths if self.unseen and self.unseen in path)
        return [first, Sight(self.versions or first.versions, missing)]

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
