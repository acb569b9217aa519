"""JSONL files of tasks, and errors that say which line."""

from __future__ import annotations

from pathlib import Path

import pytest

from octetrl.config.errors import UserError
from octetrl.data.tasks import read_tasks
from octetrl.environments.base import Taskset
from octetrl.environments.jsonl import ExactScorer


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
        ('{"promt": "a"}', ":1: no 'prompt'; did you mean 'promt'?; the line has promt"),
        ("{}", ":1: no 'prompt'; the line has no keys"),
        ('{"prompt": " "}', ":1: 'prompt' is an empty string"),
        ('{"prompt": 3}', ":1: 'prompt' is a number"),
        ('{"prompt": "a", "answer": [1]}', ":1: 'answer' is a list"),
        ('{"prompt": "a", "answer": true}', ":1: 'answer' is a boolean"),
        ('{"prompt": "a", "id": 2}\n{"prompt": "b"}', ":2: id '2' is that of row 1 too"),
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
