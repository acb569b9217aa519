"""Do they learn? One small task, one cold start, every objective with several seeds: its curve of rewards.

    python -m benchmarks.algorithms [--objectives grpo dapo ...] [--seeds 3] [--steps 24] [--folder runs/algorithms]

The demo's model learns sums by SFT, half of them worked and half with the bare result, then each objective trains it on
from there with the product's own loop, BF16, on a CPU: 8 answers to each of 12 prompts a step. Objectives that have an
effect only when ratios leave 1 take two updates a batch. DPO learns from pairs of a worked sum and a wrong guess; its
curve is the accuracy on held-out sums. Leaves

    benchmarks/results/algorithms_sums.json     a row an objective and seed, and the curves
    docs/pictures/algorithms.svg                a panel an objective: a thin line a seed, a thick one their mean

A run that ended is not run again: what is in `--folder` is taken up, the cold start too. `--render` only draws.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.curves import Curve, panels
from benchmarks.record import RESULTS
from octetrl.config.load import recipe_from_mapping
from octetrl.config.presets import preset_config
from octetrl.config.schema import Recipe
from octetrl.run import demo
from octetrl.run.build import build_environment, build_taskset
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.telemetry.bench_record import write_result

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
TWO_UPDATES: dict[str, Any] = {"trainer": {"minibatches": 2}}
PAIRS = "pairs.jsonl"  # in the folder: a sum worked out, and a guess that is off
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"algorithm": {"max_refills": 2, "overlong_buffer": 0.1}},
    "rloo": {"algorithm": {"constant_length": 64}},
    "gspo": {**TWO_UPDATES, "algorithm": {"clip_low": 0.02, "clip_high": 0.03}},
    "cispo": TWO_UPDATES,
    "reinforce_pp": {"rollout": {"prompts_per_step": 96, "group_size": 1}},
    "reinforce_pp_baseline": {},
    "dual_clip": TWO_UPDATES,
    "gspo_token": {**TWO_UPDATES, "algorithm": {"clip_low": 0.02, "clip_high": 0.03}},
    "sapo": TWO_UPDATES,
    "ppo": {
        "rollout": {"prompts_per_step": 96, "group_size": 1},
        "trainer": {"minibatches": 4},
        "algorithm": {"gae_lambda": 1.0},
        "critic": {"optimizer": {"lr": 3e-4, "warmup_steps": 3}, "pretrain_steps": 3},
    },
    "dpo": {"algorithm": {"conversations": PAIRS, "batch_size": 64}, "evaluation": {"every": 3}},
}
SHOWN = ("grpo", "dapo", "rloo", "gspo", "cispo", "reinforce_pp", "ppo", "dpo")  # without --objectives
BARE_SHARE = 0.5  # of the cold start's examples; its policy then guesses as often
MEASURES = {"rollouts": "reward/mean", "preferences": "eval/accuracy"}  # what a curve shows, by what is learnt from
ENDS = 4  # points that a first and a last value are means of
NUM_PAIRS = 1600
Row = dict[str, object]


def recipe_tree(folder: Path, arguments: argparse.Namespace, seed: int = 0) -> dict[str, Any]:
    """What all runs share."""
    return {
        "precision": "bf16",
        "model": {"path": str(folder / "start"), "context_length": 112},
        "rollout": {"prompts_per_step": 12, "group_size": 8, "max_prompt_tokens": 40, "max_new_tokens": 64},
        "engine": {"page_size": 32},
        "trainer": {
            "tokens_per_micro_batch": 4096,
            "activation_checkpointing": "none",
            "optimizer": {"lr": 2e-4, "warmup_steps": 3},
        },
        "environment": {
            "dataset": "chain_sum",
            "parameters": {"min_terms": 6, "max_terms": 7, "min_digits": 1, "max_digits": 1},
            "answer_marker": "####",
            "train_size": 20_000,
            "eval_size": 128,
        },
        "checkpoint": {"every": 0, "keep_last": 1},
        "cluster": {"device": "cpu"},
        "logging": {"console": "quiet", "tensorboard": False, "rollouts": False},
        "mismatch": {"warn_above": 1.5},
        "seed": seed,
        "steps": arguments.steps,
    }


def cold_start(folder: Path, arguments: argparse.Namespace) -> None:
    """Leaves the model at `folder/start`, once."""
    if (folder / "start" / "config.json").is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    tree = recipe_tree(folder, arguments)
    tree["model"]["path"] = str(folder / "random")
    tree["algorithm"] = {"name": "sft", "conversations": str(folder / "examples.jsonl"), "batch_size": 64}
    tree["trainer"]["optimizer"] = {"lr": 3e-3, "warmup_steps": 10, "decay": "linear", "min_lr_fraction": 0.1}
    recipe = recipe_from_mapping(tree | {"steps": arguments.sft_steps, "output_dir": str(folder / "sft")})
    demo.make_model_and_examples(recipe, preset_config("tiny"), BARE_SHARE)
    train(recipe)
    write_pairs(folder / PAIRS, recipe)
    export_run(recipe.output_dir, str(folder / "start"))


def write_pairs(path: Path, recipe: Recipe) -> None:
    """What DPO learns from, of the task's own training prompts."""
    chance = random.Random(0)
    taskset = build_taskset(build_environment(recipe.environment), recipe.environment)
    with path.open("w", encoding="utf-8") as file:
        for task in taskset.next_batch(NUM_PAIRS):
            assert task.answer is not None, "a sum has an answer"
            guess = int(task.answer) + chance.choice([-3, -2, -1, 1, 2, 3])
            pair = {"prompt": task.prompt, "chosen": demo.worked_answer(task), "rejected": f"#### {guess}"}
            file.write(json.dumps(pair) + "\n")


