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
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DIR", help="The folder to write; new, or empty.", show_default=False),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="For a run with LoRA: the adapter alone, in PEFT's format, not merged.")
    ] = False,
    fp8: Annotated[
        bool,
        typer.Option("--fp8", help="Write the linears as block-FP8, or MXFP8 as the run, which vLLM and others read."),
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub", metavar="NAME", help="Upload it to this repository, with a model card.", show_default=False
        ),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="Branch to upload to.", show_default=False)
    ] = None,
    tag: Annotated[
        str | None, typer.Option("--tag", metavar="TAG", help="Tag to give to the upload.", show_default=False)
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model", metavar="NAME", help="For the card: the hub's name of the first model.", show_default=False
        ),
    ] = None,
) -> None:
    """Write a run's last weights in Hugging Face format, and upload them if asked."""
    if to is None and push_to_hub is None:
        raise UserError("export: nowhere to write; give --to DIR, --push-to-hub NAME, or both")
    if push_to_hub is None and (private or revision or tag or base_model):
        raise UserError("export: --private, --revision, --tag and --base-model belong to --push-to-hub NAME; give it")
    refuse_no_model(run)
    if to is not None:
        _refuse_target(to)
    from octetrl.models.peft_adapters import is_adapter, read_adapter_config
    from octetrl.run.export import export_run
    from octetrl.run.hub import HubTarget, push_run

    if push_to_hub is not None:
        target = HubTarget(push_to_hub, private, revision, tag, base_model)
        typer.echo(f"uploaded {push_run(run, to, target, adapter=adapter, fp8=fp8)}")
    if to is None:
        return
    if push_to_hub is None:
        export_run(run, to, adapter=adapter, fp8=fp8)
    written = Path(to)
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
