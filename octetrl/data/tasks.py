"""JSONL files of tasks, read with errors that name file and line.

A line is an object: {"prompt": "...", "answer": "..."}. `answer` may be missing, or a number, which is taken
as its text. `id` is optional (default: the line number). Every other key goes to the scorer in
`task.metadata`. Empty lines are skipped. The whole file is read and checked at once, so that line 90,000
fails before the run begins, not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octetrl.config.errors import UserError, nearest
from octetrl.records import Task


def read_tasks(path: str | Path, prompt_template: str = "{prompt}") -> list[Task]:
    """The tasks of a JSONL file, in its order; `{prompt}` in the template stands for a line's prompt.

    Raises UserError naming the file, and the line where one is wrong.
    """
    tasks: list[Task] = []
    line_of_id: dict[str, int] = {}
    for number, record in read_jsonl(path):
        where = f"{path}:{number}"
        prompt = required_text(record, "prompt", where)
        answer = record.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
            raise UserError(f"{where}: 'answer' is {_kind(answer)}; it must be a string or a number")
        task_id = str(record.get("id", number))
        if task_id in line_of_id:
            raise UserError(f"{where}: id '{task_id}' is that of line {line_of_id[task_id]} too; ids must differ")
        line_of_id[task_id] = number
        tasks.append(
            Task(
                id=task_id,
                prompt=prompt_template.replace("{prompt}", prompt),
                answer=None if answer is None else str(answer),
                metadata={key: value for key, value in record.items() if key not in ("prompt", "answer", "id")},
            )
        )
    return tasks


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) for each line that is not empty.

    Raises UserError for a file that is missing, empty or not UTF-8, and for a line that is not a JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; give the path of a JSONL file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); convert it to UTF-8") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror}); give the path of a JSONL file") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UserError(f'{path}: the file is empty; it needs one object a line, as {{"prompt": ..., "answer": ...}}')
    for number, line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}:{number}: not JSON ({error.msg} at column {error.colno}); each line is one JSON object"
            ) from error
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: {_kind(record)}, not an object; each line is one JSON object")
        yield number, record


def required_text(record: dict[str, Any], key: str, where: str) -> str:
    """`record[key]`, a string with something in it, or a UserError that says `where`."""
    if key not in record:
        raise UserError(f"{where}: no '{key}'{nearest(key, record)}; the line has {', '.join(record) or 'no keys'}")
    value = record[key]
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: '{key}' is {_kind(value)}; it must be a string that is not empty")
    return value


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), "an empty string")
