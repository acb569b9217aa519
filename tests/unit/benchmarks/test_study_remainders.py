"""The second family of tasks of the study: its results against Python's arithmetic, and a start from its examples."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.study import job, runs, table
from benchmarks.study.arms import TABLES
from benchmarks.study.remainders import Remainders, bare_answer, make_task, worked_answer
from octetrl.run import demo
from tests.house.figures import check_table
from tests.house.markdown import tables
from tests.unit.benchmarks.test_study_runs import line_of

TASKS = [make_task(index) for index in range(300)]
SCORE = Remainders().score


def by_python(prompt: str) -> str:
    """The last digit of the whole calculation in parentheses from the left: keeping last digits does not change it."""
    first, *rest = prompt.removeprefix("Last digits: ").removesuffix(" =").split()
    expression = first
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        expression = f"({expression}{sign}{number})"
    return str(eval(expression) % 10)


def test_answers_are_those_of_python() -> None:
    for task in TASKS:
        assert task.answer == by_python(task.prompt)
        assert SCORE(task, bare_answer(task)) == SCORE(task, f"{worked_answer(task)}\n") == 1.0
    assert {task.answer for task in TASKS} == set("0123456789") and len({task.prompt for task in TASKS}) == 300
    assert make_task(7) == TASKS[7] == Remainders().tasks[7]


def test_worked_steps_lead_from_the_prompt_to_the_answer() -> None:
    for task in TASKS:
        steps, _, said = worked_answer(task).partition(" #### ")
        assert said == task.answer
        held, asked = None, task.prompt.removeprefix("Last digits: ")
        for step in steps.split(", "):
            found = re.fullmatch(r"(\d) ([-+*]) (\d) = (\d)", step)
            assert found is not None and held in (None, found[1])
            assert by_python(f"Last digits: {found[1]} {found[2]} {found[3]} =") == found[4]
            assert f"{found[2]} {found[3]}" in asked
            held = found[4]
        assert held == task.answer and len(steps.split(", ")) == len(re.findall("[-+*]", asked)) >= 7


@pytest.mark.parametrize(
    "answer", ["", "####", "2", "#### {wrong}", "{right} #### {wrong}", "#### {right} or {wrong}", "#### 1{right}"]
)
def test_what_is_wrong(answer: str) -> None:
    right = str(TASKS[0].answer)
    assert SCORE(TASKS[0], answer.format(right=right, wrong=(int(right) + 1) % 10)) == 0.0


def test_a_start_and_an_arm_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "NUM_EXAMPLES", 100)
    seen, save = list[str](), demo.save_tokenizer

    def noted(texts: list[str], *more: Any, **given: Any) -> Any:
        seen.extend(texts)
        return save(texts, *more, **given)

    monkeypatch.setattr(demo, "save_tokenizer", noted)
    small = ["cluster.device=cpu", "cluster.cpu_threads=1", "environment.eval_size=4"]
    job.main([str(tmp_path), "tiny-remainders", "start", "3", *small, "algorithm.batch_size=4", "steps=2"])
    worked = [text for text in seen if "= #### " not in text and re.search(r"=\d", text)]
    assert len(seen) == 100 and all(text.startswith("Last digits: ") for text in seen) and 15 < len(worked) < 45
    assert runs.Plan(tmp_path, [], 1.0).is_complete(runs.Job("tiny-remainders", job.START, 3))
    few = ["rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "steps=1"]
    few += ["engine.kv_cache_tokens=2048", "failures.max_empty_steps=0"]
    job.main([str(tmp_path), "tiny-remainders", "bf16", "3", *small, *few])
    line = json.loads(job.line_path(tmp_path, "tiny-remainders", "bf16", 3).read_text())
    assert line["status"] == "complete" and line["steps"] == 1 and line["start/accuracy"] == 0.0


def test_tables_of_two_families_stand_beside_one_another(tmp_path: Path) -> None:
    names = ("tiny-sums", "tiny-remainders")
    document = tmp_path / "study.md"
    document.write_text("".join(f"<!-- study: {name} -->\n<!-- study: end -->\n" for name in names))
    for name, end in zip(names, (0.8, 0.6), strict=True):
        for arm in ("bf16", "fp8"):
            for seed in range(4):
                line = line_of(arm, seed, end + 0.01 * seed) | {"table": name}
                job.write_line(job.line_path(tmp_path, name, arm, seed), line)
        table.main(f"{name} --state {tmp_path} --out {tmp_path} --pictures {tmp_path} --document {document}".split())
    for shown, name in zip(tables(document.read_text()), names, strict=True):
        record = json.loads((tmp_path / f"study_{name}.json").read_text())
        assert shown.marker == f"benchmarks/results/study_{name}.json" and len(record["lines"]) == 8
        check_table(shown, record["rows"])


def test_the_families_differ_in_their_tasks_and_starts_alone() -> None:
    sums, other = TABLES["tiny-sums"], TABLES["tiny-remainders"]
    assert (sums.kind, sums.layers, sums.recipe, sums.steps) == (other.kind, other.layers, other.recipe, other.steps)
    assert other.common[: len(sums.common)] == sums.common and set(other.arms) < set(sums.arms)
    assert all(
        change.startswith("environment.") for change in (*other.common[len(sums.common) :], *other.start_changes)
    )
