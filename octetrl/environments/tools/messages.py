"""Tool calls in messages: found in a policy's text by family, and converted to the messages that chat templates accept.

A family is a format of calls. It is recognised by the text of the chat template. A template with another format, such
as Qwen3-Coder's XML inside the same tags, has no family (None): read in a wrong format, every call would be malformed.

    hermes        <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text before, between and after
    llama3_json   {"name": ..., "parameters": {...}} and nothing else, or several separated by ";", or after
                  <|python_tag|>, with text before that

No text raises: each part is content, a call or a malformed call. Each call is read as JSON from its first brace, so an
argument may contain any text, even the closing tag. Both families accept "arguments" or "parameters" as the key, an
object or an object's text as the value, and raw line breaks in strings, which models write in code. The closing tag may
be missing at the very end, because it may have been the stop string.

Thoughts (`<think>` ... `</think>`) stay in the content, and calls inside them are not run. If a `</think>` has no
`<think>`, the prompt opened the thoughts: all text before it is thought. Thoughts without an end continue to the end of
the message.

A chat template is a jinja program that comes with the model and may fail in many ways (`TEMPLATE_ERRORS`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

from octetrl.system.errors import UserError
from octetrl.system.json_file import kind_of, parse_json

Family = Literal["hermes", "llama3_json"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be read. The tool may be unknown, and the arguments may be wrong."""

    id: str  # unique within its message
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


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THINK, _UNTHINK = "<think>", "</think>"
_PYTHON_TAG = "<|python_tag|>"
_LANDMARK = re.compile(f"{_OPEN}|{_THINK}|{_UNTHINK}")
_ENDING = re.compile(f"{_CLOSE}|{_LANDMARK.pattern}")  # of a call that can't be read
_SHOWN = 60
_FORMS: dict[Family, str] = {
    "hermes": f'{_OPEN}{{"name": <tool name>, "arguments": <JSON object>}}{_CLOSE}',
    "llama3_json": '{"name": <tool name>, "parameters": <JSON object>}',
}


def parse_message(text: str, family: Family) -> ParsedMessage:
    """Content and calls of one message of the policy."""
    return _parse_hermes(text) if family == "hermes" else _parse_llama3(text)


def _parse_hermes(text: str) -> ParsedMessage:
    pieces: list[str] = []  # of content
    calls: list[Call] = []
    done = position = 0  # content is taken up to `done`, read up to `position`
    thoughts_may_be_open = True
    while found := _LANDMARK.search(text, position):
        if found[0] == _THINK:
            end = text.find(_UNTHINK, found.end())
            position = len(text) if end < 0 else end + len(_UNTHINK)
            thoughts_may_be_open = False
        elif found[0] == _UNTHINK:
            if thoughts_may_be_open:  # all of it was thought, what looked like calls too
                pieces, calls, done = [], [], 0
            thoughts_may_be_open = False
            position = found.end()
        else:
            pieces.append(text[done : found.start()])
            call, position = _read_tagged(text, found.end(), len(calls))
            calls.append(call)
            done = position
    pieces.append(text[done:])
    return ParsedMessage("\n".join(filter(None, (piece.strip() for piece in pieces))), tuple(calls))


def _read_tagged(text: str, start: int, index: int) -> tuple[Call, int]:
    """The call after an opening tag that ends at `start`, and where what follows it begins."""
    value, end, error = _read_json(text, start)
    opened = start - len(_OPEN)
    if error is None:
        after = _skip_blanks(text, end)
        closed = after + len(_CLOSE) if text.startswith(_CLOSE, after) else after
        if closed > after or after == len(text):
            return _to_call(value, text[opened:closed], index, "hermes"), closed
        error = f"{_shown(text[after:])} stands where {_CLOSE} should"
    ending = _ENDING.search(text, start)
    following = len(text) if ending is None else ending.end() if ending[0] == _CLOSE else ending.start()
    return _malformed(text[opened:following].strip(), error, "hermes"), following


