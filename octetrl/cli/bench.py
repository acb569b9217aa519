"""`octetrl bench ...`: how fast a part of the system is on this machine. Each verb prints a table and writes JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from octetrl.bench.arms import Arm, Verb, Words, make_arm, with_layers, words_of_arms
from octetrl.bench.workload import recorded_workload, workload_of
from octetrl.cli.arguments import worker_problems
from octetrl.cli.check import largest_part, policy_problems
from octetrl.cli.check_machine import find_device, missing_fp8, missing_gpu
from octetrl.cli.check_memory import MemoryPlan
from octetrl.cli.output import refuse_unmakeable, terminal_columns, writes
from octetrl.cli.verbs import Command
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.run.recipe_files import with_found_model
from octetrl.shapes.presets import PRESETS, refuse_unknown_model
from octetrl.system.errors import UserError
from octetrl.system.process import terminable
from octetrl.system.text import binary_size as size

if TYPE_CHECKING:
    from octetrl.bench.measure import Turn
    from octetrl.bench.rows import Row


RESULTS = Path("lab/results")
RECIPES = {True: "bench_qwen3-8b", False: "bench_tiny"}  # by whether there is a GPU
WORKLOADS: dict[Verb, tuple[tuple[str, ...], tuple[str, ...]]] = {  # of the two recipes, without --workload
    "rollout": (("128x512+4096", "256x512+1024"), ("8x16+32",)),
    "train": (("8x512+3584",), ("8x2+14",)),
    "step": (("512x512+2048-4096",), ("4x8+4-12",)),
}
VERBS: dict[Verb, str] = {
    "rollout": "Measure generation, beside what the memory's bandwidth allows.",
    "train": "Measure forward, backward and update.",
    "step": "Measure whole steps of a run: produce, learn, publish.",
}
STEPS: dict[Verb, int] = {"rollout": 1, "train": 3, "step": 1}  # timed, of a round
MOST_STEPS, MOST_ROUNDS = 1_000_000, 10_000
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")

Given = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [section.key=value]...",
        help="A recipe, and fields that differ from it. Default: bench_qwen3-8b, on a CPU bench_tiny.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="A preset (random weights) or a model's folder, in place of the recipe's model."),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Use only this many of a preset's layers.")]
Workloads = Annotated[
    list[str] | None,
    typer.Option(
        "--workload",
        metavar="REQUESTSxPROMPT+ANSWER",
        help="Answers, counted for each sibling, and their tokens, such as 128x512+4096 or 512x512+2048-4096. May be"
        " given several times. Default: of the recipe.",
    ),
]
Sigma = Annotated[
    float | None,
    typer.Option(min=0.0, max=3.0, help="Log-normal lengths with this sigma of the logarithm; ANSWER is their mean."),
]
Lengths = Annotated[
    str | None, typer.Option(metavar="FILE.jsonl", help="Lengths of a run's rollouts/step_NNNNNN.jsonl.")
]
Arms = Annotated[
    list[str] | None,
    typer.Option(
        "--arms",
        metavar="FIELD=A,B",
        help="Values of a recipe's field to compare, such as precision=bf16,fp8_full. Given again: all combinations.",
    ),
]
WholeArms = Annotated[
    list[str] | None,
    typer.Option(
        "--arm",
        metavar="'A=1 B=2'",
        help="An arm of several overrides; give it once for each arm.",
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, max=MOST_STEPS, help="Timed steps of a round, after short ones.")]
Rounds = Annotated[
    int,
    typer.Option(
        min=1,
        max=MOST_ROUNDS,
        help="Measurements of each arm. Every second round has the reverse order.",
    ),
]
Out = Annotated[
    str | None, typer.Option(metavar="FOLDER", help="Folder of the JSON. Default: lab/results if there, else here.")
]
Name = Annotated[str | None, typer.Option(help="The JSON is BENCH_MODEL_NAME.json. Default: BENCH_MODEL.json.")]

bench = typer.Typer()


@bench.callback()
def measure_a_part() -> None:
    """Measure a part of the system: a table, and JSON."""


def command_of(verb: Verb, help_text: str) -> Callable[..., None]:
    """The command of a verb; all have the same options."""

    def measure_arms(
        words: Given = None,
        model: Model = None,
        layers: Layers = None,
        workload: Workloads = None,
        sigma: Sigma = None,
        lengths: Lengths = None,
        arms: Arms = None,
        arm: WholeArms = None,
        steps: Steps = None,
        rounds: Rounds = 1,
        out: Out = None,
        name: Name = None,
    ) -> None:
        if model is not None:
            refuse_unknown_model(model)  # before torch is imported, which takes seconds
        folder, suffix = results_folder(out), result_suffix(name)
        import torch

        from octetrl.bench.measure import measure
        from octetrl.bench.rows import rows_of, warnings
        from octetrl.telemetry.provenance import write_result

        own, changes = recipe_and_changes(words or [], model, on_gpu=torch.cuda.is_available())
        usual = WORKLOADS[verb][own == RECIPES[False]] if own in RECIPES.values() else (None,)
        sizes = Sizes(workload or ((None,) if lengths is not None else usual), sigma, lengths)
        count = steps or STEPS[verb]
        chosen = words_of_arms(arms or [], arm or [])
        made = list(arms_of(verb, (own, changes, layers), chosen, sizes, count))
        for measured_arm in made:
            refuse_what_does_not_fit(measured_arm)
        with writes("--out", folder, "folder"):
            folder.mkdir(parents=True, exist_ok=True)  # now, so that minutes of measuring are not lost
        of_model = model_name(made[0].recipe, layers)
        rows: list[Row] = [{"model": of_model, **row} for row in rows_of(measure(made, count, rounds, _say))]
        print_rows(verb, f"{verb}, {of_model}", rows)
        for line in warnings(rows):
            typer.echo(f"warning: {line}", err=True)
        typer.echo(f"wrote {write_result(verb, of_model + suffix, rows, folder)}")

    measure_arms.__name__, measure_arms.__doc__ = verb, help_text
    return measure_arms


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the options say of the workload. `texts`: of `--workload`; None: the recipe's sizes."""

    texts: Sequence[str | None]
    sigma: float | None
    file: str | None


