"""Converts calls between records and the messages that chat templates accept.

A family is a format of calls. It is recognised by the text of the chat template. A template with another format, such
as Qwen3-Coder's XML inside the same tags, has no family (None): read in a wrong format, every call would be malformed.

A chat template is a jinja program that comes with the model and may fail in many ways (`TEMPLATE_ERRORS`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

from octetrl.environments.tools.parsing import Call, Family, MalformedCall, ParsedMessage, ToolCall
from octetrl.system.errors import UserError
from octetrl.system.json_file import parse_json

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
        isinstance(call, dict) and isinstance(function_of(call), dict) for call in calls
    ):
        raise UserError(f"{where}: 'tool_calls' must be a list of calls, each with a name and arguments")
    return {"content": None, **message, "tool_calls": [_with_arguments(call, _read(call, where)) for call in calls]}


def with_written_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON text."""
    calls = message.get("tool_calls")
    return (
        dict(message)
        if not calls
        else {**message, "tool_calls": [_with_arguments(one, _written(one)) for one in calls]}
    )


def _with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    if "arguments" not in function_of(call):
        return dict(call)
    function = {**function_of(call), "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _written(call: Mapping[str, Any]) -> str:
    given = arguments_of(call)
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def _read(call: Mapping[str, Any], where: str) -> Any:
    given = arguments_of(call)
    if not isinstance(given, str):
        return given
    try:
        return json_arguments(given or "{}")
    except ValueError:
        raise UserError(f"{where}: a call's arguments {given[:60]!r} are not a JSON object; correct them") from None


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
