"""The app with all commands; each command has its own file, which is imported when the command is asked for."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Annotated, NamedTuple

import typer

from octetrl.cli.usage import Command
from octetrl.system.process import terminable
from octetrl.version import __version__


class Verb(NamedTuple):
    """Where a command is, `module:function`, and its line in `octetrl --help`: its docstring."""

    place: str
    summary: str


VERBS = {
    "train": Verb(
        "train:train", "Train a model from a recipe: reinforcement learning, SFT, preferences or a reward model."
    ),
    "recipes": Verb(
        "recipes:recipes", "List the shipped recipes, or copy one. `octetrl train NAME` runs a shipped recipe as it is."
    ),
    "init": Verb(
        "init:init", "Create a project: recipe, environment, test and README. It trains a tiny model at once."
    ),
    "eval": Verb("eval:evaluate", "Evaluate runs or models on a recipe's held-out tasks."),
    "rollouts": Verb("rollouts:rollouts", "Show the rollouts of a run."),
    "metrics": Verb("metrics:metrics", "Explain the metrics of a run: their units, and what good and bad values are."),
    "report": Verb(
        "report:report",
        "Write a page about runs: what ran, curves, times, rollouts, differences. It needs no network.",
    ),
    "generate": Verb("generate:generate", "Generate text from a model or a run."),
    "serve": Verb(
        "serve:serve",
        "Serve a model with OpenAI's API: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.",
    ),
    "check": Verb("check:check", "Show what a recipe means, what it needs, and every problem it has."),
    "status": Verb("status:status", "Show what a run does: each of its workers and its memory, and the last step."),
    "doctor": Verb(
        "doctor:doctor",
        "Name the first op whose bits differ between engine and trainer; exit code 0 if none does, 1 if one does.",
    ),
    "export": Verb("export:export", "Write a run's last weights in Hugging Face format; adapters of LoRA are merged."),
    "demo": Verb(
        "demo:demo",
        "Train a tiny model by SFT and GRPO in emulated FP8, and print a table (6 to 13 minutes on two CPU cores).",
    ),
    "bench": Verb("bench:bench", "Measure a part of the system: a table, and JSON."),
}


HEAR_SIGTERM = ("train", "serve")  # with handlers of their own, which end a step, or the answers in work


def command_line(verbs: Collection[str] = VERBS) -> typer.Typer:
    """The app. Only the commands named in `verbs` are imported and run; of the others `--help` has the summaries."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(root)
    for name, (place, summary) in VERBS.items():
        if name not in verbs:
            app.command(name, help=summary)(_is_not_imported)
            continue
        module, _, function = place.partition(":")
        found = getattr(import_module(f"octetrl.cli.{module}"), function)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name, cls=Command)(found if name in HEAR_SIGTERM else terminable()(found))
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
