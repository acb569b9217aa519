"""`octetrl export`: a run's weights as a Hugging Face folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.output import refuse_unmakeable
from octetrl.run.model_source import refuse_no_model
from octetrl.system.errors import UserError


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The folder to write; new, or empty.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="For a run with LoRA: write only the adapter, in PEFT's format.")
    ] = False,
    fp8: Annotated[
        bool,
        typer.Option("--fp8", help="Write the linears as block-FP8 (E4M3, 128 x 128), which vLLM and others read."),
    ] = False,
) -> None:
    """Write a run's last weights in Hugging Face format; adapters of LoRA are merged."""
    refuse_no_model(run)
    _refuse_target(to)
    from octetrl.models.peft_adapters import is_adapter, read_adapter_config
    from octetrl.run.export import export_run

    written = export_run(run, to, adapter=adapter, fp8=fp8)
    typer.echo(f"wrote {written}")
    if is_adapter(written) and read_adapter_config(written).lora.experts:
        typer.echo(
            "warning: PEFT with transformers 5 leaves out the adapters of experts, without an error; for other programs"
            " export the merged model, without --adapter",
            err=True,
        )


def _refuse_target(to: str) -> None:
    """Raise UserError for a folder that can't be written, before torch is imported."""
    if not to.strip():
        raise UserError("--to: is empty; give the folder to write, such as exported")
    target = Path(to)
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"--to: '{target}' exists and is not empty; give a new folder")
    refuse_unmakeable("--to", target)
