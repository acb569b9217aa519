"""Arguments that several commands share: the recipe and its overrides, the device and the workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from octetrl.config.errors import UserError
from octetrl.config.schema import Precision

RecipePath = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A YAML file, or the name of a shipped recipe (`octetrl recipes` lists them).",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value]...",
        help="Fields that differ from the recipe, such as trainer.optimizer.lr=2e-6 or precision=bf16.",
        show_default=False,
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the GPU if there is one.")]
ChosenPrecision = Annotated[
    Precision | None,
    typer.Option(
        help="What is FP8. Default: as in the run's recipe; bf16 for a model that is no run.", show_default=False
    ),
]
Gpus = Annotated[int | None, typer.Option(min=1, help="Number of GPUs, each with a worker (docs/scale.md). Needs Ray.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="Number of workers on the CPU, instead of --gpus. Needs Ray.")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster of the workers: host:port, or auto. Default: Ray on this machine.")
]


def cluster_section(device: str, gpus: int | None, cpus: int | None, address: str | None) -> dict[str, Any]:
    """A recipe's section from these options. Raises UserError if this machine has not so many GPUs."""
    if gpus is not None and cpus is None and address is None:
        _refuse_lack(gpus)
    given = {"device": device, "gpus": gpus, "cpus": cpus, "address": address}
    return {name: value for name, value in given.items() if value is not None}


def _refuse_lack(gpus: int) -> None:
    import torch

    has = torch.cuda.device_count()
    if gpus > has:
        fewer = "lower it" if has else f"use --cpus {gpus} instead, leave it out"
        raise UserError(
            f"--gpus: {gpus} GPUs were asked for, this machine has {has}; {fewer}, or give the --address of a Ray"
            " cluster that has them"
        )
