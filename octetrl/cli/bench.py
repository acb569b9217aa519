"""`octetrl bench ...`: how fast a part of the system is on this machine. Each verb prints a table and writes JSON."""

from __future__ import annotations

import typer

from octetrl.cli.bench_rollout import rollout
from octetrl.cli.bench_step import step
from octetrl.cli.bench_train import train

bench = typer.Typer()


@bench.callback()
def measure_a_part() -> None:
    """Measure a part of the system: a table, and JSON."""


bench.command("rollout")(rollout)
bench.command("train")(train)
bench.command("step")(step)
