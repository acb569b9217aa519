"""Read files of tasks, in any format that data/rows.py reads, with errors that name file and row.

A row is an object: {"prompt": "...", "answer": "..."}. `answer` may be missing. A number is converted to text. `id` is
optional (default: the row's number). All other keys go to the scorer in `task.metadata`. Empty lines are skipped.

A prompt may be a list of messages, whose next answer is the policy's; `messages` is another name of it, and an answer
of the assistant at its end is left out. `tools` and `chat_template_kwargs` of a row go to the chat template. verl's
`reward_model.ground_truth` is the answer of a row without `answer`.

`columns` maps our keys to other keys of a file. A dot selects a key inside an object. `temperature` and `group_size` of
a task's training answers are only read where `columns` names their keys: data may have such keys for another purpose.
If the answer's column has a solution that ends with the answer, `reference_marker` is the text between them:

    GSM8K      {"question": "...", "answer": "... #### 72"}      prompt: question; reference_marker "####"
    MATH       {"problem": "...", "solution": "... \\boxed{3}"}   prompt: problem, answer: solution (math finds the box)
    DAPO       {"prompt": [{"role": "user", "content": "..."}], "reward_model": {"ground_truth": "34"}}
                                                                 nothing to map
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from octetrl.data.conversations import VARIABLES
from octetrl.data.rows import Row, find_value, read_rows, required_text, without_padding
from octetrl.environments.prompts import (
    read_group_size,
    read_messages,
    read_prompt,
    read_temperature,
    read_tools,
    read_variables,
    with_prompt_template,
)
from octetrl.environments.rewards import extract_answer
from octetrl.records import Prompt, Task
from octetrl.system.errors import UserError, nearest
from octetrl.system.json_file import kind_of

OF_THE_TEMPLATE = ("prompt", "messages", "tools", VARIABLES)
SAMPLING = ("temperature", "group_size")  # of a task's training answers
Columns = Mapping[Literal["prompt", "answer", "id", "temperature", "group_size"], str]
AnswerProblems = Callable[[Sequence[str | None]], Sequence[str | None]]


def read_tasks(
    path: str | Path,
    prompt_template: str = "{prompt}",
    *,
    columns: Columns = MappingProxyType({}),
    reference_marker: str | None = None,
    split: str = "train",
    subset: str | None = None,
    answer_problems: AnswerProblems | None = None,
) -> list[Task]:
    """Read the tasks of a file, in order. `{prompt}` in the template stands for a row's prompt.

    split, subset: of a Hugging Face data set. answer_problems: what is wrong with each answer, None if nothing is.
    Raises UserError that names the file, and the row if one is invalid.
    """
    rows = read_rows(path, split=split, subset=subset)
    return make_tasks(
        rows, prompt_template, columns=columns, reference_marker=reference_marker, answer_problems=answer_problems
    )


def make_tasks(
    rows: Iterable[Row],
    prompt_template: str = "{prompt}",
    *,
    columns: Columns = MappingProxyType({}),
    reference_marker: str | None = None,
    answer_problems: AnswerProblems | None = None,
) -> list[Task]:
    """Convert rows to tasks, as `read_tasks` does. Raises UserError that names the row's place."""
    tasks: list[Task] = []
    row_of_id: dict[str, int] = {}
    places: list[str] = []
    taken = {columns.get(key, key) for key in ("prompt", "answer", "id")}
    taken |= {theirs for ours, theirs in columns.items() if ours in SAMPLING}
    for number, where, record, is_padded in rows:
        row = dict(record)
        for ours, theirs in columns.items():
            row[ours] = _at(record, theirs, where)
        if is_padded:  # a key of other rows is there with null
            row |= {key: without_padding(row[key]) for key in OF_THE_TEMPLATE if key in row}
            row = {key: value for key, value in row.items() if value is not None or key not in OF_THE_TEMPLATE}
        if row.get("answer") is None and isinstance(row.get("reward_model"), Mapping):
            row["answer"] = row["reward_model"].get("ground_truth")
        used = taken if "prompt" in row else taken | {"messages"}
        task_id = str(number if row.get("id") is None else row["id"])
        if task_id in row_of_id:
            raise UserError(f"{where}: id '{task_id}' is also the id of row {row_of_id[task_id]}; ids must differ")
        row_of_id[task_id] = number
        places.append(where)
        tasks.append(
            Task(
                id=task_id,
                prompt=with_prompt_template(row_prompt(row, where), prompt_template),
                answer=_reference(row.get("answer"), reference_marker, where),
                metadata={key: value for key, value in record.items() if key not in used},
                tools=read_tools(row.get("tools"), f"{where}: 'tools'"),
                chat_template_kwargs=read_variables(row.get(VARIABLES), f"{where}: '{VARIABLES}'"),
                **_own_sampling(row, columns, where),
            )
        )
    wrong = [] if answer_problems is None else answer_problems([task.answer for task in tasks])
    problems = [(where, problem) for where, problem in zip(places, wrong, strict=False) if problem is not None]
    if problems:
        more = f" (and in {len(problems) - 1:,} more rows: {_places(problems[1:])})" if problems[1:] else ""
        raise UserError(f"{problems[0][0]}: {problems[0][1]}{more}")
    return tasks