def _parse_llama3(text: str) -> ParsedMessage:
    thoughts, rest = _split_thoughts(text)
    before, after = "", rest
    calls: list[Call] = []
    if rest.lstrip().startswith("{"):  # first of all, for the tag may stand in an argument
        calls, after = _read_series(rest, has_tag=False)
    if not calls and _PYTHON_TAG in rest:
        before, _, body = rest.partition(_PYTHON_TAG)
        calls, after = _read_series(body, has_tag=True)
    if not calls:
        return ParsedMessage(text.strip())
    return ParsedMessage("\n".join(filter(None, (f"{thoughts}{before}".strip(), after.strip()))), tuple(calls))


def _read_series(body: str, *, has_tag: bool) -> tuple[list[Call], str]:
    """Objects separated by ";" and blanks, as far as they are meant as calls, and what comes after them. After a tag
    the first is meant as one whatever it is; elsewhere its keys must say so."""
    calls: list[Call] = []
    position = _skip_blanks(body, 0)
    while position < len(body) or (has_tag and not calls):
        value, end, error = _read_json(body, position)
        named = '"name"' in body[position:] if error else isinstance(value, dict) and _names_a_call(value)
        if not named and (calls or not has_tag):
            break
        if error is not None:
            return [*calls, _malformed(body[position:].strip(), error, "llama3_json")], ""
        calls.append(_to_call(value, body[position:end], len(calls), "llama3_json"))
        position = _skip_blanks(body, end)
        if body.startswith(";", position):
            position = _skip_blanks(body, position + 1)
    return calls, body[position:]


def _names_a_call(value: dict[str, Any]) -> bool:
    return "name" in value and ("parameters" in value or "arguments" in value)


def _split_thoughts(text: str) -> tuple[str, str]:
    """(thoughts at the beginning, the rest). A brace or tag before them shows that they are something else."""
    opened = text.lstrip().startswith(_THINK)
    if not opened and text.lstrip().startswith(("{", _PYTHON_TAG)):
        return "", text
    thoughts, end, rest = text.partition(_UNTHINK)
    if end:
        return thoughts + end, rest
    return (text, "") if opened else ("", text)


def _to_call(value: Any, text: str, index: int, family: Family) -> Call:
    """A call of what JSON gave, or what is wrong with it."""
    if not isinstance(value, dict):
        return _malformed(text.strip(), f"it is {kind_of(value)}, not an object", family)
    key, other = ("arguments", "parameters") if family == "hermes" else ("parameters", "arguments")
    name, arguments = value.get("name"), value.get(key, value.get(other))
    if isinstance(arguments, str):
        inner, end, error = _read_json(arguments, 0)
        arguments = inner if error is None and not arguments[end:].strip() else arguments
    if not isinstance(name, str) or not name:
        error = f'"name" is {kind_of(name)}, not the name of a tool' if "name" in value else 'it has no "name"'
    elif isinstance(arguments, dict):
        return ToolCall(f"call_{index}", name, arguments)
    else:
        error = f'it has no "{key}"' if arguments is None else f'"{key}" is {kind_of(arguments)}, not an object'
    return _malformed(text.strip(), error, family)


def _malformed(text: str, error: str, family: Family) -> MalformedCall:
    return MalformedCall(text, f"the tool call can't be read: {error}. Write {_FORMS[family]}")


class _NotJson(ValueError):
    """JSON that Python reads and nobody else does."""


def _no_constant(word: str) -> Any:
    raise _NotJson(f"{word} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise _NotJson(f"{digits[:_SHOWN]} is too large a number")
    return value


_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)


def _read_json(text: str, start: int) -> tuple[Any, int, str | None]:
    """(value, its end, None) of the JSON at `start`, blanks before it skipped; or (None, start, what is wrong)."""
    begin = _skip_blanks(text, start)
    if begin == len(text):
        return None, start, "it is empty"
    try:
        value, end = _DECODER.raw_decode(text, begin)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        return None, start, f"it is not JSON ({error.msg} at {_shown(text[error.pos :])})"
    except _NotJson as error:
        return None, start, str(error)
    except UnicodeEncodeError:
        return None, start, "a string in it holds half of a surrogate pair"
    except (ValueError, RecursionError):  # more digits, or deeper, than Python reads
        return None, start, "it holds too long a number, or is nested too deeply"
    return value, end, None


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _shown(text: str) -> str:
    line = " ".join(text[: 2 * _SHOWN].split())
    return f"'{line[:_SHOWN]}'" if line else "its end"


