"""A value of a wrong type, in any field, is a problem of that field: no error of pydantic's reaches a user."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from octetrl.config.environment import MixedEnvironmentConfig
from octetrl.config.problems import field_names
from octetrl.config.schema import Recipe
from octetrl.config.validate import build_recipe

SERVER = {"base_url": "http://localhost:8000/v1", "model": "m"}
ONE = {
    "model": {"path": "m"},
    "environment": {"kind": "jsonl", "dataset": "x.jsonl", "judge": {**SERVER}},
    "engine": {"backend": "openai", "openai": SERVER},
    "algorithm": {"name": "dpo", "conversations": "c.jsonl"},
    "data": {"sources": {"s": {"path": "p.jsonl", "weight": 1.0}}},
}
SEVERAL = {
    "model": {"path": "m"},
    "environments": {"a": {"kind": "jsonl", "dataset": "x", "judge": SERVER}, "b": {"kind": "math", "dataset": "y"}},
}
VALUES = ["nonsense", 5, None, {}, [["a"]], "http://["]


def with_value(tree: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    tree = deepcopy(tree)
    node = tree
    *sections, last = field.split(".")
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[last] = value
    return tree


@pytest.mark.parametrize(
    ("tree", "fields"),
    [
        (ONE, [*dict.fromkeys(field_names(Recipe)), "data.sources.s", "data.sources.s.path", "engine.openai.z"]),
        (SEVERAL, [f"environments.a.{name}" for name in (*field_names(MixedEnvironmentConfig), "z")]),
    ],
)
def test_any_value_in_any_field_gives_a_recipe_or_problems(tree: dict[str, Any], fields: list[str]) -> None:
    for field in fields:
        for value in VALUES:
            recipe, problems = build_recipe(with_value(tree, field, value))
            assert recipe is not None or problems, f"{field}={value!r}"
            assert all("\n" not in one.text and "validation error" not in one.text for one in problems)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("environment.judge.base_url", "nonsense"),
        ("environment.judge.model", 5),
        ("environment.judge.template", "without the place for it"),
        ("engine.openai.base_url", 7),
        ("engine.openai.model", ["m"]),
    ],
)
def test_a_field_that_its_section_needs_is_named(field: str, value: Any) -> None:
    recipe, problems = build_recipe(with_value(ONE, field, value))
    assert recipe is None and [one.text for one in problems if one.fields == (field,)]
