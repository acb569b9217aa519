"""`octetrl export`: a run's weights as a Hugging Face folder that transformers loads."""

from __future__ import annotations

from typing import Annotated

import typer

from octetrl.run.early import refuse_no_model


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The folder to write; new, or empty.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="For a run with LoRA: write only the adapter, in PEFT's format.")
    ] = False,
) -> None:
    """Write a run's last weights in Hugging Face format; adapters of LoRA are merged."""
    refuse_no_model(run)
    from octetrl.run.export import export_run

    typer.echo(f"wrote {export_run(run, to, adapter=adapter)}")
