"""The recipe's JSON schema, for editors: completion, types, ranges and the description of every field.

A recipe names it in its first line, `# yaml-language-server: $schema=recipe.schema.json`. `make schema` updates the
file. A test fails if it is out of date.

The `algorithm` section is one objective's section (`oneOf`, chosen by `name`), so an editor offers only that
objective's fields. A file that extends another may omit `name`. An editor then offers the fields of all objectives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octetrl.config.algorithm import OBJECTIVES, OwnObjectiveConfig
from octetrl.config.schema import Recipe

SCHEMA_FILE = Path(__file__).parents[2] / "recipes" / "recipe.schema.json"


def recipe_json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe file. No field is required, because `extends` may give it."""
    schema = Recipe.model_json_schema()
    schema.pop("required", None)
    extends = {"type": "string", "description": "Recipe that this one extends; the path is relative to this file."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    _let_name_choose(schema)
    _join_lines(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write_json_schema(path: Path = SCHEMA_FILE) -> None:
    path.write_text(json.dumps(recipe_json_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _let_name_choose(schema: dict[str, Any]) -> None:
    """Make exactly one choice of `algorithm` match: the named objective, or without a name one with every field.

    Each field is written out once. Other objectives that have it in the same form refer to it.
    """
    shipped, own = schema["properties"]["algorithm"]["oneOf"]
    schema["properties"]["algorithm"] |= {**shipped, "oneOf": [*shipped["oneOf"], own]}
    schema["$defs"][OwnObjectiveConfig.__name__]["properties"]["name"]["pattern"] = ":"  # else no other choice matches
    written: dict[str, dict[str, str]] = {}
    every: dict[str, Any] = {}
    for section in OBJECTIVES.values():
        choice = schema["$defs"][section.__name__]
        choice["required"] = ["name"]
        for field, form in choice["properties"].items():
            reference = {"$ref": f"#/$defs/{section.__name__}/properties/{field}"}
            known = written.setdefault(json.dumps([field, form]), reference)
            if known is not reference:
                choice["properties"][field] = known
            if field != "name":
                every.setdefault(field, known)
    schema["$defs"]["InheritedObjective"] = {
        "description": "The file that this one extends names the objective.",
        "properties": every,
        "not": {"required": ["name"]},
        "additionalProperties": False,
        "type": "object",
    }
    schema["properties"]["algorithm"]["oneOf"].append({"$ref": "#/$defs/InheritedObjective"})


def _join_lines(node: Any) -> None:
    """Join the lines of each description. They come from wrapped docstrings, and an editor wraps them itself."""
    if isinstance(node, dict):
        if isinstance(node.get("description"), str):
            node["description"] = " ".join(node["description"].split())
        for child in node.values():
            _join_lines(child)
    elif isinstance(node, list):
        for child in node:
            _join_lines(child)


if __name__ == "__main__":
    write_json_schema()
