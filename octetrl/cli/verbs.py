"""All verbs of the command line in one app; each is a file of its own."""

from __future__ import annotations

import typer

from octetrl.cli.bench import bench
from octetrl.cli.check import check
from octetrl.cli.demo import demo
from octetrl.cli.doctor import doctor
from octetrl.cli.eval import evaluate
from octetrl.cli.export import export
from octetrl.cli.generate import generate
from octetrl.cli.rollouts import rollouts
from octetrl.cli.serve import serve
from octetrl.cli.train import train

app = typer.Typer(
    help="RL post-training of language models with FP8 end to end.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train)
app.command("eval")(evaluate)
app.command("rollouts")(rollouts)
app.command("generate")(generate)
app.command("serve")(serve)
app.command("check")(check)
app.command("doctor")(doctor)
app.command("export")(export)
app.command("demo")(demo)
app.add_typer(bench, name="bench")
