"""The schema for editors is current, and the site's page of recipe fields has every field of it."""

from __future__ import annotations

import itertools
import json

from octetrl.config.algorithm import OBJECTIVES
from octetrl.config.json_schema import SCHEMA_FILE, recipe_json_schema
from octetrl.config.recipe_page import page
from octetrl.config.schema import Recipe
from octetrl.config.typed_fields import FIELDS, typed_fields

SCHEMA = recipe_json_schema()


def test_the_file_for_editors_is_current() -> None:
    written = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert written == SCHEMA, "octetrl/config/schema.py changed: run `make schema`"
    assert "required" not in SCHEMA, "a file that extends another may leave anything out"


def test_the_types_for_editors_are_current() -> None:
    """What they refuse is in tests/unit/api/typed_environments.py, which mypy reads."""
    assert FIELDS.read_text(encoding="utf-8") == typed_fields(), "the schema changed: run `make schema`"


def test_every_field_has_a_row() -> None:
    text = page(SCHEMA)
    for name in Recipe.model_fields:
        assert f"| `{name}` |" in text or f"## `{name}`" in text, name
    for section, schema in SCHEMA["$defs"].items():
        for name in schema.get("properties", {}):
            assert f"| `{name}` |" in text or name == "name", f"{section}.{name}"
    for name in OBJECTIVES:
        assert f"| `{name}` |" in text


def test_defaults_types_and_ranges_are_those_of_the_schema() -> None:
    rows = dict(line[3:].split("` | ", 1) for line in page(SCHEMA).splitlines() if line.startswith("| `"))
    assert rows["prompts_per_step"].startswith("integer, 1 to 1,000,000 | `32` | ")
    assert rows["fail_on_difference"].startswith("`auto`, `true`, `false` | `auto` | ")
    assert rows["clip_high"].count("`4` | cispo |") == 1
    assert "except that `lr` is `1e-05` by default" in page(SCHEMA), "the critic's own default"


def test_each_row_has_the_columns_of_its_table() -> None:
    for table in page(SCHEMA).split("\n\n"):
        columns = {line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(columns) <= 1, table


def test_all_rows_of_a_field_are_beside_one_another() -> None:
    table = page(SCHEMA).split("has several rows.\n\n")[1].split("\n\n")[0]
    fields = [line.split("`")[1] for line in table.splitlines()[2:]]
    assert len([field for field, _ in itertools.groupby(fields)]) == len(set(fields)) < len(fields)
