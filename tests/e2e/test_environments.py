"""Runs of several environments: shares, held-out tasks, resumes, workers, and what a person sees of each."""

from __future__ import annotations

import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

import octetrl
from octetrl.cli.main import run_command
from octetrl.config.schema import Recipe
from octetrl.run.loop import train
from octetrl.system.errors import RunFailed
from octetrl.telemetry.glossary import explained
from octetrl.trainer import checkpoint
from tests.e2e.test_turns import UNTIMED
from tests.e2e.tiny_run import RECIPE, read_lines, recipe_tree, run, timeless, tiny_recipe
from tests.unit.workers.thread_team import assert_same_measures, run_on, steps_of

pytestmark = pytest.mark.usefixtures("rewards_here")

SUMS = {"kind": "jsonl", "dataset": RECIPE["environment"]["dataset"]}
TWO: dict[str, Any] = {
    "noise": {**SUMS, "reward": "tests.e2e.tiny_rewards:by_text", "eval_size": 4, "weight": 2},
    "exact": {**SUMS, "eval_size": 2, "seed": 5},
}
THREE = {**TWO, "talk": {"kind": "python", "dataset": "tests.e2e.tiny_turns:ScoredTalk", "eval_size": 3}}
STEPS = 3


def several(environments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"environment": {}, "environments": environments, "rollout.stop": ["e", "a", "1"], **changes}


EVALUATED = several(
    THREE, **{"rollout.prompts_per_step": 4, "evaluation.every": 2, "checkpoint.every": 1, "steps": STEPS}
)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three environments, one of which replies. To be read, not written."""
    folder = tmp_path_factory.mktemp("several") / "run"
    run(model, folder, EVALUATED)
    return folder


def rows_of(folder: Path, kind: str = "rollouts") -> list[list[dict[str, Any]]]:
    return [read_lines(file) for file in sorted((folder / kind).iterdir())]


def test_the_tasks_follow_the_weights_and_each_is_scored_by_its_own(whole: Path) -> None:
    for rows in rows_of(whole):
        assert Counter(row["environment"] for row in rows) == {"noise": 8, "exact": 4, "talk": 4}
        assert all(row["task_id"].startswith(f"{row['environment']}/") for row in rows)
        assert {row["reward"] for row in rows if row["environment"] == "exact"} == {0.0}
        assert all(0.0 < row["reward"] < 1.0 for row in rows if row["environment"] != "exact")
        assert any(len(row.get("turns", ())) == 2 for row in rows)
        assert not any(row["environment"] != "talk" and "turns" in row for row in rows)


def test_each_has_its_own_temperature_and_group_size_and_log_probs_stay_equal(model: Path, tmp_path: Path) -> None:
    """The trainer divides the logits of each token by its environment's temperature, also in later turns."""
    own = {"noise": {"temperature": 0.02, "group_size": 2}, "exact": {"temperature": 3.0}, "talk": {"group_size": 3}}
    environments = {name: {**section, **own[name]} for name, section in THREE.items()}
    changes = several(environments, **{"rollout.prompts_per_step": 4, "rollout.temperature": 1.5, "steps": 2})
    lines = run(model, tmp_path / "run", changes | {"evaluation.every": 2})
    for rows in rows_of(tmp_path / "run"):
        assert Counter(row["environment"] for row in rows) == {"noise": 4, "exact": 4, "talk": 3}
        likely = {name: [p for row in rows if row["environment"] == name for p in row["logprobs"]] for name in own}
        mean = {name: sum(each) / len(each) for name, each in likely.items()}
        assert mean["noise"] > -4 > max(mean["talk"], mean["exact"])  # nearly greedy, nearly uniform over 320 tokens
    assert all(line["mismatch/equal_fraction"] == 1 and line["mismatch/tokens"] > 0 for line in lines)
    assert lines[1]["rollout/count"] == 11 and lines[1]["eval/tasks"] == len(
        rows_of(tmp_path / "run", "evaluations")[0]
    )