def run_arm(folder: Path, arguments: argparse.Namespace, objective: str, seed: int) -> tuple[Row, list[Row]]:
    """One objective from one seed: its row and its curve; read from the folder when it was run before."""
    kept = folder / f"{objective}_{seed}_{arguments.steps}.json"
    if not kept.is_file():
        tree = recipe_tree(folder, arguments, seed) | {"output_dir": str(folder / f"{objective}_{seed}")}
        for section, fields in OBJECTIVES[objective].items():
            tree[section] = tree.get(section, {}) | fields
        tree["algorithm"] = {"name": objective} | tree.get("algorithm", {})
        if "conversations" in tree["algorithm"]:
            tree["algorithm"]["conversations"] = str(folder / tree["algorithm"]["conversations"])
        recipe = recipe_from_mapping(tree)
        shutil.rmtree(recipe.output_dir, ignore_errors=True)  # of a run that was cut off
        began = time.perf_counter()
        train(recipe)
        seconds = time.perf_counter() - began
        lines = [json.loads(line) for line in (Path(recipe.output_dir) / "metrics.jsonl").read_text().splitlines()]
        measure = MEASURES[recipe.algorithm.learns_from]
        points = [(line["step"], line[measure]) for line in lines if measure in line]
        values = [value for _, value in points]
        row: Row = {
            "precision": "bf16",
            "workload": f"{objective}, seed {seed}",
            "objective": objective,
            "seed": seed,
            "steps": len(lines),
            "measure": measure,
            "first": statistics.fmean(values[:ENDS]),
            "last": statistics.fmean(values[-ENDS:]),
            "eval/accuracy": evaluate_checkpoint(recipe.output_dir, recipe).accuracy,
            "seconds": seconds,
        }
        curve = [{"objective": objective, "seed": seed, "step": step, measure: value} for step, value in points]
        shutil.rmtree(recipe.output_dir)
        kept.write_text(json.dumps({"row": row, "curve": curve}))
    found = json.loads(kept.read_text())
    return found["row"], found["curve"]


def picture(curves: Sequence[Mapping[str, Any]]) -> str:
    """A panel an objective, in the order of `OBJECTIVES`."""
    lines: dict[str, list[Curve]] = {}
    for name in OBJECTIVES:
        seeds = sorted({point["seed"] for point in curves if point["objective"] == name})
        points = [[p for p in curves if (p["objective"], p["seed"]) == (name, seed)] for seed in seeds]
        if points:
            measure = next(measure for measure in MEASURES.values() if measure in points[0][0])
            title = name if measure == "reward/mean" else f"{name}, held-out accuracy"
            lines[title] = [[(p["step"], p[measure]) for p in one] for one in points]
    return panels(lines, x="step", y="mean reward")


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(title="One task, one cold start: mean over the seeds")
    for name in ("objective", "seeds", "first steps", "last steps", "held-out accuracy", "s a run"):
        table.add_column(name)
    for objective in dict.fromkeys(row["objective"] for row in rows):
        own = [row for row in rows if row["objective"] == objective]
        means = [statistics.fmean(row[name] for row in own) for name in
                 ("first", "last", "eval/accuracy", "seconds")]  # fmt: skip
        table.add_row(objective, str(len(own)), *(f"{mean:.3f}" for mean in means[:3]), f"{means[3]:.0f}")
    Console(width=120).print(table)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(OBJECTIVES), default=list(SHOWN))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--sft-steps", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    parser.add_argument("--render", action="store_true", help="draw what `--out` holds, and run nothing")
    arguments = parser.parse_args(words)
    if arguments.render:
        curves = json.loads((arguments.out / "algorithms_sums.json").read_text())["curves"]
    else:
        cold_start(arguments.folder, arguments)
        rows, curves = [], []
        for seed in range(arguments.seeds):  # seed by seed, so that a run cut short has all objectives
            for objective in arguments.objectives:
                row, curve = run_arm(arguments.folder, arguments, objective, seed)
                rows.append(row)
                curves += curve
                print(f"{row['workload']}: {row['first']:.3f} -> {row['last']:.3f}", flush=True)
        show(rows)
        print(f"wrote {write_result('algorithms', 'sums', rows, arguments.out, curves=curves)}")
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    (arguments.pictures / "algorithms.svg").write_text(picture(curves))
    print(f"wrote {arguments.pictures / 'algorithms.svg'}")


if __name__ == "__main__":
    main()
