"""The report of a run that generates ahead, of one that failed, and of folders that are damaged."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from octetrl.system.errors import RunFailed, Terminated, UserError
from octetrl.telemetry.ending import Ending, ending_of, reopen, write_ending
from octetrl.telemetry.metrics import MISMATCH
from octetrl.telemetry.report import mismatch_by_age, report_page, terminal_report
from octetrl.telemetry.report_data import OF_PAIRS, RunRecord, changed_tasks, longest_first, overlap, read_run, results
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
    (folder / "run.json").write_text("[" * 100_000)
    write_ending(folder, Ending("stopped"))


def test_an_error_without_words_is_named_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.system.process._raised", {})  # no earlier test's signal

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

    def exits_within_a_circle() -> None:
        first, second = ValueError(), ValueError()
        first.__cause__, second.__cause__ = second, first
        raise SystemExit(3) from first

    def raises() -> None:
        raise ValueError

    here = re.escape(__file__)
    assert re.fullmatch(rf"failed: sys\.exit\(3\) was called in {here}, line \d+", ending(lambda: sys.exit(3)))
    assert re.fullmatch(rf"failed: ValueError without a message in {here}, line \d+", ending(raises))
    assert ending(exits_within_a_circle).startswith("failed: sys.exit(3) was called")
    assert ending(prints_to_a_closed_pipe) == "stopped: its output was closed, as by `| head`"
    assert ending_of(AssertionError()).text == "failed: AssertionError without a message"


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


TASKS = {"kind": "reasoning_gym", "dataset": "chain_sum"}
SAYS = "the tasks differ: rewards and accuracies cannot be compared"


def run_of(name: str, reward: float = 0.5, **recipe: object) -> RunRecord:
    rows = [
        {"step": step, "reward/mean": reward + step / 100, "eval/accuracy": reward, "time/step": 30.0 + reward}
        for step in range(1, 13)
    ]
    return RunRecord(Path(name), recipe, rows)


def test_rewards_of_the_same_tasks_are_compared() -> None:
    limits = {"reward_timeout_seconds": 2.0, "reward_workers": 4, "seed": 3, "eval_size": 64}
    one, two = run_of("one", environment=TASKS), run_of("two", 0.75, environment={**TASKS, **limits})
    assert changed_tasks(one, two) == []
    lines, page = list(terminal_report([one, two])), report_page([one, two])
    assert "reward, step by step, two − one: +0.25, the same in all 6 pairs" in lines, "no interval of width 0"
    two.rows[-1]["reward/mean"] = 1.5
    (varied,) = (line for line in terminal_report([one, two]) if line.startswith("reward, step by step"))
    assert ", 95% interval +0.2689 to +0.605" in varied, "Wilson's, of one pair in six"
    assert OF_PAIRS in " ".join(" ".join(lines).split()) and OF_PAIRS in page, "which pairs, in both"
    assert "bootstrap" not in " ".join(terminal_report([one]))
    assert not any(SAYS in line for line in lines) and SAYS not in page
    assert "<td>reward, step by step</td>" in page and "<td>held-out accuracy, step by step</td>" in page


def test_rewards_of_other_tasks_are_not() -> None:
    one, two = run_of("one", environment=TASKS), run_of("two", 0.75, environment={**TASKS, "dataset": "gcd"})
    lines, page = list(terminal_report([one, two])), report_page([one, two])
    assert f"{SAYS} (environment.dataset)" in lines and f"{SAYS} (environment.dataset)" in page
    assert not any(line.startswith(("reward,", "held-out")) for line in lines)
    assert "reward, step by step" not in page and "accuracy, step by step" not in page
    assert any(line.startswith("seconds of a step, step by step, two − one") for line in lines)
    third = run_of("three", environment=TASKS)
    lines = list(terminal_report([one, two, third]))
    assert f"one and two: {SAYS} (environment.dataset)" in lines
    mixed = run_of("mixed", environments={"sums": TASKS})
    said = [line for line in terminal_report([one, mixed]) if "tasks differ" in line or " more)" in line]
    assert said[0].startswith(SAYS) and said[-1].endswith(" more)") and max(map(len, said)) <= 100
    rewards = next(line for line in lines if line.startswith("reward,"))
    assert rewards.startswith("reward, step by step, three − one")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"environment": {**TASKS, "reward": "mine:score"}}, "environment.reward"),
        ({"environment": {**TASKS, "parameters": {"max_terms": 9}}}, "environment.parameters"),
        ({"environment": TASKS, "evaluation": {"right_from": 0.5}}, "evaluation.right_from"),
        ({"environment": {}, "environments": {"sums": TASKS}}, "environments.sums.kind"),
    ],
)
def test_whatever_defines_tasks_or_score_counts(changes: dict[str, object], field: str) -> None:
    assert field in changed_tasks(run_of("one", environment=TASKS), run_of("two", **changes))
