"""The recipe's JSON schema, for editors: completion, types, ranges and the description of every field.

A recipe names it in its first line, `# yaml-language-server: $schema=recipe.schema.json`. `make schema` writes the
file anew; a test says when that is due.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octetrl.config.schema import Recipe

SCHEMA_FILE = Path(__file__).parents[2] / "recipes" / "recipe.schema.json"


def recipe_json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of one recipe file: any part of a recipe, since `extends` may bring the rest."""
    schema = Recipe.model_json_schema()
    schema.pop("required", None)
    extends = {"type": "string", "description": "Recipe underneath this one; the path is relative to this file."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    _join_lines(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def write_json_schema(path: Path = SCHEMA_FILE) -> None:
    path.write_text(json.dumps(recipe_json_schema(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _join_lines(node: Any) -> None:
    """Descriptions come from wrapped docstrings; an editor wraps them itself."""
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
