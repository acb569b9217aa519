"""A run whose mismatch is above its limit in every step warns once, and its last screen counts the steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from octetrl.telemetry.metrics import MISMATCH
from octetrl.telemetry.report import report_page
from octetrl.telemetry.report_data import read_run
from tests.e2e.tiny_run import read_lines, run


def test_a_mismatch_in_every_step_is_told_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"precision": "fp8_rollout", "mismatch.warn_above": 1.0001, "steps": 6, "logging.console": "plain"}
    run(model, tmp_path / "run", changes)
    errors = [line[MISMATCH] - 1 for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert min(errors) > 0.0001, "every step is above the limit"
    said = capsys.readouterr()
    assert said.err.count("above mismatch.warn_above=1.0001.") == 1 and "Raise mismatch.warn_above if" in said.err
    worst, times = errors[0], 0
    for error in errors[1:]:
        if error > 1.1 * worst:
            worst, times = error, times + 1
    assert said.err.count("has risen to") == times < 5
    assert f"{MISMATCH} above mismatch.warn_above=1.0001 in 6 of 6 steps, at most" in said.out
    page = report_page([read_run(tmp_path / "run")])
    assert "engine and trainer disagree by more than 0.01%" in page and "<td>workers</td>" in page