def recipe_and_changes(words: Sequence[str], model: str | None, *, on_gpu: bool) -> tuple[str, list[str]]:
    """The recipe and its overrides. Raises UserError."""
    named = [word for word in words if "=" not in word]
    if len(named) > 1:
        raise UserError(f"'{named[1]}' is a second recipe; give one, and section.key=value for what differs from it")
    small = model in PRESETS and model is not None and model.startswith("tiny")
    recipe = named[0] if named else RECIPES[on_gpu and not small]
    changes = [word for word in words if "=" in word]
    if model in PRESETS:
        nothing_to_read = "model.tokenizer=none"  # a bench of random weights has token ids and no text
        return recipe, [f"model.preset={model}", "model.init=random", "model.path=", nothing_to_read, *changes]
    return recipe, changes if model is None else [f"model.path={json.dumps(model)}", *changes]


def arms_of(
    verb: Verb, of: tuple[str, Sequence[str], int | None], arms: Sequence[Words], sizes: Sizes, steps: int
) -> Iterator[Arm]:
    """An arm for each workload and each list of overrides. `of`: recipe, overrides, layers. Raises UserError."""
    recipe, changes, layers = of
    if sizes.file is not None and (sizes.sigma is not None or sizes.texts != (None,)):
        raise UserError("--lengths: a file has all lengths; leave --workload and --sigma out")
    for text in sizes.texts:
        for words in arms:
            loaded = with_found_model(load_recipe(recipe, [*changes, *words]))
            spec = with_layers(loaded, layers)
            if sizes.file is not None:
                workload = recorded_workload(Path(sizes.file))
            else:
                workload = workload_of(loaded, text, sizes.sigma, spec.max_positions)
            yield make_arm(verb, words, loaded, spec, workload, steps)


def refuse_what_does_not_fit(arm: Arm) -> None:
    """Raise UserError if `octetrl check` would refuse the arm, or if it needs more memory than the device has."""
    device = find_device(arm.recipe, None)
    problems = [*missing_gpu(arm.recipe, device), *missing_fp8(arm.recipe, device)]
    problems += [*worker_problems(arm.recipe.cluster), *policy_problems(arm.recipe, arm.spec, arm.policy, device)]
    plan = MemoryPlan.of(arm.recipe, largest_part(arm.recipe, arm.spec), arm.policy, device)
    if arm.verb == "rollout":
        needed = plan.of_engine(arm.recipe).bytes_when("always")
        if device.num_bytes is not None and needed > device.num_bytes:
            problems.append(f"memory: the weights need {size(needed)} of {size(device.num_bytes)}; use a smaller model")
    elif (lacking := plan.problem(lambda _: True)) is not None:
        problems.append(lacking)
    if problems:
        raise UserError(problems[0] if not arm.words else f"{' '.join(arm.words)}: {problems[0]}")


def model_name(recipe: Recipe, layers: int | None) -> str:
    name = recipe.model.preset or Path(str(recipe.model.path)).resolve().name
    return name if layers is None else f"{name}_{layers}_layers"


