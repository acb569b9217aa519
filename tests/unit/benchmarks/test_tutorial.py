"""The tutorial's figures from the folders of a run and of two evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tutorial
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.system.errors import UserError
from tests.house.markdown import tables
from tests.house.tree import REPO

FIELDS = dict.fromkeys(tutorial.STEP_FIELDS, 0.5)


def write(path: Path, objects: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


def answer(task: int, text: str) -> dict[str, Any]:
    right = {"prompt": f"{task} + 1 =", "answer": str(task + 1)}
    return {"task_id": f"t/{task}", **right, "text": text, "reward": float(text == right["answer"])}


def evaluated(folder: Path, step: int, answers: list[dict[str, Any]]) -> None:
    accuracy = sum(one["reward"] for one in answers) / len(answers)
    write(folder / "metrics.jsonl", [dict.fromkeys(tutorial.EVAL_FIELDS, accuracy) | {"step": step}])
    write(folder / "rollouts" / f"step_{step:06d}.jsonl", answers)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    recipe = load_recipe(REPO / "recipes/tutorial_smollm2-135m.yaml")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(dump_recipe(recipe))
    write(tmp_path / "run" / "metrics.jsonl", [{"step": step, **FIELDS} for step in (1, 2)])
    for step in (1, 2):
        write(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl", [answer(5, str(step))])
    evaluated(tmp_path / "before", 0, [answer(1, "2"), answer(2, "no | idea")])
    evaluated(tmp_path / "after", 2, [answer(1, "2"), answer(2, "3")])
    words = [str(tmp_path / "run")]
    for name in ("before", "after"):
        words += [f"--{name}", str(tmp_path / name)]
    return [*words, "--name", "x", "--out", str(tmp_path)]


def test_curve_and_answers(folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tutorial.main(folders) == 0
    result = json.loads((tmp_path / "tutorial_x.json").read_text())
    assert [(row["step"], row.get("eval/accuracy")) for row in result["rows"]] == [(0, 0.5), (1, None), (2, 1.0)]
    assert {(row["precision"], row["workload"]) for row in result["rows"]} == {("fp8_full", "64x16")}
    assert [(one["before"], one["after"]) for one in result["answers"]] == [("2", "2"), ("no | idea", "3")]
    assert [one["step"] for one in result["samples"]] == [1, 2]
    printed = capsys.readouterr().out
    assert "| 2 | 0.500 | 0.5 | 50.0% | 1.000 |" in printed
    assert "| 2 + 1 = | 3 | no \\| idea | 3 |" in printed and "| 1 + 1 =" not in printed


def test_other_tasks_are_refused(folders: list[str], tmp_path: Path) -> None:
    write(tmp_path / "after" / "rollouts" / "step_000002.jsonl", [answer(1, "2"), answer(7, "8")])
    with pytest.raises(UserError, match="different tasks"):
        tutorial.main(folders)


def test_a_missing_folder_is_one_line(folders: list[str], tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="does not exist"):
        tutorial.main(folders)


def test_the_page_quotes_answers_of_the_run() -> None:
    result = json.loads((REPO / "benchmarks/results/tutorial_smollm2-135m-instruct_cpu.json").read_text())
    question = "State the final answer to the following arithmetic problem: "
    answers = {
        (one["prompt"].removeprefix(question), one["answer"]): (one["before"], one["after"])
        for one in result["answers"]
    }
    sampled = {
        (str(one["step"]), one["prompt"].removeprefix(question), one["answer"], one["text"])
        for one in result["samples"]
    }
    quoted = 0
    for table in tables((REPO / "docs/tutorial.md").read_text(encoding="utf-8")):
        for row in table.rows:
            if table.header[0] == "task":
                assert answers[row[0], row[1]][: len(row) - 2] == tuple(row[2:])
            elif "task" in table.header:
                assert tuple(row) in sampled
            quoted += "task" in table.header
    assert quoted == 16
    became = [one["after_reward"] - one["before_reward"] for one in result["answers"]]
    assert (became.count(1.0), became.count(-1.0), len(became)) == (17, 2, 64)
    below_zero = [one for one in result["answers"] if one["answer"].startswith("-")]
    assert below_zero and not any(one["before_reward"] or one["after_reward"] for one in below_zero)


def test_the_picture_is_drawn_from_the_result() -> None:
    result = json.loads((REPO / "benchmarks/results/tutorial_smollm2-135m-instruct_cpu.json").read_text())
    assert tutorial.PICTURE.read_text(encoding="utf-8") == tutorial.draw(result["rows"])
