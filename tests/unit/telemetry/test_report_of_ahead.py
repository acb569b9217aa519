"""The report of a run that generates ahead, of one that failed, and of folders that are damaged."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octetrl.system.errors import RunFailed, Terminated, UserError
from octetrl.telemetry.ending import Ending, ending_of, read_ending, reopen, write_ending
from octetrl.telemetry.metrics import MISMATCH
from octetrl.telemetry.report_data import findings, read_run, results
from octetrl.telemetry.report_page import mismatch_by_age, report_page
from octetrl.telemetry.run_times import longest_first, overlap
from octetrl.telemetry.terminal_report import terminal_report
from tests.unit.telemetry.test_report import make_run

AHEAD = {"time/step": 10.0, "time/train": 8.0, "time/wait_for_batch": 1.0, "time/send_weights": 0.5}
BESIDE = {"time/rollout": 9.0, "time/reward": 0.25, "time/wait_for_weights": 0.5}
STALE = {"rollout/staleness": 1.0, "rollout/on_policy_share": 0.0, "mismatch/equal_fraction": 0.0, MISMATCH: 1.2}
STALE |= {"mismatch/gen_kl": 0.25, "mismatch/max_abs_diff": 0.5}


def test_the_parts_of_a_step_add_up_although_generating_overlaps_with_training(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=4, **AHEAD, **BESIDE))
    parts = longest_first(run.rows)
    assert parts == {"train": 32.0, "waiting for the batch": 4.0, "sending weights": 2.0, "other": 2.0}
    assert sum(parts.values()) == sum(run.values("time/step")), "seconds of generating are not seconds of the steps"
    says = (
        "generating and training overlap; beside these steps: generating 36 s, rewards 1.0 s, waiting for new weights"
    )
    assert overlap(run.rows).startswith(says)
    page = report_page([run])
    shares = dict(re.findall(r"</i>([\w ]+) (\d+%)</span>", page))
    assert shares == {"train": "80%", "waiting for the batch": "10%", "sending weights": "5%", "other": "5%"}
    assert "Generating and training overlap; beside" in page
    lines = "\n".join(terminal_report([run]))
    assert "time                 train 80%, waiting for the batch 10%" in lines and "overlap" in lines
    in_turn = read_run(make_run(tmp_path / "turns", steps=2))
    colours = re.findall(r'class="phase-(\d)"></i>train', report_page([in_turn, run]))
    assert len(colours) == 2 and len(set(colours)) == 1, "a part has one colour in all runs"
    assert overlap(in_turn.rows) == "" and longest_first(in_turn.rows)["rollout"] == 40.0
    odd = read_run(make_run(tmp_path / "odd", steps=2, **{"time/reward": 20.0}))
    assert overlap(odd.rows).startswith("some phases overlap"), "other: 0% would hide it"


def test_stale_tokens_are_named_as_the_cause_and_have_an_age(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=3, **STALE))
    assert mismatch_by_age(run) == [(1, 150, 0.25, 0.5)], "one version sampled each batch"
    page = report_page([run])
    assert "octetrl doctor" not in page and "policy versions since it was sampled" in page
    varied = read_run(make_run(tmp_path / "varied", steps=3, **STALE))
    varied.rows[0]["mismatch/gen_kl"] = 0.5
    card = report_page([varied]).split("<h3>KL engine to trainer</h3>")[1].split("<svg")[0]
    assert "it contains the change of the policy" in card and "The tokens of age 0" not in page
    for row in varied.rows:
        assert isinstance(row, dict)
        row |= {f"mismatch/age_0/{name}": 1.0 for name in ("tokens", "gen_kl", "max_abs_diff")}
    assert "The tokens of age 0 below" in report_page([varied])
    apart = read_run(make_run(tmp_path / "apart", steps=3, **{**STALE, "rollout/on_policy_share": 1.0}))
    assert "config.yaml --attribute names the tensors" in report_page([apart])
    with (apart.folder / "config.yaml").open("a") as file:
        file.write("cluster: {cpus: 2}\n")
    command = "config.yaml --attribute cluster.cpus=null cluster.device=cpu names the tensors"
    assert command in report_page([read_run(apart.folder)]), "several workers are refused"


def test_ages_whose_tokens_add_up_to_0_are_left_out(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", steps=2, **STALE))
    for row, tokens in zip(run.rows, (5, -5), strict=True):
        assert isinstance(row, dict)
        row["mismatch/tokens"] = tokens
    assert mismatch_by_age(run) == [(1, 5, 0.25, 0.5)]
    run.rows[0]["mismatch/tokens"] = 0  # type: ignore[index]
    assert mismatch_by_age(run) == []


def test_how_a_run_ended_is_in_its_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert read_run(folder).ending is None and "not yet, or its process was killed" in report_page([read_run(folder)])
    write_ending(folder, Ending("stopped"))
    assert not (folder / "run.json").exists(), "it would not name the run"
    (folder / "run.json").write_text('{"run": "ab"}')
    for error, text in (
        (None, "finished"),
        (KeyboardInterrupt(), "stopped: by Ctrl-C"),
        (Terminated("SIGUSR1"), "stopped: by SIGUSR1"),
        (RunFailed("step 3: \x1b[2J\nlost"), "failed: step 3: \\x1b[2J lost"),
        (ZeroDivisionError("by 0"), "failed: ZeroDivisionError: by 0"),
        (UserError("x" * 9000), "failed: " + "x" * 500 + " ... " + "x" * 500),
    ):
        reopen(folder)
        assert read_run(folder).ending is None, "live or killed, although the metrics of its last step are there"
        write_ending(folder, ending_of(error))
        write_ending(folder, Ending("stopped", "later"))  # the first one stays
        ending = read_run(folder).ending
        assert ending is not None and ending.text == text
        assert json.loads((folder / "run.json").read_text())["run"] == "ab"
        lines = list(terminal_report([read_run(folder)]))
        assert lines[0].endswith(f", {ending.how}")
        assert any(line.startswith("  look: the run failed") for line in lines) == (ending.how == "failed")
    (folder / "run.json").write_text('{"ended": {"how": ["failed"], "why": 3}}')
    assert read_run(folder).ending is None
    assert read_ending({"ended": {"how": "failed", "why": 3}}) == Ending("failed")
    assert read_ending({}) is None
    (folder / "run.json").write_text("[" * 100_000)
    write_ending(folder, Ending("stopped"))


def test_an_error_without_words_is_named_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.system.sigterm._raised", {})  # no earlier test's signal

    def ending(act: Callable[[], object]) -> str:
        try:
            act()
        except BaseException as error:
            return ending_of(error).text
        raise AssertionError("it raised nothing")

    def prints_to_a_closed_pipe() -> None:
        try:
            raise BrokenPipeError(32, "Broken pipe")
        except BrokenPipeError:
            raise SystemExit(1) from None

    def raises() -> None:
        raise ValueError

    here = re.escape(__file__)
    assert re.fullmatch(rf"failed: sys\.exit\(3\) was called in {here}, line \d+", ending(lambda: sys.exit(3)))
    assert re.fullmatch(rf"failed: ValueError without a message in {here}, line \d+", ending(raises))
    assert ending(prints_to_a_closed_pipe) == "stopped: its output was closed, as by `| head`"
    assert ending_of(AssertionError()).text == "failed: AssertionError without a message"


DAMAGED: tuple[dict[str, Any], ...] = (
    *({"time/step": float("nan")}, {"time/step": 1e308}, {"time/step": -5.0}, {"time/rollout": float("nan")}),
    *({"loss": 10**400}, {"reward/mean": -1e308}, {"kl": True}, {"kl": "x"}, {"mismatch/gen_kl": float("inf")}),
    {"mismatch/age_1/tokens": float("nan"), "mismatch/age_1/gen_kl": 0.0, "mismatch/age_1/max_abs_diff": 0.0},
    {"mismatch/age_1/tokens": float("inf"), "mismatch/age_1/gen_kl": 0.0, "mismatch/age_1/max_abs_diff": 0.0},
    {"mismatch/age_1/tokens": -50, "mismatch/age_1/gen_kl": 0.0, "mismatch/age_1/max_abs_diff": 0.0},
)


@pytest.mark.parametrize("values", DAMAGED, ids=str)
def test_damaged_values_are_left_out_and_counted(values: dict[str, Any], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "time/step": 36.0, "reward/mean": 0.5, **values}) + "\n")
    run = read_run(folder)
    assert findings(run) == [
        "1 value of metrics.jsonl can't be used (not a finite number, or a negative time or count); left out here"
    ]
    assert report_page([run]) and list(terminal_report([run, run]))
    assert run.hours[-1] <= 4 * 36 / 3600


@pytest.mark.parametrize("step", [10**400, -1, True, 1.5])
def test_a_step_without_a_number_is_a_damaged_line(step: object, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time/step": 36.0}) + "\n")
    (folder / "warnings.jsonl").write_text(json.dumps({"step": step, "text": "x"}) + "\n")
    run = read_run(folder)
    assert run.unread == 1 and len(run.rows) == 3 and not run.warnings


@pytest.mark.parametrize(
    ("recipe", "lost"),
    [
        ("fp8: 3", "fp8"),
        ("environments: {a: {weight: x}}", "environments.a.weight"),
        ("environments: {a: 3}", "environments.a"),
        ("environments: {a: {}, b: {weight: .nan}}", ""),
        ("algorithm: {batch_size: 3}\ndata: {sources: 3}", "data.sources"),
        ("algorithm: {batch_size: 3}\ndata: 3", "data"),
        ("fp8: {kv_cache: [a], kv_cache_tensors: 3, saturation_warn: x}", "fp8.saturation_warn"),
        ("mismatch: {warn_above: x}", "mismatch.warn_above"),
        (f"mismatch: {{warn_above: {'9' * 400}}}", ""),
        ("- 3", ""),
        ("cluster: [1]", "cluster"),
        ("trainer: {optimizer: 3}", "trainer.optimizer"),
    ],
)
def test_damaged_fields_of_a_recipe_are_left_out_and_named(recipe: str, lost: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3, **{"fp8/kv_saturation": 0.1, MISMATCH: 1.0})
    (folder / "config.yaml").write_text(recipe + "\n")
    run = read_run(folder)
    (line,) = (one for one in findings(run) if one.startswith("config.yaml"))
    assert lost in line if lost else line.startswith("config.yaml can't be read")
    assert report_page([run, run]) and list(terminal_report([run]))


def test_steps_out_of_order_are_one_remark(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps({"step": step, "time/step": 1.0}) + "\n" for step in (3, 2, 2, 4)))
    (remark,) = findings(read_run(folder))
    assert remark.startswith("metrics.jsonl: steps are repeated or out of order (first: step 3 repeats)")


def test_a_file_is_no_run_and_not_its_own_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "afile").write_text("x")
    with pytest.raises(UserError, match=r"'.*/afile' is a file; give the folder of a run$"):
        read_run(tmp_path / "afile")
    inside = make_run(tmp_path / "run") / "metrics.jsonl"
    with pytest.raises(UserError, match=r"is a file; give the folder of a run, such as '.*/run'$"):
        read_run(inside)


def test_what_a_run_wrote_cannot_control_the_terminal_and_lines_fit_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "warnings.jsonl").write_text(json.dumps({"step": 1, "text": "a\x1b[31m\r\x07b " + "long words " * 20}))
    for width in (98, 80, 60):
        lines = list(terminal_report([read_run(folder)], width))
        assert max(map(len, lines)) <= width and all(line.isprintable() for line in lines)
    assert any("a\\x1b[31m" in line for line in lines)


def test_an_accuracy_of_0_is_not_called_the_best(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", **{"eval/accuracy": 0.0}))
    assert dict(results(run))["held-out accuracy"] == "0 in 12 evaluations"
    assert "best" not in dict(results(run))
