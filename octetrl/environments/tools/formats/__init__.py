"""Formats in which models write tool calls, found by the text of the chat template, or named in the recipe
(`rollout.tool_format`).

No text raises: each part of a message is content, a call or a malformed call. Thoughts (`<think>` ... `</think>`) stay
in the content, and calls inside them are not run. If a `</think>` has no `<think>`, the prompt opened the thoughts: all
text before it is thought. Thoughts without an end continue to the end of the message. JSON may have raw line breaks in
strings, which models write in code, and arguments as an object or as its text.

A template of none of these formats is read by transformers' `parse_response`, if the tokenizer has the
`response_template` that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octetrl.environments.tools.formats.harmony import HARMONY
from octetrl.environments.tools.formats.llama3 import LLAMA3
from octetrl.environments.tools.formats.reading import (
    THINK,
    UNTHINK,
    Call,
    ParsedMessage,
    ToolFormat,
    draft_of,
    join,
)
from octetrl.environments.tools.formats.tagged import TAGGED

FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in (*TAGGED, LLAMA3, HARMONY)}
RESPONSE_TEMPLATE = "response_template"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_MARKS = {  # texts of a template that only one format has
    "<function=": "qwen3_coder",
    "<arg_key>": "glm45",
    "<｜tool▁call": "deepseek_v3",
    "<|tool_call_begin|>": "kimi_k2",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<minimax:tool_call>": "minimax_m2",
    "[TOOL_CALLS]": "mistral",
    "<|channel|>": "harmony",
}


def format_of(chat_template: str) -> ToolFormat | None:
    """The format of a model with this template. None: the template has no tools, or an unknown format."""
    for mark, name in _MARKS.items():
        if mark in chat_template:
            return FORMATS[name]
    if "<tool_call>" in chat_template and "arguments" in chat_template:
        return FORMATS["hermes"]
    if "<|start_header_id|>" in chat_template and "parameters" in chat_template and "tool" in chat_template:
        return LLAMA3
    return None


@dataclass(frozen=True)
class ByTokenizer(ToolFormat):
    """What the tokenizer's `parse_response` finds after `prefix`, the opening of the answer."""

    tokenizer: Any = field(default=None, repr=False)
    prefix: str = ""

    def parse(self, text: str, tools: Sequence[Any] = ()) -> ParsedMessage:
        try:
            message = self.tokenizer.parse_response(text, prefix=self.prefix, tools=list(tools) or None)
            json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
        except Exception as error:  # library code on the model's text: it raises for broken calls of every kind
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            return ParsedMessage("", (self.malformed(text, reason),) if text.strip() else ())
        if not isinstance(message, dict):
            return ParsedMessage(text.strip())
        thoughts = next((message[key] for key in _THOUGHTS if message.get(key)), "")
        content, given = message.get("content"), message.get("tool_calls")
        calls: list[Call] = []
        for call in given if isinstance(given, list) else []:
            function = call.get("function", call) if isinstance(call, dict) else call
            calls.append(self.call(draft_of(function, "arguments"), json.dumps(call)))
        said = content if isinstance(content, str) else ""
        return self.message(join(f"{THINK}\n{thoughts}\n{UNTHINK}" if thoughts else "", said), calls)


def by_tokenizer(tokenizer: Any, prefix: str) -> ToolFormat:
    form = "each call as the examples of your prompt show it"
    return ByTokenizer(RESPONSE_TEMPLATE, form, ("",), marks=None, names_calls=True, tokenizer=tokenizer, prefix=prefix)
