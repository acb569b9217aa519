"""The report: it holds what the run wrote, runs no script, escapes what a model says, and draws numbers where they
belong."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import LoggingConfig
from octetrl.run.folder.allowed_changes import changes_between, record_changes
from octetrl.system.errors import UserError
from octetrl.telemetry.charts import HEIGHT, LEFT, WIDTH, Line, line_chart, shown_number, sparkline, stacked_chart
from octetrl.telemetry.metrics import BETWEEN_STEPS, MISMATCH
from octetrl.telemetry.report import _TONES, mismatch_by_age, report_page, terminal_report
from octetrl.telemetry.report_data import (
    PHASES,
    RunRecord,
    findings,
    held_out_difference,
    paired_difference,
    raised_warnings,
    read_run,
    steps_above,
)
from octetrl.telemetry.sinks import HISTORY_FILE, open_sinks
from tests.unit.telemetry.sampled_rows import line as rollout_line
from tests.unit.telemetry.sampled_rows import write_run


def make_run(folder: Path, steps: int = 12, **values: float) -> Path:
    """A run whose reward is 0.1, 0.2, ... per step, unless `values` says otherwise; an evaluation every third step."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "model: {path: models/small}\nfp8: {rollout: true, kv_cache: dynamic}\nseed: 5\n"
    )
    lines = []
    for step in range(1, steps + 1):
        line: dict[str, Any] = {
            "step": step,
            "reward/mean": step / 10,
            "reward/mean_error": 0.25,
            "reward/count": 4,
            "time/step": 36.0,
        }
        line |= {"time/rollout": 20.0, "time/train": 10.0, "mismatch/tokens": 50, "mismatch/equal_fraction": 1.0}
        if step % 3 == 0:
            line |= {"eval/accuracy": step / 20, "eval/accuracy_low": 0.0, "eval/accuracy_high": 1.0}
        lines.append(json.dumps({**line, **values}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def page_of(runs: Sequence[RunRecord]) -> str:
    """The page without the class of cells that are numbers."""
    return report_page(runs).replace(' class="whole"', "")


def test_the_page_needs_nothing_else_and_escapes_what_a_model_says(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    write_run(folder)
    page = page_of([read_run(folder)])
    assert "<script" not in page and "&lt;script&gt;alert(" in page and "KeyError: &#x27;x&#x27; (r.py:3)" in page
    assert "told you" in page and "I guess FOUR" in page
    assert not re.search(r"(src|href)=|https?://|@import|url\(", page), "nothing is loaded"
    assert "default-src 'none'" in page and "color-scheme: light dark" in page and "width=device-width" in page
    assert "models/small" in page and "linears of rollout in FP8, KV cache in FP8, dynamic" in page
    assert "all 150 trained tokens are equal, bit for bit" in page
    assert page.count("<article>") >= 4 and len(page) < 300_000
    assert "9 tokens, policy version 2, 3 from token 4</span>" in page


def test_curves_are_over_steps_and_hours_and_runs_lie_on_one_another(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / name)) for name in ("one", "two")]
    assert runs[0].hours[-1] == pytest.approx(12 * 36 / 3600)
    page = page_of(runs)
    rewards = page.split("<h3>reward</h3>")[1].split("<h3>")[0]
    assert "The band is one standard error of the mean" in rewards
    assert rewards.count("<svg") == 2 and rewards.count("<polyline") == 4 and rewards.count("<polygon") == 4
    assert "two − one" in page


def test_terms_of_the_reward_and_metrics_of_users_have_curves(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "first"))
    for place, row in enumerate(run.rows):
        row |= {"reward/component/polite": place / 10, "environment/letters": float(place), "kl": 0.01 * place}
    page = page_of([run])
    assert all(f"<h3>{title}</h3>" in page for title in ("reward: polite", "letters", "KL from the reference"))
    lines = [line.split() for line in terminal_report([run])]
    assert [one[0] for one in lines if one and one[0] in ("kl", "letters")] == ["kl", "letters"]
    assert any(one[:2] == ["reward:", "polite"] and one[-1] == "1.1" for one in lines)