def test_rows_have_their_own_temperature_and_group_size_and_those_of_their_environment_otherwise(
    model: Path, tmp_path: Path
) -> None:
    own: list[dict[str, Any]] = [{"heat": 0.02, "n": 3}, {"heat": 3.0, "n": None}, {"heat": None, "n": 2}]
    rows = [{"id": str(k), "prompt": f"{k} + 1 =", "answer": f"{k + 1}", **own[k % 3]} for k in range(24)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    columns = {"temperature": "heat", "group_size": "n"}
    section = {**SUMS, "dataset": str(file), "reward": "tests.e2e.tiny_rewards:by_text", "eval_size": 6}
    section["columns"] = columns
    mixed = several({"rows": {**section, "group_size": 5}, "exact": TWO["exact"]})
    for name, changes, usual in (("one", {"environment": section}, 4), ("two", mixed, 5)):
        changes = changes | {"rollout.prompts_per_step": 12, "rollout.temperature": 1.5, "evaluation.every": 1}
        (line,) = run(model, tmp_path / name, changes | {"steps": 1})
        ((*sampled,),) = rows_of(tmp_path / name)
        groups = defaultdict(list)
        for row in sampled:
            if row.get("environment") != "exact":
                groups[int(row["task_id"].removeprefix("rows/"))].append(sum(row["logprobs"]) / len(row["logprobs"]))
        assert {len(groups[k]) for k in groups if k % 3 == 0} == {3} and {
            len(groups[k]) for k in groups if k % 3 == 2
        } == {2}
        assert {len(groups[k]) for k in groups if k % 3 == 1} == {usual}
        means = [[each for k, found in groups.items() if k % 3 == kind for each in found] for kind in range(3)]
        assert min(means[0]) > -4 > max(means[1] + means[2]), "nearly greedy, nearly uniform over 320 tokens"
        assert line["mismatch/equal_fraction"] == 1 and line["rollout/count"] == len(sampled)
        evaluated = [row for row in rows_of(tmp_path / name, "evaluations")[0] if row.get("environment") != "exact"]
        assert len(evaluated) == 6, "one greedy answer to each held-out task"


def test_metrics_by_environment_are_those_of_its_rollouts(whole: Path) -> None:
    for line, rows in zip(read_lines(whole / "metrics.jsonl"), rows_of(whole), strict=True):
        for name, share in (("noise", 0.5), ("exact", 0.25), ("talk", 0.25)):
            of_name = [row for row in rows if row["environment"] == name]
            mean = sum(row["reward"] for row in of_name) / len(of_name)
            assert line[f"environments/{name}/reward"] == pytest.approx(mean)
            assert line[f"environments/{name}/share"] == share
            assert line[f"environments/{name}/zero_variance_fraction"] == float(name == "exact")
            cut = sum(row["status"] == "truncated" for row in of_name) / len(of_name)
            assert line[f"environments/{name}/truncated_share"] == cut
        assert all(explained(name) for name in line if name != "step"), "docs/metrics.md lacks one"
        assert line["mismatch/unequal_tokens"] == 0


def test_held_out_tasks_are_each_environments_own(whole: Path) -> None:
    (rows,) = rows_of(whole, "evaluations")
    line = read_lines(whole / "metrics.jsonl")[1]
    by_name = defaultdict(list)
    for row in rows:
        by_name[row["environment"]].append(row["reward"])
    assert {name: len(found) for name, found in by_name.items()} == {"noise": 4, "exact": 2, "talk": 3}
    for name, rewards in by_name.items():
        assert line[f"eval/environments/{name}/reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert line[f"eval/environments/{name}/tasks"] == len(rewards)
    assert line["eval/reward_mean"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))
    trained = {row["prompt"] for of_step in rows_of(whole) for row in of_step}
    assert not trained & {row["prompt"] for row in rows}


def test_a_resumed_run_is_the_run_never_interrupted(model: Path, whole: Path, tmp_path: Path) -> None:
    run(model, tmp_path / "run", EVALUATED | {"steps": 1})
    train(tiny_recipe(model, tmp_path / "run", EVALUATED), resume=True)
    ours, theirs = (
        [{k: v for k, v in line.items() if k not in UNTIMED} for line in timeless(read_lines(at / "metrics.jsonl"))]
        for at in (tmp_path / "run", whole)
    )
    assert ours == theirs
    for kind in ("rollouts", "evaluations"):
        for file in (whole / kind).iterdir():
            assert (tmp_path / "run" / kind / file.name).read_bytes() == file.read_bytes(), file.name
    last = f"step_{STEPS:06}"
    mine, other = (checkpoint.load(at / "checkpoints" / last) for at in (tmp_path / "run", whole))
    for name in other.files:
        assert (mine.folder / name).read_bytes() == (other.folder / name).read_bytes(), name


def test_weights_may_change_on_resume_and_tasks_may_not(
    model: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run")
    moved = ["train", str(tmp_path / "run" / "config.yaml"), "--resume", f"output_dir={tmp_path / 'run'}", "steps=4"]

    def refused(*words: str) -> str:
        assert run_command([*moved, *words]) == 2
        return capsys.readouterr().err

    weight = "environments.exact.weight=5"
    assert f"change it from here on with --allow {weight}.0" in refused(weight)
    assert "environments.exact.seed is 6, was 5; its checkpoint depends on this" in refused(
        "--allow", "environments.exact.seed=6"
    )
    new = "environments.more={kind: jsonl, dataset: x.jsonl}"
    assert "environments.more is new; its checkpoint depends on this" in refused(new)
    assert run_command([*moved, "--allow", weight]) == 0
    rows = read_lines(tmp_path / "run" / "rollouts" / "step_000004.jsonl")
    assert Counter(row["environment"] for row in rows[::4]) == {"exact": 3, "noise": 1}  # of 5 : 2 : 1
    (change,) = read_lines(tmp_path / "run" / "history.jsonl")
    assert change == {"step": 3, "field": "environments.exact.weight", "old": 1.0, "new": 5.0}


def test_workers_change_neither_tasks_nor_tokens(model: Path, tmp_path: Path) -> None:
    changes = several(THREE, **{"rollout.prompts_per_step": 3, "precision": "fp8", "steps": 2})
    changes["trainer.tokens_per_micro_batch"] = 64  # several for each worker
    changes["trainer.optimizer.lr"] = 0.0  # sums of gradients round differently
    with run_on(0, model, tmp_path, **changes) as one:
        expected, lines = steps_of(one, 2)
    with run_on(2, model, tmp_path, **changes) as two:
        drawn, others = steps_of(two, 2)
    assert drawn == expected
    for line, other in zip(lines, others, strict=True):
        assert_same_measures(other, line)
        assert other["mismatch/max_abs_diff"] == 0.0
        assert {n: v for n, v in other.items() if n.startswith("environments/")} == {
            n: v for n, v in line.items() if n.startswith("environments/")
        }


def test_batches_drawn_ahead_have_the_same_tasks(whole: Path, model: Path, tmp_path: Path) -> None:
    """No task is skipped or taken twice, whatever was drawn before the run was cut off."""
    changes = several(TWO, **{"rollout.prompts_per_step": 3, "precision": "fp8", "steps": 4})
    with run_on(0, model, tmp_path, **changes) as plain:
        expected = [task.id for task in plain.taskset.next_batch(12)]
    with run_on(1, model, tmp_path, engines=1, ahead=1, **changes) as ahead:
        drawn, _ = steps_of(ahead, 2)
        place = ahead.method.place(ahead).taskset
        assert [group.task.id for groups in drawn for group in groups] == expected[:6]
    with run_on(0, model, tmp_path, **changes) as resumed:
        resumed.taskset.restore(json.loads(json.dumps(place)))
        assert [task.id for task in resumed.taskset.next_batch(6)] == expected[6:]


def test_one_environments_failures_end_the_run_by_its_own_limit(model: Path, tmp_path: Path) -> None:
    broken = {**TWO, "broken": {**SUMS, "reward": "tests.e2e.tiny_rewards:always_wrong", "eval_size": 2}}
    changes = several(broken, **{"rollout.prompts_per_step": 4})
    with pytest.raises(RunFailed, match=r"step 1, broken: 4 of 4 .*environments\.broken\.max_failure_share allows 50%"):
        run(model, tmp_path / "run", changes)
    broken["broken"]["max_failure_share"] = 1.0
    run(model, tmp_path / "allowed", changes | {"steps": 1})


def test_eval_compares_by_environment(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = str(whole / "checkpoints" / "step_000002")
    words = ["eval", first, str(whole), "--recipe", str(whole / "config.yaml"), "--out", str(tmp_path / "eval.json")]
    assert run_command([*words, "evaluation.right_from=0.3"]) == 0
    shown = capsys.readouterr().out
    assert "accuracy in noise" in shown and "accuracy in talk" in shown and "mean of environments" in shown
    assert "accuracy counts every task once, the mean of environments every environment once" in shown
    found = json.loads((tmp_path / "eval.json").read_text())
    assert set(found["environments"]) == set(THREE)
    for of_model in found["models"]:
        each = of_model["environments"]
        assert {name: one["tasks"] for name, one in each.items()} == {"noise": 4, "exact": 2, "talk": 3}
        tasks = sum(one["tasks"] * one["accuracy"] for one in each.values()) / 9
        assert of_model["estimates"]["accuracy"]["mean"] == pytest.approx(tasks)
        plain = sum(one["accuracy"] for one in each.values()) / 3
        assert of_model["mean_of_environments"] == pytest.approx(plain)
    assert "accuracy in noise" in found["differences"][0]["estimates"]


def test_what_a_person_sees_names_each_environment(
    whole: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, tmp_path / "run", several(TWO, **{"steps": 1, "evaluation.every": 1, "logging.console": "plain"}))
    console = capsys.readouterr().out
    assert "  reward by environment  exact 0.000  noise 0." in console
    assert "  accuracy by environment  exact 0.000  noise 0.000" in console
    report = (whole / "report.html").read_text()
    assert "noise: reward" in report and "talk: held-out accuracy" in report
    assert "environment exact" in report and "weight 1" in report
    assert run_command(["rollouts", str(whole), "--task", "talk/", "--step", "1"]) == 0
    assert "talk/talk/" in capsys.readouterr().out


CHECKED: dict[str, Any] = {"environment": {}, "rollout.prompts_per_step": 2}


def check(model: Path, folder: Path, environments: Any, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `octetrl check` says, after its exit code."""
    tree = recipe_tree(model, folder / "run", CHECKED | {"environments": environments})
    (folder / "r.yaml").write_text(yaml.safe_dump(tree))
    code = run_command(["check", str(folder / "r.yaml"), *words])
    printed = capsys.readouterr()
    return f"{code} {printed.out}{printed.err}"


def test_check_rehearses_each(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = " ".join(check(model, tmp_path, THREE, capsys).split())
    assert said.startswith("0 ") and said.endswith("no problems")
    assert "environment noise jsonl" in said and "50.0% of the tasks, 4 tasks held out" in said
    assert "exact: reference answer reward 1" in said and "noise: prompts 64 tried" in said
    rare = " ".join(check(model, tmp_path, THREE, capsys, "environments.exact.weight=1e-9").split())
    assert "warning environments.exact.weight: 1e-09 of 3 gives 'exact' no task in" in rare
    assert "environment talk python" in said and "turns at most 16, rewarded by score" in said


def test_one_form_replaces_the_other_of_a_base_file(model: Path, tmp_path: Path) -> None:
    from octetrl.config.load import dump_recipe, load_recipe

    base = recipe_tree(model, tmp_path / "run")
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(base))
    (tmp_path / "several.yaml").write_text(yaml.safe_dump({"extends": "one.yaml", "environments": TWO}))
    back = {"extends": "several.yaml", "environment": base["environment"]}
    (tmp_path / "back.yaml").write_text(yaml.safe_dump(back))
    recipe = load_recipe(tmp_path / "several.yaml", ["environments.noise.kind=math"])
    assert recipe.environment == Recipe.model_fields["environment"].default
    assert recipe.environments["noise"].kind == "math" and recipe.environments["exact"].weight == 1.0
    assert load_recipe(tmp_path / "back.yaml") == load_recipe(tmp_path / "one.yaml")
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe


def test_environments_are_given_in_python(model: Path, tmp_path: Path) -> None:
    """Two lambdas, two lists: each environment has its own."""
    sums = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)]
    words = [{"prompt": f"Spell {n}.", "answer": "x"} for n in range(8)]
    fields = {name: value for name, value in recipe_tree(model, tmp_path / "run").items() if name != "environment"}
    finished = octetrl.train(
        **fields | {"output_dir": tmp_path / "run", "steps": 1},
        environments={
            "a": {"tasks": sums, "reward": lambda task, text: len(text) / 100, "eval_size": 2},
            "b-2": {"tasks": words, "reward": lambda task, text: -len(text) / 100, "eval_size": 2},
        },
    )
    rows = read_lines(tmp_path / "run" / "rollouts" / "step_000001.jsonl")
    for row in rows:
        assert row["reward"] == pytest.approx((1 if row["environment"] == "a" else -1) * len(row["text"]) / 100)
    assert {row["prompt"][:5] for row in rows if row["environment"] == "b-2"} == {"Spell"}
    assert finished.evaluate().by_environment["b-2"].tasks == 2