def result_suffix(name: str | None) -> str:
    """The end of the result file's name. Raises UserError for a name that cannot be part of a file name."""
    if name is not None and _NAME.fullmatch(name) is None:
        given = f"--name: {name[:60]!r} cannot be part of a file name"
        raise UserError(f"{given}; give 1 to 64 letters, digits, '-', '_' or '.', not only dots, such as 256")
    return "" if name is None else f"_{name}"


def results_folder(out: str | None) -> Path:
    """Where the JSON goes. Raises UserError if no folder can be there."""
    if out is not None and not out.strip():
        raise UserError(f"--out: '{out}' is empty; give a folder, such as results, or leave it out")
    folder = Path(out) if out is not None else RESULTS if RESULTS.is_dir() else Path()
    refuse_unmakeable("--out", folder)
    return folder


def _say(number: int, turn: Turn) -> None:
    seconds = ", ".join(f"{second:.2f}" for second in turn.seconds)
    arm = f"{turn.arm.workload.name}  {turn.arm.recipe.precision} {turn.arm.name}".rstrip()
    typer.echo(f"round {number}  {arm}: steps of {seconds} s, after {turn.startup_seconds:.1f} s")


# ---------------------------------------------------------------- the table

WIDTH = 150  # of the legend, into a pipe
Figures = Mapping[str, tuple[str, str]]  # key of a row: heading, format
NAMES = ("precision", "arm", "workload")
FIGURES: Mapping[str, Figures] = {
    "rollout": {
        "rollout/tokens_per_second": ("tokens/s", ",.0f"),
        "rollout/speedup_over_bf16": ("to bf16", ".2f"),
        "rollout/efficiency": ("efficiency", ".1%"),
        "rollout/over_embedded": ("over embedded", ".1%"),
        "rollout/step_ms_p50": ("step ms p50", ".2f"),
        "rollout/step_ms_p99": ("step ms p99", ".2f"),
        "rollout/floor_tokens_per_second": ("bandwidth model tokens/s", ",.0f"),
        "rollout/floor_share": ("of bandwidth model", ".1%"),
        "rollout/kv_capacity_tokens": ("KV cache tokens", ",d"),
        "rollout/batch_occupancy": ("occupancy", ".1%"),
        "rollout/tail_share": ("tail", ".1%"),
        "rollout/idle_share": ("idle", ".1%"),
        "rollout/preemptions": ("preempted", "d"),
        "time/capture": ("capture s", ".2f"),
        "time/startup": ("start s", ".1f"),
        "memory/peak_gb": ("peak GB", ".1f"),
    },
    "train": {
        "train/tokens_per_second": ("tokens/s", ",.0f"),
        "train/speedup_over_bf16": ("to bf16", ".2f"),
        "train/efficiency": ("efficiency", ".1%"),
        "train/over_embedded": ("over embedded", ".1%"),
        "train/gradient_ms": ("fwd+bwd ms", ",.1f"),
        "train/whole_tokens_per_second": ("tokens/s whole", ",.0f"),
        "train/tflops": ("TFLOP/s", ".1f"),
        "train/ceiling_share": ("of 790", ".1%"),
        "train/optimizer_ms": ("optimizer ms", ",.1f"),
        "train/requantize_ms": ("requantise ms", ".2f"),
        "memory/peak_gb": ("peak GB", ".1f"),
        "memory/estimate_gb": ("estimate GB", ".1f"),
        "train/loss": ("loss", ".4f"),
        "time/startup": ("start s", ".1f"),
    },
    "step": {
        "time/step": ("step s", ",.2f"),
        "step/step_speedup_over_bf16": ("to bf16", ".2f"),
        "step/efficiency": ("efficiency", ".1%"),
        "step/over_embedded": ("over embedded", ".1%"),
        "step/speedup_over_both": ("to both", ".2f"),
        "step/tokens_per_second": ("tokens/s", ",.0f"),
        "time/produce": ("produce s", ",.2f"),
        "time/capture": ("capture s", ",.2f"),
        "produce/efficiency": ("produce efficiency", ".1%"),
        "step/produce_speedup_over_bf16": ("produce to bf16", ".2f"),
        "rollout/preemptions": ("preempted", ",.0f"),
        "time/learn": ("learn s", ",.2f"),
        "learn/efficiency": ("learn efficiency", ".1%"),
        "step/learn_speedup_over_bf16": ("learn to bf16", ".2f"),
        "train/beside_tail_share": ("beside tail", ".1%"),
        "step/wait_for_batch_share": ("wait for batch", ".1%"),
        "step/wait_for_weights_share": ("wait for weights", ".1%"),
        "step/publish_ms": ("publish ms", ",.1f"),
        "step/publish_gb_per_second": ("GB/s", ",.1f"),
        "publish/gather_ms": ("gather ms", ",.1f"),
        "time/publish_pause": ("pause s", ",.3f"),
        "rollout/staleness": ("staleness", ".2f"),
        "mismatch/token_mult_prob_error": ("mismatch", ".4f"),
        "mismatch/max_abs_diff": ("largest difference", ".2e"),
        "mismatch/age_0/max_abs_diff": ("of own weights", ".2e"),
        "mismatch/tokens": ("of tokens", ",.0f"),
        "memory/peak_gb": ("peak GB", ".1f"),
        "memory/learn_peak_gb": ("learn GB", ".1f"),
        "memory/estimate_gb": ("estimate GB", ".1f"),
        "time/startup": ("start s", ".1f"),
    },
}
LEGEND = {  # key of a figure: what it means
    "rollout/floor_share": "bandwidth model: decoding at 4.3 TB/s (H200). A step reads the weights of linears and"
    " lm_head once (of a mixture, the experts that have a row), and the live keys and values once for each sequence."
    " It is no lower bound: L2 serves some reads of a shared prompt. of bandwidth model: the model's time as a share of"
    " the measured one.",
    "rollout/tail_share": "tail: share of the decode time with less than half of the batch running.",
    "rollout/idle_share": "idle: share of the time in which a worker has no request left.",
    "train/tokens_per_second": "tokens/s: of forward and backward, of the median step; whole: with update and"
    " quantisation. TFLOP/s: the model's own, 6 x weights of linears x tokens (of a mixture, the chosen experts'),"
    " lm_head for trained tokens, causal attention 3.5 x its forward; recomputation is not counted.",
    "train/ceiling_share": "of 790: share of the TFLOP/s of a large BF16 GEMM on an H200.",
    "time/produce": "produce: generation, samples with random rewards, packing. learn: forward, backward, update, KV"
    " scales.",
    "time/capture": "capture: CUDA graphs of new batch sizes, a part of generation; a run captures them in each step.",
    "step/publish_ms": "publish: new weights on all workers, and the engines' check of them.",
    "step/publish_gb_per_second": "GB/s: of codes, or of what a worker receives.",
    "train/beside_tail_share": "beside tail: share of the tokens trained on before the last answer ended.",
    "mismatch/token_mult_prob_error": "mismatch: mean exp|engine - trainer| of log-probs, 1 if they are equal; then the"
    " largest difference, that of tokens which the trainer's own weights sampled, and the number of tokens.",
    "memory/learn_peak_gb": "learn: memory of learning, the KV cache freed.",
    "memory/estimate_gb": "estimate: a worker's training without the KV cache, by `octetrl check`.",
    "step/efficiency": "efficiency: speed of each worker compared with one worker on Ray. over embedded: time on one"
    " worker on Ray beyond that of the embedded one.",
    "time/startup": "start: until the first timed step, those before it included.",
}


