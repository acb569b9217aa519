"""What the command line says about options: their types in `--help`, and one line for a value that is not allowed.

typer labels types as Python does (`<list[str]>`) and reports wrong values in the words of a validator. Here a label is
a word, and a message says what was given and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rich.columns import Columns
from rich.table import Table
from rich.text import Text
from typer import rich_utils
from typer.core import TyperCommand

from octetrl.system.errors import nearest

LONGEST_RANGE = 9  # characters: x>=1, 0<=x<=64
SHORT = {"generate --prompts": "; write -p TEXT (--prompt) for each prompt, or --input FILE for many"}
_LABELS = {"int": "N", "float": "X", "str": "TEXT", "bool": "", "list[str]": "TEXT"}
_SAYS = (
    (r"Input should be a valid number.*", "is not a number"),
    (r"Input should be a valid integer.*", "is not a whole number"),
    (r"Input should be greater than or equal to (\S+)", r"is out of range; it must be at least \1"),
    (r"Input should be less than or equal to (\S+)", r"is out of range; it must be at most \1"),
    (r"Input should be greater than (\S+)", r"is out of range; it must be above \1"),
    (r"Input should be less than (\S+)", r"is out of range; it must be below \1"),
)


class Command(TyperCommand):
    """A command whose `--help` labels types with plain words, and cuts no name on a narrow terminal."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        plain, rich_utils.Table = rich_utils.Table, _FoldedTable  # type: ignore[misc]
        try:
            super().format_help(ctx, formatter)
        finally:
            rich_utils.Table = plain  # type: ignore[misc]

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = list(super().get_params(ctx))
        for param in params:
            show = getattr(param, "display_type_rich", None)
            if show is not None and not isinstance(show, _Label):
                param.display_type_rich = _Label(_label(param, show(ctx)))
                allowed = param._get_number_range_help_str() or ""
                if len(allowed) > LONGEST_RANGE:  # its column would cut words of the help on 80 columns
                    param._get_number_range_help_str = str
        return params


class _FoldedTable(Table):
    """A long word continues in the next line; typer's own table ends it with an ellipsis. The first column is whole."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*cells, **options)
        self.columns[0].no_wrap = True
        for part in (one for cell in cells if isinstance(cell, Columns) for one in cell.renderables):
            if isinstance(part, Text):
                part.overflow = "fold"


class _Label:
    """Takes the place of a parameter's method that returns its type's label."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, ctx: Any) -> str:
        return self._text


def _label(param: Any, shown: str | None) -> str:
    if param.param_type_name == "argument":
        return ""
    if param.metavar:
        return str(param.metavar)
    name = (shown or "").strip("<>").removesuffix(" range")
    return _LABELS.get(name, name)


def usage_text(message: str, arguments: Sequence[str]) -> str:
    """A usage error in one line: what was given, what is allowed."""
    text = " ".join(message.split())
    wrong = re.fullmatch(r"Invalid value for '(.*)': (?:Value error, )?(.*?)\.?", text)
    if wrong is not None:
        option, problem = wrong.groups()
        return _wrong_value(option.split("' / '"), problem, arguments)
    extra = re.fullmatch(r"Got unexpected extra arguments? ?(?:\(s\) )?\((.*)\)", text)
    if extra is not None:
        return f"'{extra[1]}' is one argument too many; leave it out, or write it after an option"
    unknown = re.match(r"No such option: (\S+)", text)
    if unknown is not None:
        possible = re.search(r"\(Possible options: (.*)\)", text)
        from octetrl.cli.field_hint import field_hint  # imports the recipe's schema, which takes a moment

        hint = nearest(unknown[1], possible[1].split(", ")) if possible else ""
        hint = field_hint(unknown[1], arguments) or SHORT.get(f"{next(iter(arguments), '')} {unknown[1]}", hint)
        return f"{unknown[1]}: there is no such option{hint}"
    return text


def _wrong_value(options: Sequence[str], problem: str, arguments: Sequence[str]) -> str:
    given = _given(options, arguments)
    choice = re.fullmatch(r"'(.*?)' is not one of (.*)", problem)
    if choice is not None:
        allowed = [word.strip(" '") for word in choice[2].split(",")]
        return f"{options[0]}: '{choice[1]}' is not allowed; choose one of {', '.join(allowed)}"
    for pattern, words in _SAYS:
        found = re.fullmatch(pattern, problem)
        if found is not None:
            return f"{options[0]}: {given}{found.expand(words)}"
    return f"{options[0]}: {given}{problem}"


def _given(options: Sequence[str], arguments: Sequence[str]) -> str:
    """The value on the command line, in quotes."""
    for place, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in options and equals:
            return f"'{value}' "
        if word in options and place + 1 < len(arguments):
            return f"'{arguments[place + 1]}' "
    return ""
