"""Which grammar an answer must match: JSON modes, and tool calls that the client demands.

    response_format   json_object, json_schema                          the answer is one JSON text
    tool_choice       required, {"type": "function", "function": ...}   the answer is tool calls in the model's own form

The forms of tool calls are those of environments/tools/parsing.py: Hermes' and Qwen's tags, or Llama 3's plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octetrl.engine.grammars import WHITE_SPACE, json_grammar
from octetrl.environments.tools import Family
from octetrl.server.schema_references import distinct_references, endless_reference, moved_below

LARGEST_SCHEMA = 1 << 18  # characters: some seconds of compiling, in which no token is sampled
MOST_REFERENCES = 250  # llguidance follows them recursively, on the thread's stack


class JsonSchema(BaseModel):
    """The schema that an answer must match. `name`, `description` and `strict` have no effect."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class NamedFunction(BaseModel):
    name: str


class ToolChoice(BaseModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


def format_grammar(asked: ResponseFormat | None) -> str | None:
    """The grammar of a response format. None: any text. Raises ValueError for a schema that is missing or endless."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return json_grammar({"type": "object"})
    if asked.json_schema is None:
        raise ValueError("response_format: json_schema is missing; give {'schema': {...}}")
    _check_schema(asked.json_schema.content, "response_format")
    return json_grammar(asked.json_schema.content)


def call_grammar(functions: Sequence[dict[str, Any]], family: Family, *, several: bool) -> str:
    """The grammar of one call, or `several`, of these functions (`name` and JSON schema `parameters`). Raises
    ValueError for parameters that no text matches."""
    key = "arguments" if family == "hermes" else "parameters"
    calls = []
    for place, one in enumerate(functions):
        parameters = one.get("parameters") or {"type": "object"}
        _check_schema(parameters, f"tools: function '{one['name']}'")
        parameters = moved_below(parameters, f"#/anyOf/{place}/properties/{key}")
        properties = {"name": {"const": one["name"]}, key: parameters}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        )
    body = json.dumps({"anyOf": calls, "x-guidance": {"whitespace_pattern": WHITE_SPACE}})
    _check_size(body, "tools", "their schemas together have")
    more = ' ("\\n" call)*' if several and family == "hermes" else ' ("; " call)*' if several else ""
    call = '"<tool_call>\\n" body "\\n</tool_call>"' if family == "hermes" else "body"
    return f"start: call{more}\ncall: {call}\nbody: %json {body}\n"


def _check_size(text: str, where: str, what: str) -> None:
    if len(text) > LARGEST_SCHEMA:
        raise ValueError(f"{where}: {what} {len(text):,} characters of JSON; at most {LARGEST_SCHEMA:,} are compiled")


def _check_schema(schema: dict[str, Any], where: str) -> None:
    """Raise ValueError for a schema that no text matches, or one that is too large for the engine's thread."""
    _check_size(json.dumps(schema), where, "the schema has")
    references = len(distinct_references(schema))
    if references > MOST_REFERENCES:
        raise ValueError(
            f"{where}: the schema refers to {references:,} different subschemas; at most {MOST_REFERENCES} are followed"
        )
    endless = endless_reference(schema)
    if endless is not None:
        raise ValueError(
            f"{where}: the schema can't be followed: what '$ref': '{endless[:80]}' refers to needs itself, so no text"
            " ends; make it optional, or give another choice with anyOf"
        )
