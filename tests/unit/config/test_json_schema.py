from __future__ import annotations

import json

from octetrl.config.json_schema import SCHEMA_FILE, recipe_json_schema
from octetrl.config.schema import Recipe


def test_the_file_for_editors_is_current() -> None:
    written = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    assert written == recipe_json_schema(), "octetrl/config/schema.py changed: run `make schema`"


def test_it_knows_every_section_and_extends_and_describes_fields() -> None:
    schema = recipe_json_schema()
    assert set(schema["properties"]) == {"extends", *Recipe.model_fields}
    assert "required" not in schema, "a file that extends another may leave anything out"
    assert "KV cache" in schema["properties"]["precision"]["description"]
    assert schema["additionalProperties"] is False
    margin = schema["$defs"]["Fp8Config"]["properties"]["calibration_margin"]
    assert (margin["minimum"], margin["maximum"]) == (1.0, 4.0)
    assert "amax / 448" in margin["description"]
