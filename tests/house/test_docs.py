"""What we write can be read anywhere: no paths of one machine, no package hosts, nothing left for later."""

from __future__ import annotations

import ast
import re

from octetrl.cli.verbs import VERBS
from octetrl.config.algorithm import OBJECTIVES
from octetrl.config.other_names import OURS
from octetrl.config.problems import field_names
from octetrl.config.rules_environment import READY_TOOLS
from octetrl.config.schema import Recipe
from octetrl.run.folder.allowed_changes import MAY_CHANGE
from tests.house.markdown import tables
from tests.house.tree import REPO, python_files, syntax, text_files

FORBIDDEN = {
    "a path of one machine": re.compile(r"(?<![\w.~-])/(?:work|root|home|opt|mnt|srv|data)/\w"),
    "a package host": re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch|index.url|artifactory", re.I),
    "something left for later": re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b"),
    "a merge that was not finished": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}
SELF = "tests/house/test_docs.py"


def test_no_text_has_what_is_forbidden() -> None:
    for path in text_files():
        text = "" if path in (SELF, "LICENSE") else (REPO / path).read_text(encoding="utf-8")
        for what, pattern in FORBIDDEN.items():
            if hit := pattern.search(text):
                raise AssertionError(f"{path}:{text.count(chr(10), 0, hit.start()) + 1}: {what}: {hit[0]}")


def test_modules_tell_their_story() -> None:
    """Every module of the package says in its docstring what it is for."""
    for path in python_files("octetrl"):
        if not path.endswith("__init__.py"):
            assert len(ast.get_docstring(syntax(path)) or "") > 40, f"{path}: what is it for?"


def test_files_that_pages_name_exist() -> None:
    """In backticks, from the repository's root, from octetrl/ or from octetrl/models/; `NAME.py` and `x.py` stand for
    a file to add."""
    pages = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
    for page in pages:
        named = re.findall(r"`((?:[a-z_]+/)+\w+\.(?:py|md|sh))`", page.read_text(encoding="utf-8"))
        for path in (path for path in named if not re.search(r"[A-Z]|\bx\.py|test_x\.py|^my_", path)):
            bases = (REPO, REPO / "octetrl", REPO / "octetrl/models")
            assert any((base / path).exists() for base in bases), f"{page.name}: {path} does not exist"


def test_the_commands_page_has_every_command() -> None:
    text = (REPO / "docs/commands.md").read_text(encoding="utf-8")
    listed = re.findall(r"^octetrl (\w+)", text, re.MULTILINE)
    assert sorted(set(listed)) == sorted(VERBS)


def test_the_commands_page_lists_what_a_resumed_run_may_change() -> None:
    text = (REPO / "docs/commands.md").read_text(encoding="utf-8")
    listed = text.split("These fields may differ from the saved recipe:", 1)[1].split(". `--allow", 1)[0]
    assert re.findall(r"`([\w.]+)`", listed) == list(MAY_CHANGE)


def test_the_tools_page_has_every_ready_tool() -> None:
    listed = tables((REPO / "docs/environment_tools.md").read_text(encoding="utf-8"))
    told = {row[0].strip("`") for table in listed if table.header[0] == "tool" for row in table.rows}
    assert set(READY_TOOLS) <= told


def test_the_page_for_users_of_other_libraries_names_fields_that_exist_and_all_names_of_the_hints() -> None:
    fields = {field for section in OBJECTIVES.values() for field in section.model_fields}
    known = {*field_names(Recipe), *(f"algorithm.{field}" for field in fields)}
    text = (REPO / "docs/coming_from.md").read_text(encoding="utf-8").split("## Where")[0]
    ours = [row.rsplit("| ", 1)[1] for row in text.splitlines() if row.startswith("| ")]
    named = {name for cell in ours for name in re.findall(r"`((?:[a-z_]+\.)+[a-z_0-9]+)", cell)}
    assert {name for name in named if not name.startswith("octetrl")} <= known
    assert set(OURS.values()) <= known
    lacking = {name for name in OURS if f"`{name}" not in text}
    assert lacking == {"num_epochs"}, "that is in everybody's words"
