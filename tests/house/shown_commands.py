"""Whether a shell line that a page shows would do as shown: commands parse, files and Makefile targets exist."""

from __future__ import annotations

import importlib.util
import re
import shlex

import pytest

from tests.house.tree import REPO

OUR_FOLDERS = ("recipes/", "examples/", "lab/", "docs/", "tests/", "octetrl/", "setup/")


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def check_command(command: str) -> None:
    """Raise when a shell line of ours would not do as shown; lines of other programs pass."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # FOO=1 octetrl ...
        words = words[1:]
    for word in words:
        path = word.split("=")[-1]
        if path.startswith(OUR_FOLDERS):
            assert (REPO / path).exists(), f"'{command}': {path} does not exist"
    if words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None, f"'{command}': there is no module {words[2]}"
    program = words[0].rsplit("/", 1)[-1] if words else ""
    if program == "make":
        unknown = {word for word in words[1:] if "=" not in word and not word.startswith("-")} - make_targets()
        assert not unknown, f"'{command}': the Makefile has no {sorted(unknown)}"
    elif program == "octetrl":
        check_octetrl(command, words[1:])


def check_octetrl(command: str, arguments: list[str]) -> None:
    """Parse with the real command line, and resolve the recipe with its overrides, but run nothing."""
    import typer
    from typer.core import TyperGroup
    from typer.exceptions import TyperException

    from octetrl.cli.verbs import command_line
    from octetrl.config.load import load_recipe

    group = typer.main.get_command(command_line())
    assert isinstance(group, TyperGroup)
    if arguments == ["--version"]:
        return
    verb = group.commands.get(arguments[0])
    assert verb is not None, f"'{command}': no such verb; there are {sorted(group.commands)}"
    try:
        verb.make_context(arguments[0], list(arguments[1:]))
    except typer.Exit as done:  # --help
        assert done.exit_code == 0
    except TyperException as error:
        pytest.fail(f"'{command}': {error}")
    recipes = [word for word in arguments if word.startswith("recipes/") and word.endswith(".yaml")]
    overrides = [word for word in arguments if re.match(r"[a-z_0-9.]+=", word)]
    for recipe in recipes:
        load_recipe(str(REPO / recipe), overrides)
