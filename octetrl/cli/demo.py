"""`octetrl demo`: SFT and GRPO of a tiny model on a laptop (run/demo.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.train import last_saved_step
from octetrl.system.errors import Terminated
from octetrl.system.host import keep_freed_memory


def demo(
    to: Annotated[
        str, typer.Option("--to", metavar="DIR", help="The folder for the model and the runs.")
    ] = "runs/demo",
    again: Annotated[
        bool, typer.Option("--again", help="Start from the beginning instead of continuing a demo that was stopped.")
    ] = False,
) -> None:
    """Train a tiny model by SFT and GRPO in emulated FP8, and print a table (6 to 13 minutes on two CPU cores)."""
    keep_freed_memory(os.environ)
    from octetrl.run.demo import COLD_START, phases_of, run_demo

    try:
        run_demo(Path(to), again=again)
    except (KeyboardInterrupt, Terminated):
        begun = ("grpo", "sft") if COLD_START in phases_of(Path(to)) else ("sft",)  # the later phase first
        steps = {name: last_saved_step(Path(to) / name) for name in begun}
        saved = next((f"step {step} of {name} is saved" for name, step in steps.items() if step), "no step is saved")
        typer.echo(f"{saved}; the same command continues the demo", err=True)
        raise
