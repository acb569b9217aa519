"""Arguments that several commands share: the recipe and its overrides, the device and the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer

from octetrl.config.cluster import ClusterConfig
from octetrl.config.in_words import local_lack
from octetrl.config.limits import MOST_GPUS
from octetrl.config.rules_running import cluster_problems
from octetrl.config.schema import Precision
from octetrl.system.errors import UserError

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
ChatTemplate = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Jinja chat template in place of the model's own; default: the model's.",
        show_default=False,
    ),
]
Gpus = Annotated[int | None, typer.Option(min=1, help="Number of GPUs, each with a worker (docs/scale.md). Needs Ray.")]
Cpus = Annotated[int | None, typer.Option(min=1, help="Number of workers on the CPU, instead of --gpus. Needs Ray.")]
Address = Annotated[
    str | None, typer.Option(help="Ray cluster of the workers: host:port, or auto. Default: Ray on this machine.")
]


OPTIONS = {"cluster.address": "--address", "cluster.gpus": "--gpus", "cluster.cpus": "--cpus"}


def worker_problems(cluster: ClusterConfig) -> Iterator[str]:
    """What `octetrl train` would refuse on this machine."""
    if cluster.starts_ray and cluster.num_gpus:
        import torch

        lack = local_lack(cluster, torch.cuda.device_count())
        if lack is not None:
            yield lack


def cluster_section(device: str, gpus: int | None, cpus: int | None, address: str | None) -> dict[str, Any]:
    """A recipe's section from these options. Raises UserError if this machine has fewer GPUs."""
    given = {"device": device, "gpus": gpus, "cpus": cpus, "address": address}
    section: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if gpus is not None and gpus <= MOST_GPUS:
        cluster = ClusterConfig(**section)
        for problem in worker_problems(cluster) if not any(cluster_problems(cluster)) else ():
            raise UserError(in_options(problem))
    return section


def in_options(text: str) -> str:
    """A recipe's problem in the words of the options."""
    for field, option in OPTIONS.items():
        text = text.replace(field, option)
    return text.replace("remove it", "leave it out")
