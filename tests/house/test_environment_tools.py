"""What docs/environment_tools.md shows is so: its Python runs, its recipes are sound."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import yaml

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.load import recipe_from_mapping
from octetrl.environments.tools.definition import Toolbox
from octetrl.environments.tools.messages import ToolCall
from octetrl.run.environment import build_environment
from tests.house.markdown import code_blocks, tables
from tests.house.tree import REPO

DOCUMENT = (REPO / "docs/environment_tools.md").read_text(encoding="utf-8")
SECTIONS = [
    section["environment"]
    for block in code_blocks(DOCUMENT)
    if block.language == "yaml"
    for section in yaml.safe_load_all(block.text)
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section['kind']} {section['dataset']}")
def test_recipes_are_sound(section: dict[str, Any]) -> None:
    recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": section})
    assert set(section) <= recipe.environment.model_fields_set


def test_python_runs() -> None:
    (block,) = [block for block in code_blocks(DOCUMENT) if block.language == "python"]
    names: dict[str, Any] = {"__name__": "docs"}
    exec(compile(block.text, "docs/environment_tools.md", "exec"), names)
    toolbox = Toolbox([names["forecast"]])

    def answered(**arguments: Any) -> str:
        return asyncio.run(toolbox.answer(ToolCall("0", "forecast", arguments))).text

    assert answered(city="Oslo", days=2) == "2 days of rain in Oslo"
    assert answered(city="Atlantis").startswith("Error: there is no weather in Atlantis")
    assert "'days'" in answered(city="Oslo", days=8)


def test_the_walk_is_built() -> None:
    pytest.importorskip("gymnasium")
    for section in SECTIONS:
        if section["kind"] == "gymnasium":
            environment = build_environment(EnvironmentConfig.model_validate(section))
            assert environment.tasks[0].prompt


def test_every_ready_tool_is_told() -> None:
    from octetrl.config.rules_environment import READY_TOOLS

    told = [row[0].strip("`") for table in tables(DOCUMENT) if table.header[0] == "tool" for row in table.rows]
    assert set(READY_TOOLS) <= set(told)
