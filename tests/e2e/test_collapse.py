"""A run that ruins its policy: what it says, how it ends, and which checkpoint is left of the time before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.run import loop
from octetrl.run.folder.journal import Journal
from octetrl.run.state import Run, StepResult
from tests.e2e.tiny_run import recipe_tree, tiny_recipe

pytestmark = pytest.mark.usefixtures("rewards_here")

RUINED_FROM = 4
CHANGES: dict[str, Any] = {"steps": 10, "checkpoint.every": 1, "checkpoint.keep_last": 1}


@pytest.fixture
def ruined(monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 4 on all rewards are 0."""
    whole_step = loop.one_step

    def one_step(run: Run, step: int, journal: Journal) -> StepResult:
        dead = {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_fraction": 1.0}
        result = whole_step(run, step, journal)
        return replace(result, metrics={**result.metrics, **(dead if step >= RUINED_FROM else {})})

    monkeypatch.setattr(loop, "one_step", one_step)


def checkpoints(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def test_the_last_checkpoint_from_before_is_kept_and_named(
    ruined: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by a run that was cut off and resumed while its rewards were already dead."""
    loop.train(tiny_recipe(model, tmp_path / "run", CHANGES | {"steps": 6}))
    assert checkpoints(tmp_path / "run") == [2, 6]
    loop.train(tiny_recipe(model, tmp_path / "run", CHANGES), resume=True)
    assert checkpoints(tmp_path / "run") == [2, 10]
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "collapsed" in line]
    assert "since 4; the last checkpoint from before is" in said and "step_000002: start a new run from it" in said
    loop.train(tiny_recipe(model, tmp_path / "off", CHANGES | {"collapse": "off", "steps": 8}))
    assert checkpoints(tmp_path / "off") == [8]
    assert "collapsed" not in capsys.readouterr().err


def test_fail_ends_the_run_with_exit_code_1(
    ruined: None, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", CHANGES)))
    assert run_command(["train", str(recipe), "collapse=fail"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("octetrl: the run failed: step ") and last.endswith("because of collapse: fail")
    assert 2 in checkpoints(tmp_path / "run")


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_weights_that_explode_fail_the_run_in_one_line(
    precision: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weight decay multiplies the weights by -1e15 a step: finite, until engine or quantiser overflow."""
    recipe = tmp_path / "r.yaml"
    changes = CHANGES | {"precision": precision, "trainer.optimizer.weight_decay": 1e18}
    recipe.write_text(yaml.safe_dump(recipe_tree(model, tmp_path / "run", changes)))
    assert run_command(["train", str(recipe)]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("octetrl: the run failed: step ") and ("not finite" in last or "non-finite" in last)
    assert "checkpoint" in last and "trainer.optimizer.lr" in last
