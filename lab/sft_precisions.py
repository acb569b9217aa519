"""Trains one model by SFT under several precisions from the same starts: does FP8 reach BF16's final loss?

    python -m lab.sft_precisions [--steps 500] [--seeds 3]
    python -m lab.sft_precisions --variants bf16 fp8 fp8_tokens=fp8,wgrad_blocks=tokens

A model of 126 million parameters learns worked sums (run/demo.py) with the trainer, optimizer and schedule of a run. A
seed sets the weights and the order of the data. With one seed, every precision has the same weights and the same
batches. A variant is NAME[=PRECISION[,KEY=VALUE...]]: a `precision` and fields of the recipe's section `fp8`.

    final loss     mean over the last 20 steps
    seed noise     sample standard deviation of BF16's final losses over the seeds
    verdict        "within" if |mean over the seeds of (final loss - BF16's of that seed)| <= seed noise

The differences are paired, so noise that all precisions of a seed share cancels. The seed noise keeps it: the format
may change the loss as much as another seed would. One seed has no verdict. The exit status is 1 if a variant is outside
or a loss is not finite.
"""

from __future__ import annotations

import argparse
import gc
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.precisions import model_shape, sft_tree
from lab.record import RESULTS, need_hopper, write_result
from octetrl.algorithms.table import build_algorithm
from octetrl.config.algorithm import SftConfig
from octetrl.config.load import PRECISIONS, recipe_from_mapping
from octetrl.config.schema import Fp8Config, Recipe
from octetrl.data.mixture import Mixture, read_source
from octetrl.data.tokenizer import load_tokenizer
from octetrl.fp8.backends import choose_backend
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.records import PackedBatch
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.run import demo
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.trainer import Trainer

BASELINE = "bf16"
LAST = 20  # steps that a final loss is the mean of
POINTS = 50  # of a loss curve as it is kept
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Variant:
    """A name for the table and the formats behind it."""

    name: str
    fp8: Fp8Config

    @classmethod
    def of(cls, name: str, precision: str, **overrides: Any) -> Variant:
        return cls(name, Fp8Config(**(PRECISIONS[precision] | overrides)))


def parse_variant(text: str) -> Variant:
    """NAME[=PRECISION[,KEY=VALUE...]]; without a precision the name is one. For argparse."""
    name, _, formats = text.partition("=")
    precision, *fields = (formats or name).split(",")
    try:
        if precision not in PRECISIONS:
            raise ValueError(f"'{precision}' is not one of {', '.join(PRECISIONS)}")
        pairs = [field.partition("=") for field in fields]
        return Variant.of(name, precision, **{key: yaml.safe_load(value) for key, _, value in pairs})
    except ValueError as error:  # pydantic's included
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


# ---------------------------------------------------------------- what all variants share


def sft_recipe(folder: Path, arguments: argparse.Namespace) -> Recipe:
    tree = sft_tree(folder, arguments)
    tree["steps"] = arguments.steps
    tree["algorithm"]["batch_size"] = arguments.batch
    return recipe_from_mapping(tree)


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """config.json of the model, made narrower or shallower on demand."""
    shape = model_shape(arguments)
    if arguments.layers is not None:
        shape["num_hidden_layers"] = arguments.layers
    if arguments.hidden is not None:
        shape |= {"hidden_size": arguments.hidden, "intermediate_size": 3 * arguments.hidden}
    return shape


@dataclass(frozen=True, slots=True)
class Start:
    """One seed's weights and batches."""

    seed: int
    weights: Mapping[str, Tensor]
    batches: Sequence[PackedBatch]


def make_start(recipe: Recipe, spec: ModelSpec, seed: int, device: torch.device) -> Start:
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train", device=device)
    model.random_init(seed)
    folder = str(recipe.model.path)
    sources = [read_source(name, source, "conversations") for name, source in recipe.sources.items()]
    order = Mixture(sources, ChatTokens(load_tokenizer(folder)), seed=seed)
    layout = PackingLayout(recipe.trainer.tokens_per_micro_batch, padded_attention=device.type == "cpu")
    weighting = build_algorithm(recipe.algorithm).token_weighting
    assert isinstance(recipe.algorithm, SftConfig), "its precisions are compared in supervised steps"
    size = recipe.algorithm.batch_size
    batches = [pack(order.next_batch(size), layout, weighting) for _ in range(recipe.steps)]
    return Start(seed, {name: parameter.detach() for name, parameter in model.named_parameters()}, batches)


# ---------------------------------------------------------------- one run


def train_once(variant: Variant, start: Start, recipe: Recipe, spec: ModelSpec, device: torch.device) -> list[float]:
    """The loss of every step."""
    backend = choose_backend(device) if variant.fp8.train else "emulated"
    model = Decoder(spec, precision_policy(spec, variant.fp8), "train", device=device, backend=backend)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start.weights[name])
    model.requantize()
    trainer = Trainer(
        model,
        config=recipe.trainer,
        algorithm=build_algorithm(recipe.algorithm),
        temperature=1.0,
        total_steps=recipe.steps,
        seed=start.seed,
    )
    return [trainer.train(batch, KVReplay(), None).metrics["loss"] for batch in start.batches]


