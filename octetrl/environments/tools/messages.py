"""Between calls as records and calls as chat templates take them.

A family is a way of writing calls, known by what the chat template itself says of it. Templates of other ways, say
Qwen3-Coder's XML inside the same tags, are None rather than the nearest one: read wrongly, every call would be
malformed and nobody would know why.
"""

from __future__ import annotations

from typing import Any

from octetrl.environments.tools.calls import Call, Family, MalformedCall, ParsedMessage, ToolCall

_OTHER_WAYS = ("<function=", "<arg_key>", "<｜tool", "<|tool_call_begin|>")


def family_of(chat_template: str) -> Family | None:
    """How a model with this template writes calls; None: it has no tools, or writes them in a way not known here."""
    if any(mark in chat_template for mark in _OTHER_WAYS):
        return None
    if "<tool_call>" in chat_template and "arguments" in chat_template:
        return "hermes"
    if "<|start_header_id|>" in chat_template and "parameters" in chat_template and "tool" in chat_template:
        return "llama3_json"
    return None


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
    """What a call came to, as a message."""
    if isinstance(call, MalformedCall):
        return {"role": "tool", "content": text}
    return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
