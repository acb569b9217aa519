"""docs/recipes.md and docs/tutorial.md quote the recipes as they are; recipes.md explains two of them whole."""

from __future__ import annotations

import re

import pytest

from tests.house.tree import REPO

PAGE = (REPO / "docs/recipes.md").read_text(encoding="utf-8")
TUTORIAL = (REPO / "docs/tutorial.md").read_text(encoding="utf-8")
QUOTE = re.compile(r"^<!-- lines of: (\S+) -->\n```yaml\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
QUOTES = QUOTE.findall(PAGE) + QUOTE.findall(TUTORIAL)
WHOLE = ("recipes/bases/grpo_1gpu.yaml", "recipes/grpo_gsm8k_qwen3-0.6b_1gpu_fp8-full.yaml")


def fields_of(recipe: str) -> str:
    """The recipe's lines without comments, those behind values included."""
    lines = (REPO / recipe).read_text(encoding="utf-8").splitlines()
    kept = (re.sub(r"\s+# .*", "", line) for line in lines if not line.startswith("#"))
    return "".join(f"{line}\n" for line in kept)


@pytest.mark.parametrize(("recipe", "lines"), QUOTES, ids=[f"{name} {text.split()[0]}" for name, text in QUOTES])
def test_the_quoted_lines_are_in_the_recipe(recipe: str, lines: str) -> None:
    assert f"\n{lines}" in f"\n{fields_of(recipe)}", f"{recipe} does not have these lines: {lines}"


def test_every_yaml_block_names_its_recipe() -> None:
    assert len(QUOTES) == (PAGE + TUTORIAL).count("```yaml") > 4


@pytest.mark.parametrize("recipe", WHOLE)
def test_a_recipe_is_explained_whole_and_in_order(recipe: str) -> None:
    assert "".join(lines for name, lines in QUOTES if name == recipe) == fields_of(recipe)
