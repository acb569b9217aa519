"""On 80 columns no name is cut, and texts continue below themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.telemetry.report_data import read_run
from octetrl.telemetry.report_page import report_page
from tests.unit.telemetry.test_report import make_run

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["bench", "step", "--help"], "--workload "),
        (["bench", "train", "--help"], "--lengths "),
        (["bench", "rollout", "--help"], "--rounds "),
        (["generate", "--help"], "--api-key-variable "),
        (["metrics", "token_mult"], "mismatch/decile_{n}/token_mult_prob_error "),
    ],
)
def test_no_name_is_cut(words: list[str], name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run_command(words) == 0
    out = capsys.readouterr().out
    assert name in out and "…" not in out and max(map(len, out.splitlines())) <= 80
    assert "<str>" not in out and "int range" not in out


def test_the_recipes_continue_below_themselves(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("octetrl.cli.recipes.terminal_columns", lambda: 80)
    assert run_command(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    indent = re.match(r"\S+ +", lines[0])
    assert indent is not None and max(map(len, lines)) <= 80
    assert any(line.startswith(" " * indent.end()) and line[indent.end()] != " " for line in lines)


def test_the_lines_of_status_and_report_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    values = {"mismatch/token_mult_prob_error": 1.3, "rollout/on_policy_share": 0.0, "rollout/truncated_share": 0.99}
    values |= {"entropy": 5.5, "grad_norm": 1.5, "rollout/mean_length": 900.0, "rollout/tokens_per_second": 1e5}
    folder = make_run(tmp_path / "run", **values)
    (folder / "run.json").write_text(json.dumps({"run": "a", "ended": {"how": "failed", "why": "no " * 90}}))
    for place in ("report", "status"):
        monkeypatch.setattr(f"octetrl.cli.{place}.terminal_columns", lambda: 80)
    for words in (["status", str(folder)], ["report", str(folder), "--terminal"]):
        assert run_command(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(len(line) for line in lines if str(folder) not in line) <= 80, words


@pytest.mark.parametrize(("seconds", "unit"), [(0.5, "second"), (100.0, "minute"), (9000.0, "hour")])
def test_the_time_axis_counts_in_a_unit_of_its_length(seconds: float, unit: str, tmp_path: Path) -> None:
    page = report_page([read_run(make_run(tmp_path / "run", **{"time/step": seconds}))])
    chart = page.split("<h3>reward</h3>")[1].split('<div class="by-hours">')[1].split("</svg>")[0]
    names = re.findall(r'text-anchor="end">([a-z]+) ([\d,.]+)</text>', chart)
    assert names == [(unit, names[0][1])]
    last = float(names[0][1].replace(",", ""))
    assert 12 * seconds / {"second": 1, "minute": 60, "hour": 3600}[unit] <= last < 180
