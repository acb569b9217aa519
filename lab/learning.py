"""Learning curves of one recipe under several settings and seeds, trained side by side.

    python -m lab.learning RECIPE [section.key=value ...] --arms precision=bf16,fp8_full --seeds 3 --state FOLDER
    python -m lab.learning demo_grpo cluster.trainer_cpus=1 cluster.engine_cpus=1 --arms cluster.max_staleness=0,1,2,4

Every run is `octetrl train` with the recipe, the words, an arm's values and a seed; `--arms` again makes all
combinations. The accuracy at step 0 comes from `octetrl eval`. `--jobs` runs share a GPU, or the CPU; give each a cache
of a fixed size then (engine.kv_cache_tokens), and compare by step: times of runs that ran together are no speeds. The
same command continues runs that the clock stopped (jobs.py). Leaves `lab/results/learning_NAME.json`, and `--curve
FILE` draws the accuracy by step, a panel for each arm:

    rows    one per run and step: precision, workload, arm, staleness, seed, step, seconds (of the steps up to this one,
            without evaluations), and of the metrics those of SHOWN
    arms    one per run: precision, workload, arm, seed, steps, seconds, eval/accuracy (the last), equal_time/seconds
            (those of the run that ended first), equal_time/accuracy (interpolated for that time)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lab.curves import panels
from lab.jobs import Job, run_jobs
from lab.record import RESULTS, refuse_name, run_command, write_result
from octetrl.bench.arms import words_of_arms
from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.system.errors import UserError
from octetrl.telemetry.sinks import METRICS_FILE

SHOWN = (
    "eval/accuracy", "reward/mean", "mismatch/max_abs_diff", "mismatch/tokens", "rollout/staleness",
    "rollout/on_policy_share", "time/step", "time/wait_for_batch", "time/wait_for_weights", "time/publish_pause",
)  # fmt: skip
Row = dict[str, object]


@dataclass(frozen=True)
class Run:
    """An arm with a seed."""

    recipe: str
    changes: tuple[str, ...]
    arm: str
    seed: int
    folder: Path
    steps: int

    @property
    def jobs(self) -> list[Job]:
        name = self.folder.name
        before = ("octetrl", "eval", str(load_recipe(self.recipe, self.changes).model.path), "--recipe", self.recipe)
        train = ("octetrl", "train", self.recipe, *self.changes)
        resume = ("--resume",) if (self.folder / "checkpoints").is_dir() else ()
        return [
            Job(f"{name}_before", (*before, "--out", str(self._before), *self.changes), self._before.exists),
            Job(name, (*train, *resume), lambda: len(self.metrics()) == self.steps),
        ]

    @property
    def _before(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}_before.json")

    def metrics(self) -> list[dict[str, float]]:
        file = self.folder / METRICS_FILE
        whole = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
        return [json.loads(line) for line in whole]

    def rows(self) -> list[Row]:
        recipe = load_recipe(self.recipe, self.changes)
        own: Row = {
            "precision": recipe.precision,
            "workload": f"{recipe.rollout.prompts_per_step}x{recipe.rollout.group_size}",
            "arm": self.arm,
            "staleness": recipe.cluster.max_staleness,
            "seed": self.seed,
        }
        rows = []
        if self._before.exists():
            (model,) = json.loads(self._before.read_text())["models"]
            rows.append(own | {"step": 0, "seconds": 0.0, "eval/accuracy": model["estimates"]["accuracy"]["mean"]})
        seconds = 0.0
        for step in self.metrics():
            seconds += step["time/step"]
            shown = {name: step[name] for name in SHOWN if step.get(name) is not None}
            rows.append(own | {"step": step["step"], "seconds": round(seconds, 2), **shown})
        return rows


def accuracy_at(seconds: float, rows: Sequence[Row]) -> float | None:
    """Held-out accuracy after so many seconds of a run's steps, on the lines between its evaluations. None: the time
    lies before the first evaluation or after the last."""
    points = [(float(str(row["seconds"])), float(str(row["eval/accuracy"]))) for row in rows if "eval/accuracy" in row]
    for (before, low), (after, high) in pairwise(points):
        if before <= seconds <= after:
            return low + (high - low) * (seconds - before) / (after - before)
    return None


def summaries(ended: Sequence[Sequence[Row]]) -> list[Row]:
    shortest = min(float(str(rows[-1]["seconds"])) for rows in ended)
    found = []
    for rows in ended:
        accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
        at_equal_time = accuracy_at(shortest, rows)
        row: Row = {name: rows[0][name] for name in ("precision", "workload", "arm", "staleness", "seed")}
        row |= {"steps": rows[-1]["step"], "seconds": rows[-1]["seconds"]}
        row |= {"eval/accuracy": accuracies[-1]} if accuracies else {}
        row |= {} if at_equal_time is None else {"equal_time/seconds": shortest, "equal_time/accuracy": at_equal_time}
        found.append(row)
        print(json.dumps(row))
    return found


def curve_of(ended: Sequence[Sequence[Row]]) -> str | None:
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for rows in ended:
        points = [(float(str(row["step"])), float(str(row["eval/accuracy"]))) for row in rows if "eval/accuracy" in row]
        if len(points) > 1:
            curves.setdefault(str(rows[0]["arm"]), []).append(points)
    return panels(curves, x="step", y="held-out accuracy")


def common(arguments: argparse.Namespace, seed: int, folder: Path) -> tuple[str, ...]:
    return (
        f"seed={seed}",
        f"steps={arguments.steps}",
        f"evaluation.every={arguments.eval_every}",
        f"output_dir={json.dumps(str(folder))}",
        f"checkpoint.every={arguments.eval_every}",
        "checkpoint.keep_last=1",
        "checkpoint.keep_best=0",
        "logging.tensorboard=false",
        "logging.rollouts=false",
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a shipped name or a file")
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    parser.add_argument("--arms", action="append", default=[], metavar="FIELD=A,B", help="settings to compare")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once on each GPU, or on the CPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after this time nothing runs any more")
    parser.add_argument("--state", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--curve", type=Path, help="SVG of the accuracy by step")
    parser.add_argument("--name", help="of the result; default: the recipe's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_intermixed_args(words)
    name = arguments.name or Path(arguments.recipe).stem
    refuse_name(name)
    recipe = arguments.recipe if Path(arguments.recipe).is_file() else str(shipped_path(arguments.recipe))
    runs = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for arm in words_of_arms(arguments.arms):
            folder = arguments.state / "_".join([*(word.replace("=", "_") for word in arm), str(seed)])
            changes = (*common(arguments, seed, folder), *arguments.changes, *arm)
            load_recipe(recipe, changes)  # a wrong one is refused before the first begins
            runs.append(Run(recipe, changes, " ".join(arm), seed, folder, arguments.steps))
    jobs = [job for run in runs for job in run.jobs]
    failures = run_jobs(jobs, arguments.state / "logs", at_once=arguments.jobs, seconds=arguments.seconds)
    ended = [rows for run in runs if len(rows := run.rows()) > 1]
    if not ended:
        raise UserError(f"no run has a step; {' '.join(failures[:1])}")
    rows = [row for own in ended for row in own]
    print(f"wrote {write_result('learning', name, rows, arguments.out, arms=summaries(ended))}")
    drawn = curve_of(ended)
    if arguments.curve is not None and drawn is not None:
        arguments.curve.write_text(drawn)


if __name__ == "__main__":
    run_command("learning", main)
