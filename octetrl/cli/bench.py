"""`octetrl bench ...`: how fast a part of the system is on this machine. Each verb prints a table and writes JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octetrl.cli.arguments import worker_problems
from octetrl.cli.bench_table import print_rows
from octetrl.cli.check import largest_part, policy_problems
from octetrl.cli.check_machine import find_device, missing_fp8, missing_gpu
from octetrl.cli.check_memory import MemoryPlan
from octetrl.cli.usage import Command
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.run.recipe_files import with_found_model
from octetrl.shapes.presets import PRESETS, refuse_unknown_model
from octetrl.system.errors import UserError
from octetrl.system.process import terminable
from octetrl.system.text import binary_size as size

if TYPE_CHECKING:
    from octetrl.bench.arms import Arm, Words
    from octetrl.bench.measure import Turn
    from octetrl.bench.rows import Row

Verb = Literal["rollout", "train", "step"]
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

        from octetrl.bench.arms import words_of_arms
        from octetrl.bench.measure import measure
        from octetrl.bench.rows import rows_of, warnings
        from octetrl.telemetry.provenance import write_result

        own, changes = recipe_and_changes(words or [], model, on_gpu=torch.cuda.is_available())
        usual = WORKLOADS[verb][own == RECIPES[False]] if own in RECIPES.values() else (None,)
        sizes = Sizes(workload or ((None,) if lengths is not None else usual), sigma, lengths)
        count = steps or STEPS[verb]
        chosen = words_of_arms(arms or [], arm or [])
        made = list(arms_of(verb, (own, changes, layers), chosen, sizes, count))
        for one in made:
            refuse_what_does_not_fit(one)
        make_folder(folder)  # now, so that minutes of measuring are not lost
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
        return recipe, [f"model.preset={model}", "model.init=random", "model.path=", *changes]
    return recipe, changes if model is None else [f"model.path={json.dumps(model)}", *changes]


def arms_of(
    verb: Verb, of: tuple[str, Sequence[str], int | None], arms: Sequence[Words], sizes: Sizes, steps: int
) -> Iterator[Arm]:
    """An arm for each workload and each list of overrides. `of`: recipe, overrides, layers. Raises UserError."""
    from octetrl.bench.arms import make_arm, with_layers
    from octetrl.bench.workload import recorded_workload, workload_of

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
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    if not there.is_dir():
        raise UserError(f"--out: '{folder}' can't be a folder ('{there}' is a file); give another")
    return folder


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot create the folder '{folder}' ({error.strerror}); give another") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out: cannot write in '{folder}' (Permission denied); give another folder")


def _say(number: int, turn: Turn) -> None:
    seconds = ", ".join(f"{one:.2f}" for one in turn.seconds)
    arm = f"{turn.arm.workload.name}  {turn.arm.recipe.precision} {turn.arm.name}".rstrip()
    typer.echo(f"round {number}  {arm}: steps of {seconds} s, after {turn.startup_seconds:.1f} s")


for verb, about in VERBS.items():
    bench.command(verb, cls=Command)(terminable()(command_of(verb, about)))  # what a verb started ends with it
