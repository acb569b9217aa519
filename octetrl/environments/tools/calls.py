"""The parts of a policy's parsed message: its text, and its calls, well formed or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
