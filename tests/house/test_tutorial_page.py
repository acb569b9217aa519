"""docs/tutorial.md quotes answers of its run, and its picture is drawn from the result."""

from __future__ import annotations

import json

from lab import tutorial
from tests.house.markdown import tables
from tests.house.tree import REPO

RESULT = REPO / "lab/results/tutorial_smollm2-135m-instruct_cpu.json"


def test_the_page_quotes_answers_of_the_run() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
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
    assert quoted == 5
    became = [one["after_reward"] - one["before_reward"] for one in result["answers"]]
    assert (became.count(1.0), became.count(-1.0), len(became)) == (17, 2, 64)
    below_zero = [one for one in result["answers"] if one["answer"].startswith("-")]
    assert below_zero and not any(one["before_reward"] or one["after_reward"] for one in below_zero)


def test_the_picture_is_drawn_from_the_result() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    assert tutorial.PICTURE.read_text(encoding="utf-8") == tutorial.draw(result["rows"])