def _places(problems: Sequence[tuple[str, str]]) -> str:
    numbers = [re.split(r"\D", where)[-1] for where, _ in problems]
    return ", ".join(numbers[:20]) + (", ..." if len(numbers) > 20 else "")


def _at(record: Mapping[str, Any], column: str, where: str) -> Any:
    """Return the value of `record` at `column`, with dots for keys inside objects."""
    try:
        return find_value(record, column)
    except KeyError:
        known: Any = record
        for key in column.split("."):
            if not isinstance(known, Mapping) or key not in known:
                break
            known = known[key]
        known = known if isinstance(known, Mapping) else {}
        hint = f"{nearest(key, known)}; the keys are {', '.join(known) or 'none'}"
        raise UserError(f"{where}: there is no '{column}', which environment.columns names{hint}") from None


def row_prompt(row: Mapping[str, Any], where: str) -> Prompt:
    """The row's `prompt`, or its `messages` without the assistant's answer at their end."""
    messages = row.get("messages") if "prompt" not in row else None
    if messages is None:
        if not isinstance(row.get("prompt"), list):
            return required_text(row, "prompt", where)
        return read_prompt(row["prompt"], f"{where}: 'prompt'")
    read = read_messages(messages, f"{where}: 'messages'")
    return read_prompt(read[:-1] if read[-1]["role"] == "assistant" else read, f"{where}: 'messages'")


def _own_sampling(row: Mapping[str, Any], columns: Columns, where: str) -> dict[str, Any]:
    """Temperature and group size of the row, where `columns` has them."""
    readers: dict[str, Callable[[object, str], Any]] = {"temperature": read_temperature, "group_size": read_group_size}
    return {
        ours: readers[ours](row[ours], f"{where}: '{theirs}'") for ours, theirs in columns.items() if ours in readers
    }


def _reference(answer: object, marker: str | None, where: str) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal | None):
        raise UserError(f"{where}: 'answer' is {kind_of(answer)}; it must be a string or a number")
    text = answer if isinstance(answer, str | None) else _number_text(answer)
    if text is None or marker is None:
        return text
    reference = extract_answer(text, marker)
    if not reference:
        raise UserError(f"{where}: 'answer' has no text after environment.reference_marker '{marker}'; correct the row")
    return reference


def _number_text(number: int | float | Decimal) -> str | None:
    """The digits of a number of JSON or Parquet: 0.00001 and not 1e-05, and 3 for the 3.0 of a whole number in a column
    that has nulls. None for NaN and infinities, which stand for no number."""
    if isinstance(number, int):
        return str(number)
    if not math.isfinite(number):
        return None
    if -1e50 < number < 1e50 and number == int(number):
        return str(int(number))
    digits = format(Decimal(str(number)), "f")
    return digits if len(digits) <= 50 else str(number)