def thinned(losses: Sequence[float], points: int = POINTS) -> list[tuple[int, float]]:
    """Means of equal stretches, each under its last step's number."""
    width = max(1, math.ceil(len(losses) / points))
    return [
        (min(first + width, len(losses)), statistics.fmean(losses[first : first + width]))
        for first in range(0, len(losses), width)
    ]


# ---------------------------------------------------------------- the verdict


def verdicts(finals: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row for each variant, from its final losses in the order of the seeds. The module's docstring has the rule."""
    plain = finals[BASELINE]
    rows: list[Row] = []
    for name, losses in finals.items():
        differences = [ours - theirs for ours, theirs in zip(losses, plain, strict=True)]
        mean = statistics.fmean(differences)
        row: Row = {"precision": name, "workload": f"{len(losses)} seeds", "loss/final": statistics.fmean(losses)}
        row |= {"loss/difference": mean, "loss/largest_difference": max(differences, key=abs), "verdict": "none"}
        if len(losses) > 1:
            noise = spread(plain)
            row |= {"loss/spread": spread(losses), "loss/seed_noise": noise}
            row["verdict"] = "within" if abs(mean) <= noise else "outside"
        if not all(map(math.isfinite, losses)):
            row["verdict"] = "outside"
        elif name == BASELINE:
            row["verdict"] = "baseline"
        rows.append(row)
    return rows


def spread(losses: Sequence[float]) -> float:
    """Sample standard deviation; NaN where a loss is not finite."""
    return statistics.stdev(losses) if all(map(math.isfinite, losses)) else math.nan


def show(rows: Sequence[Row], finals: Mapping[str, Sequence[float]]) -> None:
    table = Table(title=f"SFT: mean loss of the last {LAST} steps")
    seeds = range(len(next(iter(finals.values()))))
    for name in (
        "precision",
        *(f"seed {seed}" for seed in seeds),
        "mean",
        "spread",
        "difference",
        "largest",
        "verdict",
    ):
        table.add_column(name)
    for row in rows:
        each = [f"{loss:.5f}" for loss in finals[str(row["precision"])]]
        ends = [f"{row[f'loss/{name}']:+.5f}" for name in ("difference", "largest_difference")]
        middle = [f"{row.get(f'loss/{name}', math.nan):.5f}" for name in ("final", "spread")]
        table.add_row(str(row["precision"]), *each, *middle, *ends, str(row["verdict"]))
    Console(width=150).print(table)


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", type=parse_variant, default=[*map(parse_variant, (BASELINE, "fp8"))])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="conversations of a step, about 100 tokens each")
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    parser.add_argument("--hidden", type=int, help="hidden size; the intermediate size is three times that")
    parser.add_argument("--tiny", action="store_true", help="the demo's model, on any machine")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(words)
    arguments.sft_steps, arguments.verbose = arguments.steps, False  # what `sft_tree` asks
    names = [variant.name for variant in arguments.variants]
    if BASELINE not in names or len(set(names)) < len(names):
        parser.error(f"--variants: {' '.join(names)}; '{BASELINE}' must be among them, each name once")
    if min(arguments.steps, arguments.seeds, arguments.batch) < 1:
        parser.error("--steps, --seeds and --batch must be at least 1")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = arguments_of(words)
    if not arguments.tiny:
        need_hopper("sft_precisions", ", or with --tiny")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = Path(tempfile.mkdtemp(prefix="octetrl-sft-"))
    rows: list[Row] = []
    curves: list[Row] = []
    finals: dict[str, list[float]] = {variant.name: [] for variant in arguments.variants}
    try:
        recipe = sft_recipe(folder, arguments)
        demo.make_model_and_examples(recipe, shape_of(arguments))
        spec = load_spec(folder / "random")
        for seed in range(arguments.seeds):
            start = make_start(recipe, spec, seed, device)
            for variant in arguments.variants:
                began = time.perf_counter()
                losses = train_once(variant, start, recipe, spec, device)
                finals[variant.name].append(statistics.fmean(losses[-LAST:]))
                curves += [
                    {"precision": variant.name, "seed": seed, "step": step, "loss": loss}
                    for step, loss in thinned(losses)
                ]
                row: Row = {"precision": variant.name, "workload": f"seed {seed}", "steps": len(losses)}
                row |= {"loss/first": losses[0], "loss/final": finals[variant.name][-1]}
                row["seconds"] = time.perf_counter() - began
                rows.append(row)
                print(
                    {name: round(cell, 5) if isinstance(cell, float) else cell for name, cell in row.items()},
                    flush=True,
                )
                gc.collect()  # trainer and hooks hold each other
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary = verdicts(finals)
    show(summary, finals)
    noise = summary[0].get("loss/seed_noise")
    print("seed noise: " + ("unknown from one seed" if noise is None else f"{noise:.5f}"))
    name = "tiny" if arguments.tiny else "126m"
    path = write_result("sft", name, rows + summary, arguments.out, curves=curves)
    print(f"wrote {path}")
    return 1 if any(row["verdict"] == "outside" for row in summary) else 0


if __name__ == "__main__":
    raise SystemExit(main())
