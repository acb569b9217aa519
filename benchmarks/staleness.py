"""Learning curves and times of one recipe when generating runs K policy versions ahead of training.

    octetrl demo                                               # once: the model of demo_grpo
    python -m benchmarks.staleness --staleness 0,1,2,4 --seeds 3 --steps 60
    python -m benchmarks.staleness --gpus 1,1 --in-flight recompute_cache --recipe RECIPE fp8.kv_cache=dynamic

Every arm (a K and a seed) is `octetrl train` with the recipe, on workers that only train and workers that only generate
(`--cpus` or `--gpus`: how many of each). The arms run one after another, so that their times can be compared; a seed's
arms follow each other, and every second seed runs them in reverse order. Only K, the seed, the number of steps, the
evaluation interval and what is written to the disk differ from the recipe. `--seconds` stops the sweep after the arm
during which the time is over; the result has the arms that ended. Leaves `benchmarks/results/staleness_NAME.json`:

    rows    one per arm and step: precision, workload, staleness, in_flight, seed, step, seconds (of the arm's steps up
            to this one, without evaluations), eval/accuracy (only where evaluated), reward/mean, rollout/staleness,
            rollout/on_policy_share, time/step, time/wait_for_batch, time/wait_for_weights, time/publish_pause
    arms    one per arm: precision, workload, staleness, in_flight, seed, steps, seconds, eval/accuracy (the last)
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, write_result
from octetrl.config.errors import UserError
from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.telemetry.sinks import METRICS_FILE

SHOWN = (
    "eval/accuracy", "reward/mean", "rollout/staleness", "rollout/on_policy_share", "time/step", "time/wait_for_batch",
    "time/wait_for_weights", "time/publish_pause",
)  # fmt: skip
Row = dict[str, object]


def changes_of(arguments: argparse.Namespace, staleness: int, seed: int, folder: Path) -> list[str]:
    """What differs from the recipe. The caller's own `key=value` words come last and win."""
    kind = "cpus" if arguments.gpus is None else "gpus"
    trainers, engines = arguments.cpus if arguments.gpus is None else arguments.gpus
    in_flight = [f"cluster.weights_in_flight={arguments.in_flight}"] if staleness else []
    return [
        f"cluster.trainer_{kind}={trainers}",
        f"cluster.engine_{kind}={engines}",
        f"cluster.max_staleness={staleness}",
        *in_flight,
        f"seed={seed}",
        f"steps={arguments.steps}",
        f"evaluation.every={arguments.eval_every}",
        f"output_dir={json.dumps(str(folder))}",
        "checkpoint.every=0",
        "logging.tensorboard=false",
        "logging.rollouts=false",
        *arguments.changes,
    ]


def run_arm(arguments: argparse.Namespace, staleness: int, seed: int, folder: Path) -> list[Row]:
    """Train one arm. Returns its rows. Raises UserError with the end of its output if it fails."""
    recipe = arguments.recipe if Path(arguments.recipe).is_file() else str(shipped_path(arguments.recipe))
    changes = changes_of(arguments, staleness, seed, folder)
    loaded = load_recipe(recipe, changes)  # refuses a wrong recipe before anything starts
    log = folder.with_suffix(".log")
    with log.open("wb") as file:
        command = [sys.executable, "-m", "octetrl", "train", recipe, *changes]
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise UserError(f"K = {staleness}, seed {seed} ended with {code}: {log.read_text(errors='replace')[-600:]}")
    own: Row = {
        "precision": loaded.precision,
        "workload": f"{loaded.rollout.prompts_per_step}x{loaded.rollout.group_size}",
        "staleness": staleness,
        "in_flight": arguments.in_flight if staleness else "off",
        "seed": seed,
    }
    rows, seconds = [], 0.0
    for metrics in map(json.loads, (folder / METRICS_FILE).read_text().splitlines()):
        seconds += metrics["time/step"]
        shown = {name: metrics[name] for name in SHOWN if metrics.get(name) is not None}
        rows.append(own | {"step": metrics["step"], "seconds": round(seconds, 2), **shown})
    return rows


def arm_of(rows: Sequence[Row]) -> Row:
    """An arm's row, from those of its steps."""
    names = ("precision", "workload", "staleness", "in_flight", "seed")
    evaluated = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    last = {"eval/accuracy": evaluated[-1]} if evaluated else {}
    return {name: rows[0][name] for name in names} | {"steps": len(rows), "seconds": rows[-1]["seconds"], **last}


def show(arms: Sequence[Row], rows: Sequence[Row]) -> None:
    """The means over seeds, by K."""
    table = Table(title="Means over seeds")
    for heading in ("K", "arms", "s", "age of a token", "on-policy share", "last accuracy"):
        table.add_column(heading)

    def mean(name: str, among: Sequence[Row]) -> str:
        values = [float(str(row[name])) for row in among if name in row]
        return f"{statistics.fmean(values):.3f}" if values else "-"

    for staleness in sorted({int(str(arm["staleness"])) for arm in arms}):
        own = [arm for arm in arms if arm["staleness"] == staleness]
        steps = [row for row in rows if row["staleness"] == staleness]
        table.add_row(
            str(staleness),
            str(len(own)),
            mean("seconds", own),
            mean("rollout/staleness", steps),
            mean("rollout/on_policy_share", steps),
            mean("eval/accuracy", own),
        )
    Console().print(table)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo_grpo")
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--cpus", type=numbers, default=[1, 1], help="workers that train, workers that generate")
    parser.add_argument("--gpus", type=numbers, default=None, help="the same on GPUs")
    parser.add_argument("--in-flight", choices=("off", "recompute_cache", "keep_cache"), default="off")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--name", default=None, help="of the result; default: the recipe's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("changes", nargs="*", help="key=value, as for octetrl train")
    arguments = parser.parse_args()
    began, rows, arms = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as work:
        for seed in range(arguments.seeds):
            for staleness in arguments.staleness[:: -1 if seed % 2 else 1]:
                if time.monotonic() - began > arguments.seconds:
                    break
                own = run_arm(arguments, staleness, seed, Path(work) / f"{staleness}_{seed}")
                rows += own
                arms.append(arm_of(own))
                print(json.dumps(arms[-1]), flush=True)
    show(arms, rows)
    name = arguments.name or Path(arguments.recipe).stem
    print(write_result("staleness", name, rows, arguments.out, arms=arms))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"benchmarks.staleness: {error}", file=sys.stderr)
        raise SystemExit(2) from None
