"""`octetrl generate --input`: JSON lines in, JSON lines out, from a file or standard input."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from octetrl.cli.generate import conversation_lines, read_rows, result_lines
from octetrl.data.conversations import Dialogue, read_conversation
from octetrl.records import Completion, FinishReason
from octetrl.system.errors import UserError

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


def test_rows_come_from_a_file_or_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "1 + 1 =", "id": 7}, {"messages": MESSAGES}]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    (tmp_path / "rows.jsonl").write_text(text)
    path = str(tmp_path / "rows.jsonl")
    assert [row for row, _ in read_rows(path)] == rows
    assert [task.prompt for _, task in read_rows(path)] == ["1 + 1 =", tuple(MESSAGES)]
    assert [task.id for _, task in read_rows(path)] == [f"{path}:1", f"{path}:2"]
    for before in ("", "\ufeff"):
        monkeypatch.setattr("sys.stdin", io.StringIO(before + text))
        assert [row for row, _ in read_rows("-")] == rows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: it needs either 'prompt' or 'messages'"),
        ('{"text": "a"}', "line 1: it needs either 'prompt' or 'messages'"),
        ('{"prompt": 3}', "line 1: 'prompt' is a number"),
        ('{"prompt": "a", "n": 0}', "line 1: 'n' is 0, a whole number from 1 is needed"),
        ('{"prompt": "a", "n": 1000000000}', "line 1: 'n' is out of range; it must be at most 100,000"),
        ('{"prompt": "a", "n": true}', "line 1: 'n' is true, a whole number"),
        ('{"messages": []}', "line 1: 'messages' is an empty list"),
        ('{"messages": [{"role": "user"}]}', "line 1: 'messages', message 1: 'content' is null"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "part 1 is 'image'"),
        ('{"prompt": "a", "tools": 3}', "line 1: 'tools' is a number"),
        ('{"prompt": "a", "chat_template_kwargs": 3}', "line 1: 'chat_template_kwargs' is a number"),
        ("", "--input: there are no lines"),
    ],
)
def test_a_wrong_line_is_named(line: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(line))
    with pytest.raises(UserError) as error:
        read_rows("-")
    assert says in str(error.value)


def test_a_rows_own_values_of_our_keys_stay() -> None:
    said = [[Completion((1,), (-0.1,), "s", FinishReason.STOP, 0, "digest")]]
    row = {"prompt": "p", "completion": "mine", "own_completion": "older", "error": None, "tokens": 9}
    (line,) = map(json.loads, result_lines([row], said))
    ours = {"sample": 0, "completion": "s", "finish_reason": "stop", "tokens": 1}
    kept = {"own_completion": "older", "own_own_completion": "mine", "own_tokens": 9, "own_error": None}
    assert line == {"prompt": "p", **ours, **kept}
    (again,) = map(json.loads, result_lines([line], said))
    assert again["own_own_own_completion"] == "s" and again["own_own_completion"] == "mine"
    (line,) = map(json.loads, conversation_lines([{"prompt": "p", "answer": "a", "reference": "r", "n": 1}], said))
    assert line == {"prompt": "p", "answer": "s", "reference": "r", "own_reference": "a"}


def test_each_completion_is_a_line_with_the_rows_own_keys() -> None:
    def completion(text: str) -> Completion:
        return Completion((1, 2), (-0.1, -0.2), text, FinishReason.STOP, 0, "digest")

    rows: list[dict[str, Any]] = [{"prompt": "a", "id": 7}, {"prompt": "b"}]
    drawn = [[completion("x"), completion("y\n")], [completion("é")]]
    lines = list(result_lines(rows, drawn))
    assert not any("\n" in line for line in lines)
    ours = {"finish_reason": "stop", "tokens": 2}
    assert [json.loads(line) for line in lines] == [
        {"prompt": "a", "id": 7, "sample": 0, "completion": "x", **ours},
        {"prompt": "a", "id": 7, "sample": 1, "completion": "y\n", **ours},
        {"prompt": "b", "sample": 0, "completion": "é", **ours},
    ]


def test_a_row_has_what_a_datasets_row_has(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "chat_template_kwargs": {"x": 1}},
        {"messages": MESSAGES[:2], "tools": json.dumps([tool])},
        {"prompt": "a", "tools": [tool]},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_rows(str(tmp_path / "rows.jsonl"))
    assert [task.prompt for _, task in read] == ["a"] * 3  # an answer at the end is left out
    assert [task.tools for _, task in read] == [(), (tool,), (tool,)]
    assert read[0][1].chat_template_kwargs == {"x": 1}
    with pytest.raises(UserError, match=r"rows.jsonl:1: with --plain"):
        read_rows(str(tmp_path / "rows.jsonl"), plain=True)
    said = [[Completion((1,), (-0.1,), "s", FinishReason.STOP, 0, "digest")]] * 3
    for (_, task), line in zip(read, conversation_lines(rows, said), strict=True):
        example = read_conversation(json.loads(line), "here")
        assert isinstance(example, Dialogue)
        assert [message["content"] for message in example.messages] == ["a", "s"]
        assert (example.tools or ()) == task.tools
