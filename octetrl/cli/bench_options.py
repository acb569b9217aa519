"""What the commands of `octetrl bench` share: options, checks of their values, and the table."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octetrl.config.errors import UserError, nearest
from octetrl.config.load import PRECISIONS
from octetrl.config.presets import refuse_unknown_model
from octetrl.config.schema import Numerics, TrainerConfig

if TYPE_CHECKING:
    import torch

    from octetrl.bench.model import BenchModel
    from octetrl.bench.turns import Row

RESULTS = Path("benchmarks/results")
TABLE_WIDTH = 150
NUMERICS: tuple[Numerics, ...] = ("parity", "fast")
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")


def _known_model(model: str | None) -> str | None:
    if model is not None:
        refuse_unknown_model(model)  # before torch is imported, which takes seconds
    return model


Model = Annotated[
    str | None,
    typer.Option(
        help="A preset (random weights) or a Hugging Face folder. Default: qwen3-8b; on a CPU tiny.",
        callback=_known_model,
    ),
]
PrecisionList = Annotated[str, typer.Option("--precision", help="Precisions to compare.")]
Rounds = Annotated[
    int,
    typer.Option(
        min=1, help="Measurements of each precision. Every second round has the reverse order, against drift."
    ),
]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Use only this many of the model's layers, for a small machine.")
]
MaxBatch = Annotated[int, typer.Option(min=1, help="Largest number of sequences decoded together.")]
KVFraction = Annotated[float, typer.Option(min=0.01, max=0.95, help="Share of the free memory for the KV cache.")]
Sigma = Annotated[
    float | None,
    typer.Option(min=0.0, max=3.0, help="lognormal: standard deviation of the logarithm of the length. Default: 0.7."),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the JSON. Default: benchmarks/results if there, else here.")]
Name = Annotated[
    str | None,
    typer.Option(help="The JSON is BENCH_MODEL_NAME.json. Default: BENCH_MODEL.json, with the numerics if not parity."),
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights, prompts, lengths and sampling.")]
Checkpointing = Annotated[
    str,
    typer.Option(
        metavar="none|attention|layer[:N]", help="What the forward keeps for the backward; :N: only the first N layers."
    ),
]
STATES, MASTER = "8bit", "stochastic_rounding"  # with a recipe's float32 of both, 8 billion parameters fill an H200
States = Annotated[
    str,
    typer.Option("--optimizer-states", help="Format of the moments: float32 (a recipe's default), bfloat16 or 8bit."),
]
Master = Annotated[str, typer.Option(help="Master weights: float32 (a recipe's default) or stochastic_rounding.")]
SUMS = "float32"
GradientSums = Annotated[
    str,
    typer.Option("--gradient-sums", help="Format of the gradient sums: float32, or bfloat16 in half of the memory."),
]
CODES = "kept"
WeightCodes = Annotated[
    str,
    typer.Option(
        help="FP8 codes of the weights: kept in memory, or remade for each product. remade trains in BF16's memory."
    ),
]
Offload = Annotated[bool, typer.Option("--offload", help="Keep moments and masters in host memory.")]
NumericsList = Annotated[
    str,
    typer.Option(
        "--numerics",
        metavar="parity,fast",
        help="parity: one order of sums on both sides. fast: faster forms of some ops. Give both to compare.",
    ),
]
RouterSkew = Annotated[
    float,
    typer.Option(
        metavar="ZIPF",
        min=0.0,
        max=4.0,
        help="Mixtures of experts: loads of experts follow Zipf's law with this exponent. 0: the model's routers.",
    ),
]
LogprobChunk = Annotated[int, typer.Option(min=1, help="Number of trained tokens whose logits exist at once.")]


def choices(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names in a comma-separated list, each allowed and given once."""
    names = tuple(text.split(","))
    for name in names:
        if name not in allowed:
            raise UserError(f"{option}: '{name}' is not one of {', '.join(allowed)}{nearest(name, allowed)}")
    if len(set(names)) < len(names):
        again = "; repeat all of them with --rounds" if option == "--precision" else "; name each once"
        raise UserError(f"{option}: '{text}' names a value twice{again}")
    return names


