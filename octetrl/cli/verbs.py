"""The app with all commands; each command has its own file."""

from __future__ import annotations

from typing import Annotated

import typer

import octetrl
from octetrl.cli.bench import bench
from octetrl.cli.check import check
from octetrl.cli.demo import demo
from octetrl.cli.doctor import doctor
from octetrl.cli.eval import evaluate
from octetrl.cli.export import export
from octetrl.cli.generate import generate
from octetrl.cli.init import init
from octetrl.cli.metrics import metrics
from octetrl.cli.recipes import recipes
from octetrl.cli.report import report
from octetrl.cli.rollouts import rollouts
from octetrl.cli.serve import serve
from octetrl.cli.status import status
from octetrl.cli.train import train
from octetrl.cli.usage import Command

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train", cls=Command)(train)
app.command("recipes", cls=Command)(recipes)
app.command("init", cls=Command)(init)
app.command("eval", cls=Command)(evaluate)
app.command("rollouts", cls=Command)(rollouts)
app.command("metrics", cls=Command)(metrics)
app.command("report", cls=Command)(report)
app.command("generate", cls=Command)(generate)
app.command("serve", cls=Command)(serve)
app.command("check", cls=Command)(check)
app.command("status", cls=Command)(status)
app.command("doctor", cls=Command)(doctor)
app.command("export", cls=Command)(export)
app.command("demo", cls=Command)(demo)
app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"octetrl {octetrl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """RL post-training of language models with FP8 end to end."""
