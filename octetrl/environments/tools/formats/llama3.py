"""Llama 3's JSON: {"name": ..., "parameters": {...}} and nothing else, or several separated by ";", or after
<|python_tag|>, with text before that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octetrl.environments.tools.formats.reading import (
    THINK,
    UNTHINK,
    Call,
    ParsedMessage,
    ToolFormat,
    Unreadable,
    draft_of,
    join,
    read_json,
    skip_blanks,
)

_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class Llama3(ToolFormat):
    def parse(self, text: str, tools: Sequence[Any] = ()) -> ParsedMessage:
        thoughts, rest = _split_thoughts(text)
        before, after = "", rest
        calls: list[Call] = []
        if rest.lstrip().startswith("{"):  # first of all, for the tag may stand in an argument
            calls, after = self._read_series(rest, has_tag=False)
        if not calls and _PYTHON_TAG in rest:
            before, _, body = rest.partition(_PYTHON_TAG)
            calls, after = self._read_series(body, has_tag=True)
        return self.message(join(f"{thoughts}{before}", after), calls) if calls else ParsedMessage(text.strip())

    def _read_series(self, body: str, *, has_tag: bool) -> tuple[list[Call], str]:
        """Objects separated by ";" and blanks, as far as they are meant as calls, and what comes after them. After a
        tag the first is meant as one whatever it is; elsewhere its keys must say so."""
        calls: list[Call] = []
        position = skip_blanks(body, 0)
        while position < len(body) or (has_tag and not calls):
            try:
                value, end = read_json(body, position)
            except Unreadable as error:
                if '"name"' not in body[position:] and (calls or not has_tag):
                    break
                return [*calls, self.malformed(body[position:], error)], ""
            if not _names_a_call(value) and (calls or not has_tag):
                break
            calls.append(self.call(draft_of(value, "parameters"), body[position:end]))
            position = skip_blanks(body, end)
            if body.startswith(";", position):
                position = skip_blanks(body, position + 1)
        return calls, body[position:]


def _names_a_call(value: Any) -> bool:
    return isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)


def _split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts at the beginning, the rest). A brace or tag before them shows that they are something else."""
    opened = text.lstrip().startswith(THINK)
    if not opened and text.lstrip().startswith(("{", _PYTHON_TAG)):
        return "", text
    thoughts, end, rest = text.partition(UNTHINK)
    if end:
        return thoughts + end, rest
    return (text, "") if opened else ("", text)


LLAMA3 = Llama3(
    "llama3_json",
    '{"name": <tool name>, "parameters": <JSON object>}',
    (_PYTHON_TAG, "{"),
    arguments_key="parameters",
)
