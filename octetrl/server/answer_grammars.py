"""Which grammar an answer must match: JSON modes, and tool calls that the client demands.

    response_format   json_object, json_schema                          the answer is one JSON text
    tool_choice       required, {"type": "function", "function": ...}   the answer is tool calls in the model's own form

A demanded call is JSON: in Hermes' and Qwen's tags, or Llama 3's plain JSON. In other formats of
environments/tools/formats/ no call can be demanded.

**Schema references.** References inside a JSON schema: those that never end, and those of a schema that becomes a part
of another one.

No finite text matches a schema that needs itself, such as `{"$ref": "#"}` or an object with a required property of its
own kind. A grammar of it has a state in which no token may follow, so it is refused before an answer begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from urllib.parse import unquote

from pydantic import BaseModel, ConfigDict, Field

from octetrl.engine.grammars import WHITE_SPACE, json_grammar
from octetrl.environments.tools.formats.reading import ToolFormat

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


def call_grammar(functions: Sequence[dict[str, Any]], form: ToolFormat, *, several: bool) -> str:
    """The grammar of one call, or `several`, of these functions (`name` and JSON schema `parameters`). Raises
    ValueError for parameters that no text matches, and for a format whose calls are not JSON objects."""
    key, is_hermes = form.arguments_key, form.name == "hermes"
    if key is None:
        raise ValueError(f"tools: no call can be demanded of a model with the format {form.name}; use tool_choice auto")
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
    more = ' ("\\n" call)*' if several and is_hermes else ' ("; " call)*' if several else ""
    call = '"<tool_call>\\n" body "\\n</tool_call>"' if is_hermes else "body"
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


_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keys that the user chose
_DATA = ("const", "enum", "default", "examples", "required")  # values that are no schemas


def endless_reference(schema: Any) -> str | None:
    """A `$ref` to a subschema that no finite text matches; None if there is none. Of references that lead out of the
    schema, or to nothing, nothing is known here."""
    references = {text: _at(schema, text) for text in distinct_references(schema)}
    ending = {text for text, target in references.items() if target is None}
    while found := [
        reference for reference in references if reference not in ending and _ends(references[reference], ending)
    ]:
        ending.update(found)
    return next((text for text in references if text not in ending), None)


def distinct_references(schema: Any) -> list[str]:
    """All texts of `$ref` that the schema needs, each once."""
    return list(dict.fromkeys(_references(schema)))


def moved_below(schema: Any, place: str) -> Any:
    """The schema with references as a part of another one, at the JSON pointer `place` ("#/anyOf/0")."""
    if isinstance(schema, list):
        return [moved_below(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _NAMES and isinstance(value, dict):
            moved[key] = {name: moved_below(one, place) for name, one in value.items()}
        else:
            moved[key] = value if key in _DATA else moved_below(value, place)
    return moved


def _references(schema: Any) -> Iterator[str]:
    """All references in a schema, but those of definitions to which none of them leads."""
    left, seen = [schema], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:  # several references may lead into the same part
            continue
        seen.add(id(one))
        if isinstance(one, list):
            left.extend(one)
        elif isinstance(one, dict):
            for key, value in one.items():
                if key == "$ref" and isinstance(value, str):
                    yield value
                    left.append(_at(schema, value))
                elif key in _NAMES and isinstance(value, dict):
                    left.extend(() if key in ("$defs", "definitions") else value.values())
                elif key not in _DATA:
                    left.append(value)


def _at(schema: Any, reference: str) -> Any:
    """The subschema at a reference such as "#/$defs/tree"; None: it is not in this schema."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = schema
    for part in reference.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether a finite text may match, if references to `ending` have one. Other keys may still forbid it."""
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in ending:
        return False
    needed = _listed(schema.get("allOf")) + _listed(schema.get("prefixItems"))[: _number(schema.get("minItems"))]
    if schema.get("type") == "object":  # without a type, other values match as well
        properties = schema.get("properties")
        names = [name for name in _listed(schema.get("required")) if isinstance(name, str)]
        needed += [properties.get(name) for name in names] if isinstance(properties, dict) else []
    if schema.get("type") == "array" and _number(schema.get("minItems")) > len(_listed(schema.get("prefixItems"))):
        needed.append(schema.get("items"))
    choices = [_listed(schema.get(key)) for key in ("anyOf", "oneOf") if _listed(schema.get(key))]
    return all(_ends(part, ending) for part in needed) and all(
        any(_ends(part, ending) for part in branches) for branches in choices
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
