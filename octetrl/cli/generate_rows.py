"""Prompts from a file or standard input, and completions as JSON lines: `octetrl generate MODEL --input FILE`.

    {"prompt": "1 + 1 ="}                                     in: the user's message, or the text itself with --plain
    {"messages": [{"role": "user", "content": "Hi"}]}         in: a conversation that the model continues
    {"prompt": "1 + 1 =", "n": 4}                             in: 4 completions of this row, whatever --n says
    {"prompt": ..., "sample": 0, "completion": ..., "finish_reason": "stop", "tokens": 7}     out, for each completion
    {"prompt": ..., "answer": ...} or {"messages": [...]}     out with --for-sft, as algorithm.conversations reads it

All other keys of a row are written to its lines unchanged; its own value of a key that we write becomes `own_KEY`. A
completion that a server did not give has finish_reason "failed" and the reason as `error`. With --for-sft only answers
that ended and have a text are written, and a row's own `answer`, the reference of a task, becomes `reference`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octetrl.config.limits import MOST_COMPLETIONS
from octetrl.data.rows import read_jsonl
from octetrl.records import Completion, FinishReason
from octetrl.system.errors import UserError
from octetrl.system.json_file import kind_of, parse_json

STDIN = "-"
REMEDY = 'a line is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
OURS = ("sample", "completion", "finish_reason", "tokens", "error")

Row = dict[str, Any]
Prompt = str | list[dict[str, str]]


def read_rows(path: str) -> list[Row]:
    """The rows of a JSONL file, or of standard input for `-`. Raises UserError for a line of another form."""
    lines = _stdin_rows() if path == STDIN else ((f"{path}:{number}", row) for number, row in read_jsonl(path))
    rows = [_checked(row, where) for where, row in lines]
    if not rows:
        raise UserError(f"--input: there are no lines; {REMEDY}")
    return rows


def prompt_of(row: Row) -> Prompt:
    prompt: Prompt = row["prompt"] if "prompt" in row else row["messages"]
    return prompt


def result_lines(rows: Sequence[Row], completions: Sequence[Sequence[Completion]]) -> Iterator[str]:
    """A JSON line for each completion, in the order of the rows."""
    for row, siblings in zip(rows, completions, strict=True):
        for sample, completion in enumerate(siblings):
            values = (sample, completion.text, str(completion.finish_reason), len(completion.token_ids))
            error = {} if completion.detail is None else {"error": completion.detail}
            kept = _renamed(row, {key: f"own_{key}" for key in OURS})
            yield json.dumps(kept | dict(zip(OURS, values, strict=False)) | error, ensure_ascii=False)


def is_empty(completion: Completion) -> bool:
    """Whether it ended without a text, from which nothing can be learnt."""
    return completion.finish_reason is FinishReason.STOP and not completion.text.strip()


def conversation_lines(rows: Sequence[Row], completions: Sequence[Sequence[Completion]]) -> Iterator[str]:
    """A JSON line for each completion that ended and has a text, with the prompt, for `algorithm.conversations`."""
    for row, siblings in zip(rows, completions, strict=True):
        kept = _renamed({key: value for key, value in row.items() if key != "n"}, {"answer": "reference"})
        for completion in siblings:
            if completion.finish_reason is not FinishReason.STOP or is_empty(completion):
                continue
            if "prompt" in kept:
                said: Row = {"prompt": kept["prompt"], "answer": completion.text}
            else:
                said = {"messages": [*kept["messages"], {"role": "assistant", "content": completion.text}]}
            yield json.dumps(kept | said, ensure_ascii=False)


def _renamed(row: Row, names: Mapping[str, str]) -> Row:
    """The row with other names for some keys; a name that the row has already is preceded by `own_`."""
    kept = {key: value for key, value in row.items() if key not in names}
    for key, name in names.items():
        if key in row:
            while name in kept or name in names:
                name = f"own_{name}"
            kept[name] = row[key]
    return kept


def _stdin_rows() -> Iterator[tuple[str, Any]]:
    for number, text in enumerate(sys.stdin, start=1):
        line = text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark, as in a file
        if line.strip():
            where = f"standard input, line {number}"
            yield where, parse_json(line, where, REMEDY)


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise UserError(f"{where}: it needs either 'prompt' or 'messages'; {REMEDY}")
    messages = row.get("messages", [])
    if "prompt" in row and not isinstance(row["prompt"], str):
        raise UserError(f"{where}: 'prompt' is {kind_of(row['prompt'])}, a text is needed; {REMEDY}")
    if "messages" in row and (not isinstance(messages, list) or not messages or not all(map(_is_message, messages))):
        raise UserError(f"{where}: 'messages' is no list of messages with role and content{_parts(messages)}; {REMEDY}")
    if "n" in row and (not isinstance(row["n"], int) or isinstance(row["n"], bool) or row["n"] < 1):
        raise UserError(
            f"{where}: 'n' is {json.dumps(row['n'])}, a whole number from 1 is needed; it is how often to"
            " complete this row"
        )
    if row.get("n", 1) > MOST_COMPLETIONS:
        raise UserError(
            f"{where}: 'n' is out of range; it must be at most {MOST_COMPLETIONS:,}, or write the row several times"
        )
    return row


def _parts(messages: object) -> str:
    has_parts = isinstance(messages, list) and any(
        isinstance(one, dict) and isinstance(one.get("content"), list) for one in messages
    )
    return " (one has a list of parts; only text is read, so give it as a string)" if has_parts else ""


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
