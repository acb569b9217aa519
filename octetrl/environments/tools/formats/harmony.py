"""gpt-oss' harmony: a completion is several messages, each with a channel, and with a recipient if it is a call.

    <|channel|>analysis<|message|>THOUGHTS<|end|><|start|>assistant<|channel|>final<|message|>ANSWER
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Thoughts become `<think>` ... `</think>` of the content, as other formats have them. The recipient may stand in the role
or in the channel. A call without a text is one with no arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octetrl.environments.tools.formats.reading import (
    THINK,
    UNTHINK,
    Call,
    Draft,
    ParsedMessage,
    ToolFormat,
    Unreadable,
    join,
    read_arguments,
    shown,
)

_START, _CHANNEL, _MESSAGE, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|call|>"
_ENDS = ("<|end|>", _CALL, "<|return|>")
_NEXT = re.compile("|".join(map(re.escape, (*_ENDS, _START))))
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w*)")


@dataclass(frozen=True)
class Harmony(ToolFormat):
    def parse(self, text: str, tools: Sequence[Any] = ()) -> ParsedMessage:
        if _MESSAGE not in text and _CHANNEL not in text:
            return ParsedMessage(text.strip())
        pieces: list[str] = []
        calls: list[Call] = []
        for message in filter(str.strip, _NEXT.split(text)):
            header, marked, body = message.partition(_MESSAGE)
            recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
            if recipient is not None and recipient[1] not in ("assistant", "user", "all"):
                calls.append(self._call(recipient[1], body if marked else None, message))
            elif not marked:
                pieces.append(message.strip() if channel is None else "")  # a channel alone, cut off before its text
            elif channel is not None and channel[1] == "analysis":
                pieces.append(f"{THINK}\n{body.strip()}\n{UNTHINK}" if body.strip() else "")
            else:
                pieces.append(body)
        return self.message(join(*pieces), calls)

    def _call(self, recipient: str, body: str | None, text: str) -> Call:
        name = recipient.removeprefix("functions.")
        try:
            if body is None:
                raise Unreadable(f"it has no {_MESSAGE}")
            arguments, end = read_arguments(body, 0) if body.strip() else ({}, len(body))
            if body[end:].strip():
                raise Unreadable(f"{shown(body[end:])} stands where {_CALL} should")
        except Unreadable as error:
            return self.malformed(text, error)
        return self.call(Draft(name, arguments) if name else "it has no name of a tool", text)


HARMONY = Harmony(
    "harmony",
    f"{_CHANNEL}commentary to=functions.NAME <|constrain|>json{_MESSAGE}<JSON object>{_CALL}",
    ("",),
    marks=(_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS),
    ends=(_CALL,),
    names_calls=True,
)