_OTHER_WAYS = ("<function=", "<arg_key>", "<｜tool", "<|tool_call_begin|>")


def family_of(chat_template: str) -> Family | None:
    """The format of calls of a model with this template; None: the template has no tools, or an unknown format."""
    if any(mark in chat_template for mark in _OTHER_WAYS):
        return None
    if "<tool_call>" in chat_template and "arguments" in chat_template:
        return "hermes"
    if "<|start_header_id|>" in chat_template and "parameters" in chat_template and "tool" in chat_template:
        return "llama3_json"
    return None


def json_arguments(text: str) -> dict[str, Any]:
    """A call's arguments from the JSON text that OpenAI's messages have. Raises ValueError unless it is an object."""
    arguments = parse_json(text, "", "")
    json.dumps(arguments, allow_nan=False)  # raises ValueError for NaN and Infinity, which are no JSON
    if not isinstance(arguments, dict):
        raise ValueError("not an object")
    return arguments


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """What holds a call's name and arguments: its `function`, or the call itself."""
    inner: Mapping[str, Any] = call.get("function", call)
    return inner


def arguments_of(call: Mapping[str, Any]) -> Any:
    return function_of(call).get("arguments")


def with_read_calls(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The message with the arguments of its calls as objects, which OpenAI's messages have as JSON text, and with the
    `content` null that a message of calls alone has. Raises UserError that begins with `where`."""
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    if not isinstance(calls, list) or not all(
        isinstance(call, dict)
        and isinstance(function_of(call), dict)
        and isinstance(function_of(call).get("name"), str)
        and isinstance(arguments_of(call), dict | str | None)
        for call in calls
    ):
        raise UserError(f"{where}: 'tool_calls' must be a list of calls, each with a name and arguments, an object")

    def read(arguments: Any) -> Any:
        try:
            return json_arguments(arguments or "{}") if isinstance(arguments, str) else arguments
        except ValueError:
            shown = repr(arguments[:60])
            raise UserError(f"{where}: a call's arguments {shown} are not a JSON object; correct them") from None

    return {"content": None, **message, "tool_calls": _with_arguments(calls, read)}


def with_written_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text."""

    def written(arguments: Any) -> str:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    calls = message.get("tool_calls")
    return {**message, "tool_calls": _with_arguments(calls, written)} if calls else dict(message)


def _with_arguments(calls: Iterable[Mapping[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The calls with converted arguments, where they have any."""
    converted = []
    for call in calls:
        function = dict(function_of(call))
        if "arguments" in function:
            function["arguments"] = convert(function["arguments"])
        converted.append({**call, "function": function} if "function" in call else function)
    return converted


def to_message(parsed: ParsedMessage) -> dict[str, Any]:
    """The assistant's message with `tool_calls`. Calls that can't be read stay in its text, as they were written."""
    unread = [call.text for call in parsed.calls if isinstance(call, MalformedCall)]
    content = "\n".join(text for text in (parsed.content, *unread) if text)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in calls
        ]
    return message


def tool_message(call: Call, text: str) -> dict[str, Any]:
    """The result of a call, as a message."""
    if isinstance(call, MalformedCall):
        return {"role": "tool", "content": text}
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,  # of the Python code that jinja generates
    TypeError,
    ValueError,
)


def template_fails(error: BaseException) -> UserError:
    reason = " ".join(str(error).split())[:120] or "no reason given"
    return UserError(
        f"tokenizer: its chat template fails ({type(error).__name__}: {reason}); correct chat_template in its"
        f" tokenizer_config.json or chat_template.jinja"
    )
