"""`octetrl bench ...`: how fast a part of the system is on this machine. Each verb prints a table and writes JSON."""

from __future__ import annotations

import typer

from octetrl.cli.bench_rollout import rollout
from octetrl.cli.bench_step import step
from octetrl.cli.bench_train import train
from octetrl.cli.usage import Command
from octetrl.system.sigterm import terminable

bench = typer.Typer()


@bench.callback()
def measure_a_part() -> None:
    """Measure a part of the system: a table, and JSON."""


for verb in (rollout, train, step):
    bench.command(verb.__name__, cls=Command)(terminable()(verb))  # what a verb started ends with it
