"""JSONL files of tasks, and errors that say which line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.errors import UserError
from octetrl.data.tasks import read_tasks
from octetrl.environments.base import Taskset
from octetrl.environments.jsonl import ExactScorer
from octetrl.environments.math_answers import MathScorer


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "tasks.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_becomes_tasks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '\ufeff{"prompt": "1 + 2 {x}", "answer": 3, "level": "easy"}\r\n\n'
        '{"prompt": "caf\u00e9\u2028?", "answer": "oui", "id": "french"}\n{"prompt": "Say hello."}',
    )
    first, second, third = read_tasks(path, "Q: {prompt}")
    assert (first.id, first.prompt, first.answer, first.metadata) == ("1", "Q: 1 + 2 {x}", "3", {"level": "easy"})
    assert (second.id, second.prompt, second.answer) == ("french", "Q: café\u2028?", "oui")
    assert (third.id, third.answer) == ("4", None)


def test_tasks_of_a_file_are_drawn_and_scored(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(f'{{"prompt": "say {n}", "answer": {n}}}\n' for n in range(10)))
    task = Taskset(read_tasks(path), eval_size=3, seed=0).next_batch(1)[0]
    assert ExactScorer()(task, str(task.answer)) == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ('{"prompt": "a"}\n{"prompt": }', ":2: not JSON (Expecting value at column 12)"),
        ("[1]", ":1: a list, not an object"),
        ('{"promt": "a"}', ":1: no 'prompt'; 'promt' is not read; did you mean 'prompt'?"),
        ('{"text": "a", "answer": 1}', ":1: no 'prompt'; the line has text, answer"),
        ("{}", ":1: no 'prompt'; the line has no keys"),
        ('{"prompt": " "}', ":1: 'prompt' is an empty string"),
        ('{"prompt": 3}', ":1: 'prompt' is a number"),
        ('{"prompt": []}', ":1: 'prompt' is a list of messages (empty)"),
        ('{"prompt": [{"role": "user", "content": 3}]}', ":1: 'prompt' is a number"),
        ('{"prompt": [{"role": "system", "content": "a"}, "b"]}', ":1: 'prompt' is a list of messages (system, None);"),
        ('{"prompt": "a", "answer": [1]}', ":1: 'answer' is a list"),
        ('{"prompt": "a", "answer": true}', ":1: 'answer' is a boolean"),
        ('{"prompt": "a", "id": 2}\n{"prompt": "b"}', ":2: id '2' is also the id of row 1"),
        (b'{"prompt": "\xff"}', "not UTF-8 text (byte 12)"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_tasks(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_tasks(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="datasets"):
        read_tasks(tmp_path)


GSM8K = {"question": "How many eggs?", "answer": "16 - 3 = <<16-3=13>>13\n#### 1,013"}
MATH = {"problem": "Half of $3$?", "level": "Level 1", "solution": "It is $3/2$, so \\boxed{\\frac{3}{2}}."}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve it."}],
    "reward_model": {"ground_truth": "34", "style": "rule"},
    "extra_info": {"index": "9a9b"},
}


@pytest.mark.parametrize(
    ("row", "options", "prompt", "answer", "right", "metadata"),
    [
        (GSM8K, {"columns": {"prompt": "question"}, "reference_marker": "####"}, "How many", "1,013", "1013", []),
        (MATH, {"columns": {"prompt": "problem", "answer": "solution"}}, "Half of", None, "1.5", ["level"]),
        (
            DAPO,
            {"columns": {"answer": "reward_model.ground_truth", "id": "extra_info.index"}},
            "Solve it.",
            "34",
            "$34.0$",
            ["data_source", "reward_model", "extra_info"],
        ),
    ],
)
def test_files_of_other_keys_are_read_and_scored(
    tmp_path: Path, row: Any, options: Any, prompt: str, answer: str | None, right: str, metadata: list[str]
) -> None:
    (task,) = read_tasks(write(tmp_path, json.dumps(row)), **options)
    assert task.prompt.startswith(prompt) and list(task.metadata) == metadata
    assert answer is None or task.answer == answer
    assert task.id == ("9a9b" if "id" in options["columns"] else "1")
    assert [MathScorer("####")(task, f"so #### {said}") for said in (right, "77")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"columns": {"prompt": "quesion"}},
            ":1: there is no 'quesion', which environment.columns names; did you mean",
        ),
        ({"columns": {"prompt": "question", "answer": "answer.text"}}, "no 'answer.text', which environment.columns"),
        (
            {"columns": {"prompt": "question"}, "reference_marker": "The answer:"},
            "no text after environment.reference_marker 'The answer:'",
        ),
    ],
)
def test_a_row_that_lacks_a_column_is_named(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_tasks(write(tmp_path, json.dumps(GSM8K)), **options)
    assert message in str(caught.value) and "\n" not in str(caught.value)
