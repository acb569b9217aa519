"""Files of tasks (any that data/rows.py reads), with errors that name file and row.

A row is an object: {"prompt": "...", "answer": "..."}. `answer` may be missing, or a number, which is taken
as its text. `id` is optional (default: the row's number). Every other key goes to the scorer in
`task.metadata`. Empty lines are skipped.
"""

from __future__ import annotations

from pathlib import Path

from octetrl.config.errors import UserError
from octetrl.data.rows import kind_of, read_rows, required_text
from octetrl.records import Task


def read_tasks(path: str | Path, prompt_template: str = "{prompt}") -> list[Task]:
    """The tasks of a file, in its order; `{prompt}` in the template stands for a line's prompt.

    Raises UserError naming the file, and the line where one is wrong.
    """
    tasks: list[Task] = []
    row_of_id: dict[str, int] = {}
    for number, where, record in read_rows(path):
        prompt = required_text(record, "prompt", where)
        answer = record.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
            raise UserError(f"{where}: 'answer' is {kind_of(answer)}; it must be a string or a number")
        task_id = str(record.get("id", number))
        if task_id in row_of_id:
            raise UserError(f"{where}: id '{task_id}' is that of row {row_of_id[task_id]} too; ids must differ")
        row_of_id[task_id] = number
        tasks.append(
            Task(
                id=task_id,
                prompt=prompt_template.replace("{prompt}", prompt),
                answer=None if answer is None else str(answer),
                metadata={key: value for key, value in record.items() if key not in ("prompt", "answer", "id")},
            )
        )
    return tasks
