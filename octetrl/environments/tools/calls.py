"""What a policy's message is once it is read: its text, and the calls in it, well formed or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["hermes", "llama3_json"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that can be read. Whether there is such a tool, and whether the arguments suit it, is not said yet."""

    id: str  # unique within its message
    name: str
    arguments: Mapping[str, Any]  # as JSON gave them


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What was meant as a call and can't be read."""

    text: str  # as the policy wrote it
    error: str  # one line for the policy: what is wrong, what is expected


Call = ToolCall | MalformedCall


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    content: str  # what is not a call, thoughts included, blanks round it taken off
    calls: tuple[Call, ...] = ()
