"""`octetrl train RECIPE --from RUN[@STEP]`: a run begins with another run's weights, alone or with its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from octetrl.cli.main import run_command
from tests.e2e.tiny_run import read_lines, recipe_tree

Finished = Callable[[str], Path]


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> str:
    """Of one step with a learning rate that warms up, so that the start of the schedule is seen."""
    changes = {"precision": "fp8_full", "steps": 1, "seed": 9, "trainer.optimizer.warmup_steps": 4}
    path = tmp_path / "r.yaml"
    tree = recipe_tree(model, tmp_path / "run", changes)
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_a_branch_with_optimizer_and_one_without(recipe: str, finished: Finished, tmp_path: Path) -> None:
    source = finished("fp8_full")
    states, lines = {}, {}
    for name, options in {"alone": [], "both": ["--with-optimizer"]}.items():
        words = ["train", recipe, f"output_dir={tmp_path / name}", "--from", f"{source}@2", *options]
        assert run_command(words) == 0
        states[name] = load_file(tmp_path / name / "checkpoints" / "step_000001" / "optimizer.safetensors")
        (lines[name],) = read_lines(tmp_path / name / "metrics.jsonl")
    assert int(states["alone"]["step_count"]) == 1 and int(states["both"]["step_count"]) == 3
    assert lines["alone"]["reward/mean"] == lines["both"]["reward/mean"]  # the same weights drew the same answers
    assert lines["alone"]["lr"] == lines["both"]["lr"] == pytest.approx(1e-3 / 4)
    assert all(line["mismatch/unequal_tokens"] == 0 for line in lines.values())
    saved = yaml.safe_load((tmp_path / "both" / "config.yaml").read_text())
    assert saved["model"]["path"].endswith("checkpoints/step_000002")


def test_what_is_no_run_is_refused(
    recipe: str, finished: Finished, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(finished("fp8_full"))
    for options, says in [
        (["--from", str(model)], "is no run, RUN@STEP or checkpoint; for another model set model.path"),
        (["--from", f"{source}@7"], "the run has no checkpoint of step 7; it has 2, 3"),
        (["--from", source, "model.path=x"], "--from: 'model.path=x' names other weights"),
        (["--with-optimizer"], "--with-optimizer: it belongs to --from RUN"),
    ]:
        assert run_command(["train", recipe, *options]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error
    assert not (tmp_path / "run").exists()