def test_what_is_constant_or_never_finite_is_a_line_of_a_table(tmp_path: Path) -> None:
    one, two = (read_run(make_run(tmp_path / str(rate), lr=rate, kl=0.25)) for rate in (0.5, 0.125))
    curves, _, constant = page_of([one]).partition("<h2>The same in every step that has it</h2>")
    assert "<h3>learning rate</h3>" not in curves and "<h3>reward</h3>" in curves
    assert "<td>learning rate</td><td>0.5</td>" in constant and "<td>log-probs equal</td><td>1</td>" in constant
    curves, _, constant = page_of([one, two]).partition("<h2>The same in every step that has it</h2>")
    assert "<h3>learning rate</h3>" in curves and "<td>log-probs equal</td><td>1</td>" in constant, "they differ"
    run = read_run(make_run(tmp_path / "run", lr=0.5, kl=0.25, loss=1.0))
    for number, row in enumerate(run.rows):
        assert isinstance(row, dict)
        row["kl"] = None if number < 3 else 0.25  # as metrics.jsonl has NaN
        row["loss"] = None
    del run.rows[4]["lr"]  # type: ignore[attr-defined]
    page = page_of([run])
    assert "<td>learning rate</td><td>0.5</td>" in page
    assert "<td>KL from the reference</td><td>0.25; not finite in 3 of 12 steps</td>" in page
    assert "<td>loss</td><td>no value; not finite in 12 of 12 steps</td>" in page and "<h3>loss</h3>" not in page


def test_a_mismatch_of_stale_tokens_is_not_called_a_fault_of_engine_and_trainer(tmp_path: Path) -> None:
    (line,) = findings(read_run(make_run(tmp_path / "apart", **{MISMATCH: 1.2})))
    assert line.startswith("engine and trainer disagree by more than 3%")
    stale = {MISMATCH: 1.2, "rollout/on_policy_share": 0.0}
    (line,) = findings(read_run(make_run(tmp_path / "stale", **stale)))
    assert (
        "differ by more than 3%, which contains the change of the policy" in line
        and "; lower the learning rate, or" in line
    )
    with (tmp_path / "stale" / "config.yaml").open("a") as file:
        file.write("cluster: {trainer_gpus: 1, engine_gpus: 1, max_staleness: 2}\n")
    assert "; lower cluster.max_staleness or the learning rate." in findings(read_run(tmp_path / "stale"))[0]
    with (tmp_path / "stale" / "config.yaml").open("a") as file:
        file.write("mismatch: {warn_above: 1.3}\n")
    assert findings(read_run(tmp_path / "stale")) == [], "the limit of the run, as on its console"


def test_workers_and_roles_are_part_of_what_ran(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps({"machine": "x86_64, 1 thread"}))
    written = (folder / "config.yaml").read_text()

    def shown(cluster: str) -> dict[str, str]:
        (folder / "config.yaml").write_text(f"{written}{cluster}\n")
        page = page_of([read_run(folder)])
        return dict(re.findall("<td>(workers|roles|max_staleness)</td><td[^>]*>(.*?)</td>", page))

    assert shown("") == shown("cluster: {device: cpu}") == {"workers": "1"}
    assert shown("cluster: {cpus: 3}") == {"workers": "3 CPU processes"}
    assert shown("cluster: {gpus: 2, workers_per_gpu: 2}") == {"workers": "4 on 2 GPUs"}
    roles = shown("cluster: {trainer_cpus: 1, engine_cpus: 2, max_staleness: 1, cpus: null}")
    assert roles == {"workers": "3 CPU processes", "roles": "trainer_cpus 1, engine_cpus 2", "max_staleness": "1"}


