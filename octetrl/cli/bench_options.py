"""What the commands of `octetrl bench` share: options, and checks of their values."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octetrl.config.load import PRECISIONS
from octetrl.config.schema import EngineConfig, TrainerConfig
from octetrl.config.section import Section
from octetrl.shapes.presets import refuse_unknown_model
from octetrl.system.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

    from octetrl.bench.model import BenchModel
    from octetrl.bench.turns import Row
    from octetrl.config.cluster import ClusterConfig

RESULTS = Path("lab/results")
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")


def most_of(section: type[Section], field: str) -> int:
    """The upper limit of a recipe's field, for the option that sets it."""
    limits = (getattr(one, "le", None) for one in section.model_fields[field].metadata)
    return next(limit for limit in limits if limit is not None)


MOST_STEPS = 1_000_000  # of a round. A recipe allows more, so the untimed steps fit beside them
MOST_ROUNDS = 10_000


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
        min=1,
        max=MOST_ROUNDS,
        help="Measurements of each precision. Every second round has the reverse order, against drift.",
    ),
]
Layers = Annotated[
    int | None, typer.Option(min=1, help="Use only this many of the model's layers, for a small machine.")
]
MaxBatch = Annotated[
    int,
    typer.Option(min=1, max=most_of(EngineConfig, "max_batch"), help="Largest number of sequences decoded together."),
]
KVFraction = Annotated[float, typer.Option(min=0.01, max=0.95, help="Share of the free memory for the KV cache.")]
Sigma = Annotated[
    float | None,
    typer.Option(min=0.0, max=3.0, help="lognormal: standard deviation of the logarithm of the length. Default: 0.7."),
]
Out = Annotated[
    str | None,
    typer.Option(metavar="FOLDER", help="Folder of the JSON. Default: lab/results if there, else here."),
]
Name = Annotated[
    str | None,
    typer.Option(help="The JSON is BENCH_MODEL_NAME.json. Default: BENCH_MODEL.json."),
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
LogprobChunk = Annotated[
    int,
    typer.Option(
        min=1, max=most_of(TrainerConfig, "logprob_chunk"), help="Number of trained tokens whose logits exist at once."
    ),
]

PrefillChunk = Annotated[
    int | None,
    typer.Option(
        min=16,
        max=most_of(EngineConfig, "prefill_chunk"),
        help="Tokens of prompts in one forward. Default: a recipe's.",
    ),
]


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


def refuse_empty(option: str, text: str, allowed: str) -> None:
    """Raise UserError if the value is empty. `allowed`: what to give instead."""
    if not text.strip():
        raise UserError(f"{option}: '{text}' is empty; give {allowed}, or leave it out")


def precisions_of(text: str) -> tuple[str, ...]:
    return choices("--precision", text, tuple(PRECISIONS))


def result_suffix(name: str | None) -> str:
    """The end of the result file's name, from `--name`. Raises UserError for a name that cannot be part of a file
    name."""
    if name is None:
        return ""
    if _NAME.fullmatch(name) is None:
        given = f"--name: {name[:60]!r} cannot be part of a file name"
        raise UserError(f"{given}; give 1 to 64 letters, digits, '-', '_' or '.', not only dots, such as 256")
    return f"_{name}"


def results_folder(out: str | None) -> Path:
    if out is not None:
        refuse_empty("--out", out, "a folder, such as results, or '.' for this one")
    folder = Path(out) if out is not None else RESULTS if RESULTS.is_dir() else Path()
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


def device_of(device: Literal["auto", "cpu", "cuda"], cluster: ClusterConfig | None = None) -> torch.device:
    """The device of this process or of the workers. Raises UserError if it is a GPU and there is none."""
    import torch

    from octetrl.config.schema import ClusterConfig
    from octetrl.run.device import resolve_device

    if device == "cuda" and cluster is not None and not torch.cuda.is_available():
        raise UserError(
            f"--gpus: {cluster.num_workers} GPUs were requested, but this machine has no usable GPU; use --cpus"
            f" {cluster.num_workers}, where FP8 is emulated, or install a CUDA build of torch"
        )
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


def shown(columns: Mapping[str, tuple[str, str]], rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    """The columns that some row has a figure for."""
    return {key: column for key, column in columns.items() if any(key in row for row in rows)}


def legend_of(parts: Iterable[tuple[str, str]], columns: Iterable[str]) -> str:
    """The sentences of the columns that are shown. `parts`: key of a column, or nothing, and what to say."""
    keys = set(columns)
    return " ".join(text for key, text in parts if not key or key in keys)
