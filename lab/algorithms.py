"""Trains one small task by every objective, from the same cold start and with several seeds: do they learn?

    python -m lab.algorithms [--objectives grpo dapo ...] [--seeds 3] [--steps 30] [--jobs 2]

The demo's model first learns sums by SFT; a quarter of the examples show the steps, the others only the result. Then
the recipes `recipes/demo_<objective>.yaml` continue from there, with FP8 emulated on a CPU. Only their number of steps
is changed. For objectives that learn from rollouts the curve is the mean reward. For those that learn from pairs
(`examples/preference_pairs.py`) it is the accuracy on held-out sums. It writes

    lab/results/algorithms_sums.json     a row per objective and seed, and the curves
    docs/pictures/algorithms.svg                a panel per objective: a thin line per seed, a thick mean

Runs that are complete in `--folder` are not repeated, and neither is the cold start. `--render` only draws.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from examples.preference_pairs import NUM_PAIRS, write_pairs
from lab.curves import Curve, panels
from lab.record import RESULTS, show, write_result
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.config.shipped import shipped_path
from octetrl.run.demo import make_model_and_examples
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.shapes.presets import preset_config

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
PAIRS = "pairs.jsonl"  # in the folder
SHOWN = ("grpo", "dapo", "rloo", "gspo", "cispo", "reinforce_pp", "ppo", "dpo")  # without --objectives
OBJECTIVES = (*SHOWN, "dr_grpo", "dual_clip", "gspo_token", "sapo", "reinforce_pp_baseline", "ipo")
MEASURES = {"rollouts": "reward/mean", "preferences": "eval/accuracy"}  # what a curve shows, by what is learnt from
EVALUATED_EVERY = 3  # steps, where the curve is of evaluations
ENDS = 4  # points of rewards that a first and a last value are means of
Row = dict[str, object]


def cold_start(folder: Path, sft_steps: int | None) -> None:
    """Leaves the model at `folder/start`, once: the demo's, or after fewer steps."""
    if (folder / "start" / "config.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    changes = [
        f"model.path={folder / 'random'}",
        f"algorithm.conversations={folder / 'examples.jsonl'}",
        f"output_dir={folder / 'sft'}",
        *quietly(),
        *([] if sft_steps is None else [f"steps={sft_steps}"]),
    ]
    recipe = load_recipe(shipped_path("demo_sft"), changes)
    make_model_and_examples(recipe, preset_config("tiny"))
    train(recipe)
    export_run(recipe.output_dir, str(folder / "start"))


def recipe_of(objective: str, seed: int, folder: Path, arguments: argparse.Namespace) -> Recipe:
    """The objective's recipe, from this cold start and seed."""
    path = shipped_path(f"demo_{objective}")
    changes = [
        f"model.path={folder / 'start'}",
        f"output_dir={folder / f'{objective}_{seed}'}",
        f"seed={seed}",
        f"steps={arguments.steps}",
        *quietly(),
    ]
    if arguments.jobs > 1:
        changes.append("cluster.cpu_threads=1")
    if load_recipe(path).algorithm.learns_from == "preferences":
        changes += [f"algorithm.conversations={folder / PAIRS}", f"evaluation.every={EVALUATED_EVERY}"]
    return load_recipe(path, changes)


def quietly() -> list[str]:
    """Overrides that leave out files and output that no reader needs."""
    return ["cluster.device=cpu", "logging.console=quiet", "logging.tensorboard=false", "logging.rollouts=false"]


def run_arm(folder: Path, arguments: argparse.Namespace, arm: tuple[str, int]) -> tuple[Row, list[Row]]:
    """One objective from one seed: its row and its curve; read from the folder when it was run before."""
    objective, seed = arm
    kept = folder / f"{objective}_{seed}_{arguments.steps}.json"
    if not kept.is_file():
        recipe = recipe_of(objective, seed, folder, arguments)
        shutil.rmtree(recipe.output_dir, ignore_errors=True)  # of a run that was cut off
        began = time.perf_counter()
        train(recipe)
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (Path(recipe.output_dir) / "metrics.jsonl").read_text().splitlines()]
        measure = MEASURES[recipe.algorithm.learns_from]
        points = [(line["step"], line[measure]) for line in lines if line.get(measure) is not None]
        values = [value for _, value in points]
        ends = ENDS if measure == "reward/mean" else 1
        row: Row = {
            "precision": recipe.precision,
            "workload": f"{objective}, seed {seed}",
            "objective": objective,
            "seed": seed,
            "steps": len(lines),
            "measure": measure,
            "first": statistics.fmean(values[:ends]),
            "last": statistics.fmean(values[-ends:]),
            "eval/accuracy": evaluate_checkpoint(recipe.output_dir, recipe).accuracy,
            "mismatch/max_abs_diff": max((line.get("mismatch/max_abs_diff") or 0.0 for line in lines), default=0.0),
            "seconds": seconds,
        }
        curve = [{"objective": objective, "seed": seed, "step": step, measure: value} for step, value in points]
        shutil.rmtree(recipe.output_dir)
        kept.write_text(json.dumps({"row": row, "curve": curve}))
    found = json.loads(kept.read_text())
    row = found["row"]
    print(f"{row['workload']}: {row['first']:.3f} -> {row['last']:.3f} in {row['seconds']:.0f} s", flush=True)
    return row, found["curve"]


def run_arms(arguments: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """Seed by seed, so that a bench cut short has all objectives; `jobs` at a time."""
    folder = arguments.folder
    cold_start(folder, arguments.sft_steps)
    if not (folder / PAIRS).is_file():
        write_pairs(folder / PAIRS, NUM_PAIRS)
    arms = [(objective, seed) for seed in range(arguments.seeds) for objective in arguments.objectives]
    run = partial(run_arm, folder, arguments)
    if arguments.jobs == 1:
        results = list(map(run, arms))
    else:
        spawn = multiprocessing.get_context("spawn")  # torch's threads would not survive a fork
        with ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
            results = list(pool.map(run, arms))
    return [row for row, _ in results], [point for _, curve in results for point in curve]


def picture(curves: Sequence[Mapping[str, Any]]) -> str | None:
    """A panel an objective, in the order of `OBJECTIVES`. None: there is no measured step."""
    lines: dict[str, list[Curve]] = {}
    for name in OBJECTIVES:
        seeds = sorted({point["seed"] for point in curves if point["objective"] == name})
        points = [[p for p in curves if (p["objective"], p["seed"]) == (name, seed)] for seed in seeds]
        if points:
            measure = next(measure for measure in MEASURES.values() if measure in points[0][0])
            title = name if measure == "reward/mean" else f"{name}, held-out accuracy"
            lines[title] = [[(p["step"], p[measure]) for p in one] for one in points]
    return panels(lines, x="step", y="mean reward")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(SHOWN))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sft-steps", type=int, help="of the cold start; without it the demo's")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, each on one thread")
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    parser.add_argument("--render", action="store_true", help="draw what `--out` holds, and run nothing")
    arguments = parser.parse_args(words)
    if arguments.render:
        curves = json.loads((arguments.out / "algorithms_sums.json").read_text())["curves"]
    else:
        rows, curves = run_arms(arguments)
        show(rows, "one task, one cold start")
        print(f"wrote {write_result('algorithms', 'sums', rows, arguments.out, curves=curves)}")
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    drawn = picture(curves)
    if drawn is None:
        print("no picture: no run has a measured step")
        return
    (arguments.pictures / "algorithms.svg").write_text(drawn)
    print(f"wrote {arguments.pictures / 'algorithms.svg'}")


if __name__ == "__main__":
    main()
