"""References inside a JSON schema: those that never end, and those of a schema that becomes a part of another one.

No finite text matches a schema that needs itself, such as `{"$ref": "#"}` or an object with a required property of its
own kind. A grammar of it has a state in which no token may follow, so it is refused before an answer begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # keys that the user chose
_DATA = ("const", "enum", "default", "examples", "required")  # values that are no schemas


def endless_reference(schema: Any) -> str | None:
    """A `$ref` to a subschema that no finite text matches; None if there is none. Of references that lead out of the
    schema, or to nothing, nothing is known here."""
    references = {text: _at(schema, text) for text in distinct_references(schema)}
    ending = {text for text, target in references.items() if target is None}
    while found := [one for one in references if one not in ending and _ends(references[one], ending)]:
        ending.update(found)
    return next((text for text in references if text not in ending), None)


def distinct_references(schema: Any) -> list[str]:
    """All texts of `$ref` that the schema needs, each once."""
    return list(dict.fromkeys(_references(schema)))


def moved_below(schema: Any, place: str) -> Any:
    """The schema with references as a part of another one, at the JSON pointer `place` ("#/anyOf/0")."""
    if isinstance(schema, list):
        return [moved_below(one, place) for one in schema]
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
    return all(_ends(one, ending) for one in needed) and all(
        any(_ends(one, ending) for one in branches) for branches in choices
    )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []


def _number(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