def test_clamped_values_and_a_mismatch_are_findings_above_what_warns(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", **{"fp8/kv_saturation": 0.00033})
    (found,) = findings(read_run(folder))
    assert "12 steps, first in step 1, at most 0.00033" in found
    (folder / "config.yaml").write_text("fp8: {kv_cache: calibrated, saturation_warn: 0.001}\n")
    assert findings(read_run(folder)) == []
    run = read_run(make_run(tmp_path / "run", **{MISMATCH: 1.02}))
    assert steps_above(run) is None
    run.rows[3][MISMATCH], run.rows[6][MISMATCH] = 1.04, 1.249
    del run.rows[7][MISMATCH]
    assert steps_above(run) == f"{MISMATCH} above mismatch.warn_above=1.03 in 2 of 11 steps, at most 1.2490 in step 7"
    assert findings(read_run(make_run(tmp_path / "sound"))) == []
    (line,) = findings(read_run(make_run(tmp_path / "cut", **{"rollout/truncated_share": 0.3})))
    assert "rollout.max_new_tokens" in line and "12 steps, first in step 1" in line
    learnt = read_run(make_run(tmp_path / "learnt", **{"rollout/truncated_share": 0.3}))
    learnt.rows[-1]["rollout/truncated_share"] = 0.1
    assert findings(learnt) == [], "in the end the answers are short enough"


def test_a_reward_that_is_the_accuracy_has_no_second_chart(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    for row in run.rows:
        if "eval/accuracy" in row:
            row["eval/reward_mean"] = row["eval/accuracy"]
    page = page_of([run])
    assert "<h3>held-out accuracy</h3>" in page and "<h3>held-out reward</h3>" not in page
    assert "The mean held-out reward is the same number." in page
    run.rows[-1]["eval/reward_mean"] = 0.25  # partial credit
    page = page_of([run])
    assert "<h3>held-out reward</h3>" in page and "is the same number" not in page


def test_a_run_without_rollouts_shows_its_files_and_no_settings_of_rollouts(tmp_path: Path) -> None:
    recipe = """
    algorithm: {name: sft, batch_size: 64, conversations: talk.jsonl}
    environment: {kind: reasoning_gym, dataset: chain_sum}
    rollout: {prompts_per_step: 32, group_size: 8, temperature: 1.0}
    """
    folder = make_run(tmp_path / "run")
    (folder / "config.yaml").write_text(recipe)
    shown = dict(read_run(folder).settings)
    assert shown["data"] == "talk.jsonl" and shown["rows a step"] == "64"
    assert not shown.keys() & {"tasks", "dataset", "prompts a step", "answers a prompt", "temperature"}
    several = "data: {sources: {a: {path: one.jsonl}, b: {path: two}}}"
    (folder / "config.yaml").write_text(recipe.replace(", conversations: talk.jsonl", "") + f"\n    {several}\n")
    assert dict(read_run(folder).settings)["data"] == "one.jsonl, two"
    (folder / "config.yaml").write_text(recipe.replace(", batch_size: 64, conversations: talk.jsonl", ""))
    shown = dict(read_run(folder).settings)
    assert shown["prompts a step"] == "32" and "rows a step" not in shown


def test_tokens_of_several_versions_are_shown_by_their_age(tmp_path: Path) -> None:
    ages = {"mismatch/age_0/tokens": 30.0, "mismatch/age_0/gen_kl": 0.0, "mismatch/age_0/max_abs_diff": 0.0}
    ages |= {"mismatch/age_1/tokens": 20.0, "mismatch/age_1/gen_kl": 0.25, "mismatch/age_1/max_abs_diff": 0.5}
    folder = make_run(tmp_path / "run", steps=2, **ages, **{"mismatch/equal_fraction": 0.6, "rollout/staleness": 0.4})
    with (folder / "metrics.jsonl").open("a") as file:  # fewer tokens count less; a step of one version has no ages
        further = {"mismatch/age_1/tokens": 5, "mismatch/age_1/gen_kl": 0.75, "mismatch/age_1/max_abs_diff": 2.0}
        file.write(json.dumps({"step": 3, "time/step": 36.0, "rollout/staleness": 1.0, **further}) + "\n")
        file.write(json.dumps({"step": 4, "time/step": 36.0, "rollout/staleness": 1.0}) + "\n")
    assert mismatch_by_age(read_run(folder)) == [(0, 60, 0.0, 0.0), (1, 45, pytest.approx((10 + 3.75) / 45), 2.0)]
    page = page_of([read_run(folder)])
    assert "<td>1</td><td>45</td><td>3.06e-01</td><td>2.00e+00</td>" in page and "<h3>age of the tokens</h3>" in page
    assert mismatch_by_age(read_run(make_run(tmp_path / "one"))) == []


def test_differences_are_paired_by_step(tmp_path: Path) -> None:
    one = read_run(make_run(tmp_path / "one"))
    two = read_run(make_run(tmp_path / "two", **{"reward/mean": 2.0}))
    found = paired_difference(one, two, "reward/mean")
    assert found is not None and found.tasks == 6
    assert found.mean == pytest.approx(2.0 - (0.7 + 1.2) / 2) and found.low < found.mean < found.high
    assert paired_difference(one, two, "eval/accuracy") is None, "two steps say nothing about an interval"


def test_held_out_tasks_are_paired_in_the_last_evaluations(tmp_path: Path) -> None:
    runs = []
    for name, first_task, reward in (("one", 0, 0.0), ("two", 2, 1.0)):
        run = read_run(make_run(tmp_path / name))
        runs.append(run)
        assert held_out_difference(run, run) is None, "no evaluation yet"
        folder = run.folder / "evaluations"
        folder.mkdir()
        for step, value in ((3, 0.5), (12, reward)):
            tasks = range(first_task, first_task + 10)
            rows = [rollout_line(f"sum/{task}", 0, None if task == 11 else value + task / 100) for task in tasks]
            (folder / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = held_out_difference(*runs)
    assert found is not None and found.tasks == 8 and found.mean == pytest.approx(1.0)
    shown = page_of(runs).split("<h2>Differences</h2>")[1].split("</table>")[0]
    assert "<td>held-out reward, task by task</td><td>two − one</td><td>+1</td>" in shown
    assert any(line.startswith("held-out reward, task by task, two − one: +1") for line in terminal_report(runs))


def test_the_page_says_where_a_run_ran_what_came_out_and_what_it_warned_of(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    bare = page_of([read_run(folder)])
    assert (
        "<td>machine</td>" not in bare and "<td>linears by layer</td>" not in bare and "Warnings of the run" not in bare
    )
    where = {"run": "ab", "commit": "c0ffee1", "machine": "NVIDIA H200", "versions": {"torch": "2.11", "triton": "3.6"}}
    where |= {"linears": [["0", "BF16"], ["1 to 7", "FP8"]], "weights_in_flight": "recompute_cache"}
    (folder / "run.json").write_text(json.dumps(where))
    with open_sinks(folder, LoggingConfig(tensorboard=False), {}, resumed_step=12) as sinks:
        sinks.write_warnings(2, [f"0.{number}% of <K> were clamped; raise it" for number in (11, 2)])
        sinks.write_warnings(9, ["3.5% of <K> were clamped; raise it", "another"])
    (folder / "warnings.jsonl").open("a").write('[]\n{"step": 3')
    run = read_run(folder)
    page = page_of([run])
    layers = "0: BF16; 1 to 7: FP8; embedding, norms, lm_head: BF16"
    facts = (("machine", "NVIDIA H200"), ("commit", "c0ffee1"), ("versions", "torch 2.11, triton 3.6"))
    for label, text in (*facts, ("linears by layer", layers), ("weights in flight", "recompute_cache")):
        assert f"<td>{label}</td><td>{text}</td>" in page
    assert "<td>best</td><td>held-out accuracy 0.600 at step 12</td>" in page
    assert "<td>mean reward</td><td>0.100 in the first step, 1.200 in the last</td>" in page
    raised = ["0.11% of <K> were clamped; raise it (after step 2, 3 times until step 9)", "another (after step 9)"]
    assert raised_warnings(run) == raised and f"<li>{escape(raised[0])}</li><li>{raised[1]}</li>" in page
    assert f"  warned: {raised[0]}" in list(terminal_report([run]))
    with open_sinks(folder, LoggingConfig(tensorboard=False), {}, resumed_step=5):
        assert len(read_run(folder).warnings) == 2, "a resumed run raises the later ones again"


def test_learning_beside_a_tail_that_never_was_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", **{"train/beside_tail_share": 0.0})
    assert findings(read_run(folder)) == [], "it was not asked for"
    with (folder / "config.yaml").open("a") as file:
        file.write("rollout: {learn_beside_tail: true}\n")
    run = read_run(folder)
    (line,) = findings(run)
    assert line.startswith("rollout.learn_beside_tail: no token was trained on before the last answer ended")
    run.rows[5]["train/beside_tail_share"] = 0.25
    assert findings(run) == []


def test_the_terminal_gets_the_same_in_short(tmp_path: Path) -> None:
    lines = list(terminal_report([read_run(make_run(tmp_path / "run"))]))
    assert lines[0].startswith("run: 12 steps in 7:12")
    assert any(line.strip().startswith("reward/mean") and line.endswith("0.1 → 1.2") and "▁" in line for line in lines)
    assert max(map(len, lines)) <= 120
    assert "  best                 held-out accuracy 0.600 at step 12" in lines
    last = '{"step": 13, "time/step": 8, "time/evaluate": 30, "time/wait_to_evaluate": 10}\n'
    (tmp_path / "run" / "metrics.jsonl").open("a").write(last)
    run = read_run(tmp_path / "run")
    assert "  time                 rollout 50%, train 25%, other 17%, evaluate 6%, waiting to evaluate 2%" in list(
        terminal_report([run])
    )
    shares = dict(re.findall(r"</i>([\w ]+) (\d+%)</span>", page_of([run])))
    assert len(_TONES) > len((*PHASES, *BETWEEN_STEPS))
    assert shares == {"rollout": "50%", "train": "25%", "evaluate": "6%", "waiting to evaluate": "2%", "other": "17%"}


def test_numbers_sparklines_and_points_of_charts() -> None:
    assert [shown_number(x) for x in (0, 3.0, 0.12345, 1234567.0, 2e-5)] == ["0", "3", "0.1235", "1,234,567", "2.0e-05"]
    assert sparkline([0, 1, 2]) == "▁▅█" or sparkline([0, 1, 2]) == "▁▄█"
    assert sparkline([1, 1]) == "▄▄" and len(sparkline(range(1000))) == 32
    svg = line_chart([Line("r", 0, [0, 5, 10], [0.0, 1.0, 4.0])], "step")
    ((*_, points),) = re.findall(r'(<polyline)[^>]*points="([^"]*)"', svg)
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in points.split())
    assert (x0, x2) == (LEFT, WIDTH - 8) and x1 == pytest.approx((x0 + x2) / 2, abs=0.2)
    assert y0 > y1 > y2 and (y0 - y1) / (y0 - y2) == pytest.approx(0.25, abs=0.01) and y0 <= HEIGHT
    assert line_chart([Line("flat", 0, [1, 2], [3.0, 3.0])], "step").count("<polyline") == 1
    assert svg.count('class="dot') == 3, "a chart of few points shows all of them, one with a long line none"
    assert "dot" not in line_chart([Line("s", 0, [0, 9], [0, 1]), Line("l", 1, range(31), [0.5] * 31)], "step")
    bars = stacked_chart({"a": 4, "b": 1}, [[1.0, 3.0], [2.0, 2.0]], [1, 2], "step")
    heights = [float(height) for height in re.findall(r'height="([\d.]+)"', bars)]
    assert re.findall(r'class="phase-(\d)"', bars) == ["4", "1", "4", "1"]
    assert heights[1] == pytest.approx(3 * heights[0], rel=0.01) and heights[2] == pytest.approx(heights[3], rel=0.01)


def test_a_runs_files_are_read_as_they_were_written_and_damaged_lines_counted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"step": "x"}\n[\n{"step": 4, "reward/mean": 1.0}\n{"step": 5, "rew')
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert findings(run)[0] == "3 lines of metrics.jsonl can't be read; their steps are missing here"
    assert "3 lines of metrics.jsonl can&#x27;t be read" in page_of([run])
    # YAML 1.2: an environment may be named `no`. And float32 is not called BF16.
    folder = make_run(tmp_path / "named", steps=1)
    (folder / "config.yaml").write_text(
        "model: {dtype: float32}\nenvironments: {no: {weight: 1}, en: {weight: 2, temperature: 0.5, group_size: 4}}\n"
    )
    run = read_run(folder)
    assert list(run.environments) == ["no", "en"]
    assert dict(run.settings)["environment en"].endswith("weight 2, temperature 0.5, answers a prompt 4")
    assert dict(run.settings)["precision"] == "linears in float32, KV cache in float32"
    folder = make_run(tmp_path / "rewarded", steps=1)
    reward = "{a: {function: m:a}, b: {function: m:b, weight: 0.5, only: training}}"
    (folder / "config.yaml").write_text(f"environment: {{reward: {reward}}}\n")
    assert dict(read_run(folder).settings)["reward"] == "1 x a + 0.5 x b (in training only)"


def test_settings_that_a_resumed_run_changed_are_on_its_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    tree = {"model": {"path": "m"}, "environment": {"dataset": "chain_sum"}, "steps": 30}
    before = recipe_from_mapping(tree | {"trainer": {"optimizer": {"lr": 0.005}}}).model_dump()
    after = recipe_from_mapping(tree | {"trainer": {"optimizer": {"lr": 1e-6}}}).model_dump()
    record_changes(run, 32, changes_between(before, after))
    with (run / HISTORY_FILE).open("a") as file:
        file.write('{"step": 35, "field": "wandb\\u001b[31m<b>", "old": null, "new": "y"}\n')
    page = page_of([read_run(run)])
    changes = (
        "trainer.optimizer.lr: 0.005 until step 32, then 1e-06",
        "wandb\\x1b[31m&lt;b&gt;: None until step 35, then y",
    )
    assert f"<td>changed</td><td>{'; '.join(changes)}</td>" in page


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    inside, empty = make_run(tmp_path / "first") / "metrics.jsonl", tmp_path / "empty"
    empty.mkdir()
    for path, says in (
        (empty, r"has no metrics\.jsonl; give the folder of a run$"),
        (tmp_path / "fist", r"does not exist.*did you mean '.*/first'\?"),
        (inside, r"is a file; give the folder of a run, such as '.*/first'$"),
    ):
        with pytest.raises(UserError, match=says):
            read_run(path)
    for rubbish in ('{"st', "[" * 200_000):
        inside.write_text(rubbish)
        with pytest.raises(UserError, match="no finished step"):
            read_run(tmp_path / "first")
