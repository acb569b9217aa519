"""The table of attacks in docs/sandbox.md and the tests agree: each row has a test, each test of an attack a row, and
a level is "open" in the table just where the test asks the level whether it protects."""

from __future__ import annotations

import ast
import re

from tests.house.tree import REPO, functions

ATTACKS = [f"tests/unit/process/test_{name}.py" for name in ("attacks", "escapes", "limits")]
OTHERS = ["tests/unit/process/test_sandbox.py", "tests/unit/environments/code/test_scorer.py"]
NO_ATTACK = {"test_after_all_that_it_still_works", "test_memory_shared_after_a_fork_counts_once"}


def rows() -> dict[str, str]:
    """The results of each row at both levels, by its test."""
    text = (REPO / "docs/sandbox.md").read_text(encoding="utf-8")
    section = text.split("\n## Attacks\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| .*? \| (.*? \| .*?) \| `(test_\w+)` \|$", section, re.MULTILINE)
    assert len(found) == section.count("\n| ") - 1, "a row without a test"
    assert len({name for _, name in found}) == len(found), "two rows of one test"
    return {name: verdicts for verdicts, name in found}


def functions_of(paths: list[str]) -> dict[str, ast.FunctionDef]:
    found = {}
    for path in paths:
        found |= {name: function for name, function in functions(path) if name.startswith("test_")}
    return found


def test_each_attack_has_a_row_and_each_row_a_test() -> None:
    attacks = {
        name
        for name, function in functions_of(ATTACKS).items()
        if "sandbox" in {argument.arg for argument in function.args.args}
    }
    assert attacks - NO_ATTACK - rows().keys() == set(), "tests without a row"
    assert rows().keys() - attacks - functions_of(OTHERS).keys() == set(), "rows without a test"


def test_a_level_is_open_where_the_test_asks_for_its_protection() -> None:
    known = functions_of([*ATTACKS, *OTHERS])
    for name, results in rows().items():
        assert ("**open**" in results) == ("counts_deleted_files" in ast.unparse(known[name])), name
