"""Runs with an objective of the user's own: the bits of the shipped one, also resumed and on two workers; `check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.run.loop import train
from tests.e2e.tiny_run import read_lines, recipe_tree, run, timeless, tiny_recipe
from tests.house.tree import REPO
from tests.unit.algorithms import own_losses
from tests.unit.workers.thread_team import run_on, steps_of

pytestmark = pytest.mark.usefixtures("rewards_here")

MANY_UPDATES = {"trainer.minibatches": 2, "trainer.epochs": 2, "trainer.optimizer.lr": 0.01, "precision": "bf16"}
SHIPPED = {**MANY_UPDATES, "algorithm": {"name": "dual_clip", "dual_clip": 1.1, "clip_high": 0.3}}
MINE = {
    **MANY_UPDATES,
    "algorithm": {"name": "tests.unit.algorithms.own_losses:dual_clip", "floor": 1.1, "clip_high": 0.3},
}


@pytest.fixture(scope="module")
def mine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return timeless(run(model, tmp_path_factory.mktemp("mine") / "run", MINE))


def test_a_run_with_a_shipped_objective_written_again_has_its_bits(
    model: Path, tmp_path: Path, mine: list[dict[str, Any]]
) -> None:
    assert timeless(run(model, tmp_path / "shipped", SHIPPED)) == mine
    assert len(mine) == 3 and mine[0]["grad_norm"] > 0


def test_a_step_asks_for_the_advantages_of_each_group_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[str]()
    for name, writes in {"written": True, "not": False}.items():

        def advantages(self: object, rewards: Sequence[float], name: str = name) -> list[float]:
            calls[name] += 1
            return [float(place % 2) for place in range(len(rewards))]

        monkeypatch.setattr(own_losses.LeaveOneOut, "advantages", advantages)
        algorithm = {"name": "tests.unit.algorithms.own_losses:rloo"}
        run(model, tmp_path / name, {"algorithm": algorithm, "steps": 1, "logging.rollouts": writes})
    assert calls["written"] == calls["not"] > 0


def test_a_resumed_run_repeats_them(model: Path, tmp_path: Path, mine: list[dict[str, Any]]) -> None:
    lines = timeless(run(model, tmp_path / "run", {**MINE, "steps": 2}))
    train(tiny_recipe(model, tmp_path / "run", MINE), resume=True)
    assert lines == mine[:2] and timeless(read_lines(tmp_path / "run" / "metrics.jsonl")) == mine


def test_two_workers_draw_and_measure_what_one_does_with_the_shipped(model: Path, tmp_path: Path) -> None:
    with run_on(2, model, tmp_path / "mine", **MINE) as two:
        _, mine = steps_of(two, 2)
    with run_on(2, model, tmp_path / "shipped", **SHIPPED) as two:
        _, shipped = steps_of(two, 2)
    assert mine == shipped


def test_check_finds_the_module_beside_the_recipe_and_says_what_is_wrong(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = recipe_tree(model, tmp_path / "run", {"algorithm": {"name": "beside_it:loss", "leak": 0.25}})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(tree))
    source = (REPO / "examples" / "leaky_objective.py").read_text().replace("def leaky(", "def loss(")
    signature = "(inputs: LossInputs, fields: Leaky, shared: OwnObjectiveConfig) -> TokenLoss"
    fails = f"\n\ndef fails{signature}:\n    raise RuntimeError('no loss')\n"
    (tmp_path / "beside_it.py").write_text(source + fails)
    assert run_command(["check", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "loss, beside_it.py:" in said and "Leaky(leak=0.25); advantages group-relative" in said
    for change, line in (
        ("algorithm.leak=2", "leak must be from 0 to 1"),
        ("algorithm.laek=0.2", "algorithm.laek: unknown key; did you mean 'leak'?"),
        ("algorithm.name=beside_it:fails", "'beside_it:fails' fails on five tokens (RuntimeError: no loss)"),
        ("algorithm.name=beside_it:lost", "module 'beside_it' has no 'lost'; did you mean 'loss'?"),
        ("algorithm.name=beside_us:loss", "module 'beside_us' does not import, there is no such module"),
    ):
        monkeypatch.setattr(
            "octetrl.cli.check._rehearsal_problems", lambda *_: ([], None)
        )  # the first check was rehearsed
        assert run_command(["check", str(recipe), change]) == 2
        assert line in capsys.readouterr().err