def precisions_of(text: str) -> tuple[str, ...]:
    return choices("--precision", text, tuple(PRECISIONS))


def numerics_of(text: str) -> tuple[Numerics, ...]:
    names = choices("--numerics", text, NUMERICS)
    return tuple(one for name in names for one in NUMERICS if one == name)


def result_suffix(name: str | None, numerics: tuple[Numerics, ...] = ("parity",)) -> str:
    """The end of the result file's name: `--name`, or the numerics if they are not `parity` alone. Raises UserError
    for a name that cannot be part of a file name."""
    if name is None:
        return "" if numerics == ("parity",) else "_" + "_".join(numerics)
    if _NAME.fullmatch(name) is None:
        given = f"--name: {name[:60]!r} cannot be part of a file name"
        raise UserError(f"{given}; give 1 to 64 letters, digits, '-', '_' or '.', not only dots, such as 256")
    return f"_{name}"


def results_folder(out: Path | None) -> Path:
    folder = out or (RESULTS if RESULTS.is_dir() else Path())
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out: '{folder}' is a file; give a folder")
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise UserError(f"--out: cannot create the folder '{folder}' ('{there}' is a file); give another")
    return folder


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot create the folder '{folder}' ({error.strerror}); give another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out: cannot write in '{folder}' (Permission denied); give another folder")


def device_of(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    from octetrl.config.schema import ClusterConfig
    from octetrl.run.device import resolve_device

    return resolve_device(ClusterConfig(device=device))


def model_of(model: str | None, layers: int | None, *, on_gpu: bool) -> BenchModel:
    from octetrl.bench.model import find_model

    try:
        found = find_model(model if model is not None else "qwen3-8b" if on_gpu else "tiny")
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith("--model: ") else f"--model: {said}") from None
    return with_layers(found, layers)


def with_layers(model: BenchModel, layers: int | None) -> BenchModel:
    """The model with only its first layers; its name says how many."""
    from dataclasses import replace

    if layers is None or layers == model.spec.num_layers:
        return model
    if layers > model.spec.num_layers:
        raise UserError(f"--layers: {layers} were requested, but {model.name} has {model.spec.num_layers}; give fewer")
    if model.folder is not None:
        raise UserError(f"--layers: '{model.name}' is a folder with weights of its own; give a preset, or leave it out")
    return replace(model, name=f"{model.name}_{layers}_layers", spec=replace(model.spec, num_layers=layers))


def check_checkpointing(trainer: TrainerConfig, model: BenchModel) -> None:
    """Raise UserError if more layers would be checkpointed than the model has."""
    layers, has = trainer.checkpointed_layers, model.spec.num_layers
    if layers is not None and layers > has:
        given = f"--checkpointing: '{trainer.activation_checkpointing}:{layers}' is for {layers} layers"
        raise UserError(f"{given} and {model.name} has {has}; give 0 to {has}, or leave the number out for all")


def choice_of(option: str, text: str, allowed: Sequence[str]) -> str:
    """Check that the name is allowed, and return it."""
    if text not in allowed:
        raise UserError(f"{option}: '{text}' is not one of {', '.join(allowed)}{nearest(text, allowed)}")
    return text


def print_table(
    title: str,
    names: Sequence[str],
    columns: Mapping[str, tuple[str, str]],
    rows: Iterable[Row],
    legend: str | None = None,
) -> None:
    """`names`: keys of the text columns; `columns`: key of a row -> heading and format. A missing figure is `-`."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption=legend, caption_justify="left")
    for heading in names:
        table.add_column(heading.rpartition("/")[2], no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [format(row[key], form) if key in row else "-" for key, (_, form) in columns.items()]
        table.add_row(*[str(row[name]) for name in names], *cells)
    needed = Console(width=TABLE_WIDTH * 4).measure(table).maximum  # a cell that is cut is a figure that is lost
    Console(width=max(TABLE_WIDTH, needed)).print(table)
