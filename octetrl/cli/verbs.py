"""The app with all commands; each command has its own file, which is imported when the command is asked for.

typer labels types as Python does (`<list[str]>`); in our `--help` a label is a word.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.table import Table
from rich.text import Text
from typer import rich_utils
from typer.core import TyperCommand

from octetrl.cli.ctrl_c import INTERRUPTED
from octetrl.system.errors import UserError
from octetrl.system.process import terminable
from octetrl.version import __version__

VERBS = {  # the name of each, and its line in `octetrl --help`: its docstring
    "train": "Train a model from a recipe: reinforcement learning, SFT, preferences or a reward model.",
    "recipes": "List the shipped recipes, or copy one. `octetrl train NAME` runs a shipped recipe as it is.",
    "init": "Create a project: recipe, environment, test and README. It trains a tiny model at once.",
    "eval": "Evaluate runs or models on a recipe's held-out tasks.",
    "rollouts": "Show the rollouts of a run.",
    "metrics": "Explain the metrics of a run: their units, and what good and bad values are.",
    "report": "Write a page about runs: what ran, curves, times, rollouts, differences. It needs no network.",
    "watch": "Serve the report of runs while they go on, and /metrics for Prometheus.",
    "generate": "Generate text from a model or a run.",
    "serve": "Serve a model with OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.",
    "check": "Show what a recipe means, what it needs, and every problem it has.",
    "status": "Show what a run does: each of its workers and its memory, and the last step.",
    "doctor": "Name the first op whose bits differ between engine and trainer; exit code 0 if none does, 1 if one"
    " does.",
    "export": "Write a run's last weights in Hugging Face format, and upload them if asked.",
    "demo": "Train a tiny model by SFT and GRPO in emulated FP8, and print a table (6 to 13 minutes on two CPU cores).",
    "bench": "Measure a part of the system: a table, and JSON.",
}
HANDLE_SIGTERM = ("train", "serve")  # with handlers of their own, which end a step, or the answers in work
UsageError: type[typer.BadParameter] = typer.BadParameter.__bases__[0]  # click's, wherever typer keeps its click
LONGEST_RANGE = 9  # characters: x>=1, 0<=x<=64
OPTIONAL_VALUES, OPTIONAL_NUMBERS = (("--resume", "auto"),), ("--sample",)
_LABELS = {"int": "N", "float": "X", "str": "TEXT", "bool": "", "list[str]": "TEXT"}


def run_verb(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Raises UserError for wrong options, and what the command raises."""
    try:
        app = command_line(named_verb(arguments))
        code = app(list(arguments) or ["--help"], prog_name="octetrl", standalone_mode=False)
    except UsageError as error:
        from octetrl.cli.usage import usage_text  # imports the recipe's schema, which takes a moment

        command = error.ctx.command_path if error.ctx is not None else "octetrl"
        raise UserError(f"{usage_text(error.format_message(), arguments)} (see `{command} --help`)") from None
    except typer.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def command_line(verbs: Collection[str] = VERBS) -> typer.Typer:
    """The app. Only the commands named in `verbs` are imported and run; of the others `--help` has the summaries."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(root)
    for name, summary in VERBS.items():
        if name not in verbs:
            app.command(name, help=summary)(_is_not_imported)
            continue
        command = getattr(import_module(f"octetrl.cli.{name}"), "evaluate" if name == "eval" else name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=Command)(command if name in HANDLE_SIGTERM else terminable()(command))
    return app


def named_verb(arguments: Collection[str]) -> tuple[str, ...]:
    """The verb that a command line names, for `command_line`: its first word that is no option."""
    return tuple(word for word in arguments if not word.startswith("-"))[:1]


def _is_not_imported() -> None:
    raise AssertionError("a command that is not imported was run")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"octetrl {__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """RL post-training of language models with FP8 end to end."""


class Command(TyperCommand):
    """A command whose `--help` labels types with plain words, and cuts no name on a narrow terminal."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_optional_values(args))

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
            if show is not None:
                param.display_type_rich = partial(_label, param, show(ctx))
                allowed = param._get_number_range_help_str() or ""
                if len(allowed) > LONGEST_RANGE:  # its column would cut words of the help on 80 columns
                    param._get_number_range_help_str = str
        return params


class _FoldedTable(Table):
    """A long word continues in the next line; typer's own table ends it with an ellipsis. The first column is whole."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*cells, **options)
        self.columns[0].no_wrap = True
        for part in (part for cell in cells if isinstance(cell, Columns) for part in cell.renderables):
            if isinstance(part, Text):
                part.overflow = "fold"


def with_optional_values(words: Sequence[str]) -> list[str]:
    """The words of a command with one word for an option and the value that it may have: `--resume-auto`, and
    `--sample=0` of one without a number."""
    numbers = [*words[1:], ""]
    words = [
        f"{word}=0" if word in OPTIONAL_NUMBERS and not following.lstrip("-").isdigit() else word
        for word, following in zip(words, numbers, strict=False)
    ]
    made: list[str] = []
    for word in words:
        joins = bool(made) and (made[-1], word) in OPTIONAL_VALUES
        made[-1 if joins else len(made) :] = [f"{made[-1]}-{word}" if joins else word]
    plain = {f"{option}={value}": f"{option}-{value}" for option, value in OPTIONAL_VALUES}
    return [plain.get(word, word) for word in made]


def _label(param: Any, shown: str | None, ctx: Any) -> str:
    """Take the place of a parameter's method that returns its type's label."""
    if param.param_type_name == "argument":
        return ""
    if param.metavar:
        return str(param.metavar)
    name = (shown or "").strip("<>").removesuffix(" range")
    return _LABELS.get(name, name)
