"""Messages with tool calls, converted to what chat templates and OpenAI's clients accept.

`formats/` reads the calls of a policy's text. A chat template is a jinja program that comes with the model and may fail
in many ways (`TEMPLATE_ERRORS`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import TemplateError

from octetrl.environments.tools.formats.reading import Call, MalformedCall, ParsedMessage, ToolCall
from octetrl.system.errors import UserError
from octetrl.system.json_file import parse_json


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
