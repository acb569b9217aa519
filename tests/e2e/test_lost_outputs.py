"""A run that loses the file of its metrics, its curves, its lock or its terminal loses no finished step."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.cli.main import run_command
from octetrl.telemetry.curves import TensorBoard
from octetrl.telemetry.sinks import MetricsFile
from octetrl.trainer import checkpoint
from tests.e2e.tiny_run import read_lines, recipe_tree

pytestmark = pytest.mark.usefixtures("rewards_here")


def recipe_file(model: Path, folder: Path, changes: dict[str, Any]) -> str:
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe_tree(model, folder / "run", changes)))
    return str(folder / "r.yaml")


@pytest.mark.parametrize("every", [0, 1])
def test_a_step_whose_metrics_cannot_be_written_is_saved_and_resumed(
    every: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, write = recipe_file(model, tmp_path, {"checkpoint.every": every}), MetricsFile.write
    run = tmp_path / "run"

    def fails_at_2(self: MetricsFile, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            self.path = Path("/dev/full")
        write(self, step, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(MetricsFile, "write", fails_at_2)
        assert run_command(["train", recipe]) == 2
    assert "no space left to write" in capsys.readouterr().err.splitlines()[-1]
    last = checkpoint.latest(run / "checkpoints")
    assert last is not None and checkpoint.step_of(last) == 2 and len(read_lines(run / "metrics.jsonl")) == 1
    assert run_command(["train", recipe, "--resume"]) == 0
    assert [row["step"] for row in read_lines(run / "metrics.jsonl")] == [1, 2, 3]


def test_curves_that_cannot_be_drawn_are_a_warning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: TensorBoard, step: int, metrics: dict[str, float]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "write", fails)
    assert run_command(["train", recipe_file(model, tmp_path, {"logging.tensorboard": True})]) == 0
    first, last = capsys.readouterr().err.splitlines()
    assert "TensorBoard" in first and "3 writes failed" in last
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3
    assert [row["step"] for row in read_lines(tmp_path / "run" / "warnings.jsonl")] == [1]


WITHOUT_ASSERTS = """
import runpy
from importlib.machinery import SourceFileLoader
def get_code(loader, name, load=SourceFileLoader.get_code):
    if not name.startswith("octetrl"): return load(loader, name)
    path = loader.get_filename(name)
    return compile(loader.get_data(path), path, "exec", dont_inherit=True, optimize=1)
SourceFileLoader.get_code = get_code
runpy.run_module("octetrl", run_name="__main__")
"""


def test_a_lost_terminal_is_no_reason_to_stop(model: Path, finished: Callable[[str], Path], tmp_path: Path) -> None:
    """Nobody reads the output after the run's first line, and SIGHUP says that the terminal is gone. The project's
    asserts are left out, as with `python -O`: the run is the same."""
    recipe = recipe_file(model, tmp_path, {"logging.console": "plain", "steps": 9, "precision": "fp8_full"})
    command = [sys.executable, "-c", WITHOUT_ASSERTS, "train", recipe]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None and any(line.startswith(b"grpo: ") for line in process.stdout)
    process.send_signal(signal.SIGHUP)
    process.stdout.close()
    assert process.wait(120) == 0
    said = (tmp_path / "run" / "console.log").read_text()
    assert "step 9/9" in said and "Traceback" not in said
    rows, others = (read_lines(folder / "metrics.jsonl") for folder in (tmp_path / "run", finished("fp8_full")))
    assert len(rows) == 9
    for name in ("loss", "reward/mean", "grad_norm"):
        assert [row[name] for row in rows[:3]] == [row[name] for row in others]