def print_rows(verb: str, title: str, rows: Sequence[Row]) -> None:
    """Print a verb's rows: an arm in each column and a figure on each line, with what the figures mean.

    Arms that a terminal has no room for follow in further tables. Into a pipe all are in one. No figure is cut."""
    figures = {key: shown for key, shown in FIGURES[verb].items() if any(key in row for row in rows)}
    names = [name for name in NAMES if name == "precision" or len({row[name] for row in rows}) > 1]
    columns = terminal_columns()
    measure = Console(width=sys.maxsize).measure
    for each in range(len(rows), 0, -1):  # arms of a table
        parts = [_table(title, names, figures, rows[start : start + each]) for start in range(0, len(rows), each)]
        widths = [measure(part).maximum for part in parts]
        if columns is None or max(widths) <= columns or each == 1:
            break
    for part, width in zip(parts, widths, strict=True):
        Console(width=width).print(part)
    legend = " ".join(text for key, text in LEGEND.items() if key in figures)
    Console(width=columns or max(*widths, WIDTH)).print(legend, style="italic", highlight=False, markup=False)


def _table(title: str, names: Sequence[str], figures: Figures, rows: Sequence[Row]) -> Table:
    table = Table(title=title)
    table.add_column("\n".join(names), no_wrap=True)
    for row in rows:
        table.add_column("\n".join(str(row[name]) for name in names), justify="right", no_wrap=True)
    for key, (heading, form) in figures.items():
        table.add_row(heading, *[format(row[key], form) if key in row else "-" for row in rows])
    return table


for verb, about in VERBS.items():
    bench.command(verb, cls=Command)(terminable()(command_of(verb, about)))  # what a verb started ends with it
