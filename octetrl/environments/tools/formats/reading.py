"""What every format of tool calls shares: the records, JSON that never raises anything else, and values typed by a
tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Literal

from octetrl.system.json_file import kind_of

THINK, UNTHINK = "<think>", "</think>"
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be read. The tool may be unknown, and the arguments may be wrong."""

    id: str  # unique within a parsed message
    name: str
    arguments: Mapping[str, Any]  # as decoded from JSON


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A text that was meant as a call and can't be read."""

    text: str  # as the policy wrote it
    error: str  # one line for the policy: what is wrong and what is expected


Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    content: str  # the text outside calls, including thoughts, stripped of white space
    calls: tuple[Call, ...] = ()


class Unreadable(ValueError):
    """Why a call can't be read, in words for the policy."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A call without its place in the message. id: the policy's own, if its format has ids."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """One way of writing tool calls.

    form: of a call, shown to the policy. marks: texts that a tokenizer may have as special tokens, and that decoding
    keeps; None: all special tokens. openings: texts that may begin a call; "": nothing is shown before the message is
    complete. ends: tokens that end an answer besides EOS. names_calls: whether templates write a call's name or id with
    its result, or refuse results without calls. ids: what a server's client sees as a call's id, because templates
    write it again: any text, the policy's own, or nine letters. arguments_key: of the JSON object that is a call; None:
    a call is no JSON object, and can't be demanded.
    """

    name: str
    form: str
    openings: tuple[str, ...]
    marks: tuple[str, ...] | None = ()
    ends: tuple[str, ...] = ()
    names_calls: bool = False
    ids: Literal["any", "own", "nine"] = "any"
    arguments_key: str | None = None

    def parse(self, text: str, tools: Sequence[Any] = ()) -> ParsedMessage:
        """Content and calls of one message of the policy. tools: schemas, by which formats without JSON type values."""
        raise NotImplementedError

    def call_id(self, index: int) -> str:
        return f"call{index:05d}" if self.ids == "nine" else f"call_{index}"

    def malformed(self, text: str, error: object) -> MalformedCall:
        return MalformedCall(text.strip(), f"the tool call can't be read: {error}. Write {self.form}")

    def call(self, draft: Draft | str, text: str) -> Call:
        """A call with the policy's own id. draft: a text says why it can't be read."""
        return (
            self.malformed(text, draft) if isinstance(draft, str) else ToolCall(draft.id, draft.name, draft.arguments)
        )

    def message(self, content: str, calls: Sequence[Call]) -> ParsedMessage:
        """The message with an id for each call that has none, or that of one before it."""
        used: set[str] = set()
        named: list[Call] = []
        for place, call in enumerate(calls):
            if isinstance(call, ToolCall):
                candidates = chain([call.id], map(self.call_id, count(place)))
                call = replace(call, id=next(id for id in candidates if id and id not in used))
                used.add(call.id)
            named.append(call)
        return ParsedMessage(content, tuple(named))


def join(*pieces: str) -> str:
    """The pieces of a message's content."""
    return "\n".join(filter(None, (piece.strip() for piece in pieces)))


def draft_of(value: Any, key: str) -> Draft | str:
    """A call of what JSON gave, with its arguments at `key` or its other name, or why it is none."""
    if not isinstance(value, dict):
        return f"it is {kind_of(value)}, not an object"
    other = "parameters" if key == "arguments" else "arguments"
    name, arguments = value.get("name"), value.get(key, value.get(other))
    if isinstance(arguments, str):
        try:
            inner, end = read_json(arguments, 0)
            arguments = arguments if arguments[end:].strip() else inner
        except Unreadable:
            pass
    if not isinstance(name, str) or not name:
        return f'"name" is {kind_of(name)}, not the name of a tool' if "name" in value else 'it has no "name"'
    if isinstance(arguments, dict):
        return Draft(name, arguments)
    return f'it has no "{key}"' if arguments is None else f'"{key}" is {kind_of(arguments)}, not an object'


def read_arguments(text: str, start: int) -> tuple[dict[str, Any], int]:
    """(the JSON object at `start`, its end). Raises Unreadable."""
    value, end = read_json(text, start)
    if not isinstance(value, dict):
        raise Unreadable(f"its arguments are {kind_of(value)}, not an object")
    return value, end


def _no_constant(word: str) -> Any:
    raise Unreadable(f"{word} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Unreadable(f"{digits[:_SHOWN]} is too large a number")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)


def read_json(text: str, start: int) -> tuple[Any, int]:
    """(value, its end) of the JSON at `start`, blanks before it skipped. Raises Unreadable."""
    begin = skip_blanks(text, start)
    if begin == len(text):
        raise Unreadable("it is empty")
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON ({error.msg} at {shown(text[error.pos :])})") from None
    except UnicodeEncodeError:
        raise Unreadable("a string in it holds half of a surrogate pair") from None
    except Unreadable:
        raise
    except (ValueError, RecursionError):  # more digits, or deeper, than Python reads
        raise Unreadable("it holds too long a number, or is nested too deeply") from None
    return value, end


def skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def shown(text: str) -> str:
    line = " ".join(text[: 2 * _SHOWN].split())
    return f"'{line[:_SHOWN]}'" if line else "its end"


_WORDS = {"True": True, "False": False, "None": None}  # as jinja prints values that are not text
_KINDS: tuple[tuple[str, type | tuple[type, ...]], ...] = (
    ("boolean", bool),
    ("integer", int),
    ("number", (int, float)),
    ("null", type(None)),
    ("array", list),
    ("object", dict),
)


def parameters_of(tools: Sequence[Any], name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, by name; empty if they are not known."""
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """The value that `text` stands for where a format writes text as it is and other values as JSON.

    The text itself if the schema says string, or if it is no JSON of a kind that the schema allows."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value, end = (_WORDS[text.strip()], len(text)) if text.strip() in _WORDS else read_json(text, 0)
    except Unreadable:
        return text
    if isinstance(value, str) or text[end:].strip():
        return text
    whole = isinstance(value, float) and value.is_integer() and "integer" in kinds  # as JSON Schema says
    is_meant = not kinds or whole or any(kind in kinds and _is(value, types) for kind, types in _KINDS)
    return value if is_meant else text


def _is(value: Any, types: type | tuple[type, ...]) -> bool:
    return isinstance(value, types) and (types is bool or not isinstance(value, bool))


def _kinds(schema: Any, depth: int = 0) -> set[str]:
    """The types that a schema allows; empty: any, or unknown."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [_kinds(part, depth + 1) for part in schema[key]]
            return set().union(*parts) if all(parts) else set()
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return {"string"} if isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices) else set()
