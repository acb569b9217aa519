"""Learning curves and times of one recipe when generating runs K policy versions ahead of training.

    octetrl demo                                               # once: the model of demo_grpo
    python -m lab.staleness --staleness 0,1,2,4,8 --seeds 3 --steps 60 --state runs/staleness
    python -m lab.staleness --gpus 1,1 --in-flight recompute_cache --recipe RECIPE fp8.kv_cache=dynamic
    python -m lab.staleness --gpus 1,1 --jobs 4 cluster.workers_per_gpu=2    # all arms on one GPU

Every arm (a K and a seed) is `octetrl train` with the recipe, on workers that only train and workers that only generate
(`--cpus` or `--gpus`: how many of each). With `--jobs 1` the arms run one after another, so that their times can be
compared; a seed's arms follow each other, and every second seed runs them in reverse order. With more, arms run side by
side and share a GPU: accuracies by step can be compared, and times at most between arms that ran together. Only K, the
seed, the number of steps, the evaluation interval and what is written to the disk differ from the recipe.

`--state FOLDER` keeps the arms' run folders. The same command then continues: an arm that ended is not run again, an
arm that was stopped or failed is resumed from its last checkpoint. A folder whose run has another recipe than the
command gives that arm is refused. `--seconds` stops the sweep; the result has the arms
that ended. Leaves `lab/results/staleness_NAME.json`, and `--curve FILE` draws the accuracy by step as SVG:

    rows    one per arm and step: precision, workload, staleness, in_flight, jobs, seed, step, seconds (of the arm's
            steps up to this one, without evaluations), eval/accuracy (only where evaluated), reward/mean,
            rollout/staleness, rollout/on_policy_share, time/step, time/wait_for_batch, time/wait_for_weights,
            time/publish_pause
    arms    one per arm: precision, workload, staleness, in_flight, jobs, seed, steps, seconds, eval/accuracy (last),
            equal_time/seconds (those of the arm that ended first), equal_time/accuracy (interpolated for that time)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lab.command import at_least, held_signals, listed, run_command, seconds
from lab.curves import panels
from lab.record import RESULTS, refuse_name, write_result
from lab.study.refusals import made_folder
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.config.shipped import shipped_path
from octetrl.run.recipe_model import with_found_model
from octetrl.system.errors import UserError
from octetrl.system.json_file import parse_json, shown
from octetrl.telemetry.report_data import is_number
from octetrl.telemetry.sinks import METRICS_FILE

SHOWN = (
    "eval/accuracy", "reward/mean", "rollout/staleness", "rollout/on_policy_share", "time/step", "time/wait_for_batch",
    "time/wait_for_weights", "time/publish_pause",
)  # fmt: skip
POLL_SECONDS = 0.2
MOST_SEEDS = 1000
STOP_SECONDS = 25.0  # of a run between Ctrl-C and its end
RECIPE_FILE = "config.yaml"  # of a run's folder
ANYWHERE = ("output_dir", "logging")  # fields that may differ: they change no figure of an arm
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
        f"checkpoint.every={arguments.eval_every}",
        "checkpoint.keep_last=1",
        "logging.tensorboard=false",
        "logging.rollouts=false",
        *arguments.changes,
    ]


@dataclass(slots=True)
class Arm:
    """A K and a seed. `folder`: of its run; its output lies beside it."""

    staleness: int
    seed: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def has_ended(self, steps: int) -> bool:
        """Whether the run has all its steps."""
        return self.process is None and len(self.lines()) == steps

    def lines(self) -> list[dict[str, float]]:
        """The metrics of its steps, without a line that a killed run has not written to its end. UserError: a line is
        not that of its step."""
        file = self.folder / METRICS_FILE
        if not file.exists():
            return []
        whole = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return [metrics_of(line, number, file) for number, line in enumerate(whole, 1)]

    def recipe(self, arguments: argparse.Namespace) -> Recipe:
        return load_recipe(recipe_file(arguments), changes_of(arguments, self.staleness, self.seed, self.folder))

    def check(self, arguments: argparse.Namespace) -> None:
        """Raises UserError for a wrong recipe, or for a folder that holds the run of another one."""
        recipe, saved = self.recipe(arguments), self.folder / RECIPE_FILE
        if saved.exists():
            self._refuse_other(recipe, load_recipe(saved))
        elif (self.folder / METRICS_FILE).exists():
            raise UserError(
                f"--state: '{self.folder}' holds {METRICS_FILE} but no {RECIPE_FILE}, so its arm is unknown;"
                f" restore {RECIPE_FILE}, or delete the folder"
            )

    def _refuse_other(self, recipe: Recipe, saved: Recipe) -> None:
        if recipe.model != saved.model:  # a run saves the folder of a model that the recipe names in another way
            recipe = with_found_model(recipe, weights=False)
        for field, there, here in differences(saved.model_dump(mode="json"), recipe.model_dump(mode="json")):
            if field.partition(".")[0] not in ANYWHERE:
                raise UserError(
                    f"--state: '{self.folder}' holds a run of another arm: {field} is {shown(there)} there and"
                    f" {shown(here)} here; give the command that began the sweep, or another --state"
                )

    def start(self, arguments: argparse.Namespace) -> None:
        """Begin or resume the run."""
        changes, recipe = changes_of(arguments, self.staleness, self.seed, self.folder), recipe_file(arguments)
        resume = ["--resume"] if (self.folder / RECIPE_FILE).exists() else []
        with self.log.open("ab") as file:
            command = [sys.executable, "-m", "octetrl", "train", recipe, *changes, *resume]
            self.process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    def stop(self) -> None:
        """Ask for the run's end; it saves a checkpoint. A run that has its last step by then has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def rows(self, arguments: argparse.Namespace) -> list[Row]:
        loaded = self.recipe(arguments)
        own: Row = {
            "precision": loaded.precision,
            "workload": f"{loaded.rollout.prompts_per_step}x{loaded.rollout.group_size}",
            "staleness": self.staleness,
            "in_flight": arguments.in_flight if self.staleness else "off",
            "jobs": arguments.jobs,
            "seed": self.seed,
        }
        rows, seconds = [], 0.0
        for metrics in self.lines():
            seconds += metrics["time/step"]
            shown = {name: metrics[name] for name in SHOWN if metrics.get(name) is not None}
            rows.append(own | {"step": metrics["step"], "seconds": round(seconds, 2), **shown})
        return rows


def metrics_of(line: bytes, step: int, file: Path) -> dict[str, float]:
    """The metrics of `step`. UserError names the file's line: it is of no step or another one, or lacks its time."""
    where, remedy = f"{file}, line {step}", "restore the file, or delete the folder to train the arm again"
    metrics = parse_json(line.decode(errors="replace"), where, remedy)
    if not isinstance(metrics, dict):
        raise UserError(f"{where}: not an object with the metrics of a step; {remedy}")
    if metrics.get("step") != step or isinstance(metrics.get("step"), bool):
        raise UserError(f"{where}: 'step' is {shown(metrics.get('step'))}, {step} is needed; {remedy}")
    for name in SHOWN:
        value = metrics.get(name, None if name == "time/step" else 0.0)
        may_miss = value is None and name != "time/step"
        if not may_miss and not is_number(value):
            raise UserError(f"{where}: '{name}' is {shown(value)}, a finite number is needed; {remedy}")
    return metrics


def differences(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The fields whose values differ, with both values."""
    for name in dict.fromkeys((*here, *there)):
        old, new = there.get(name), here.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{within}{name}.")
        elif old != new:
            yield f"{within}{name}", old, new


def recipe_file(arguments: argparse.Namespace) -> str:
    return arguments.recipe if Path(arguments.recipe).is_file() else str(shipped_path(arguments.recipe))


def run_arms(arms: Sequence[Arm], arguments: argparse.Namespace) -> list[str]:
    """Run the arms that have not ended, `arguments.jobs` at once, until the time is over. Returns the end of the output
    of each arm that failed; the others go on."""
    until, failed = time.monotonic() + arguments.seconds, list[str]()
    waiting, running = [arm for arm in arms if not arm.has_ended(arguments.steps)], list[Arm]()
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < arguments.jobs:
                running.append(waiting.pop(0))
                with held_signals():
                    running[-1].start(arguments)
            time.sleep(POLL_SECONDS)
            for arm in [arm for arm in running if arm.process is not None and arm.process.poll() is not None]:
                running.remove(arm)
                code, arm.process = arm.process.returncode if arm.process is not None else 0, None
                if code:
                    end = arm.log.read_text(errors="replace")[-600:]
                    failed.append(f"K = {arm.staleness}, seed {arm.seed} ended with {code}: {end}")
                    print(failed[-1], file=sys.stderr, flush=True)
                else:
                    print(json.dumps(arm_of(arm.rows(arguments))), flush=True)
    finally:
        for arm in running:  # together: each needs some seconds
            if arm.process is not None and arm.process.poll() is None:
                arm.process.send_signal(signal.SIGINT)
        for arm in running:
            arm.stop()
    return failed


def arm_of(rows: Sequence[Row]) -> Row:
    """An arm's row, from those of its steps."""
    names = ("precision", "workload", "staleness", "in_flight", "jobs", "seed")
    evaluated = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    last = {"eval/accuracy": evaluated[-1]} if evaluated else {}
    return {name: rows[0][name] for name in names} | {"steps": len(rows), "seconds": rows[-1]["seconds"], **last}


def accuracy_at(seconds: float, rows: Sequence[Row]) -> float | None:
    """Held-out accuracy of an arm after so many seconds of its steps, on the lines between its evaluations. None: the
    time lies before the first evaluation or after the last."""
    points = [(float(str(row["seconds"])), float(str(row["eval/accuracy"]))) for row in rows if "eval/accuracy" in row]
    for (before, low), (after, high) in pairwise(points):
        if before <= seconds <= after:
            return low + (high - low) * (seconds - before) / (after - before)
    return None


def with_equal_time(ended: Sequence[Sequence[Row]]) -> list[Row]:
    """The arms' rows, with their accuracies at the time at which the first of them had ended."""
    arms = [arm_of(own) for own in ended]
    shortest = min(float(str(arm["seconds"])) for arm in arms)
    for arm, own in zip(arms, ended, strict=True):
        accuracy = accuracy_at(shortest, own)
        arm |= {} if accuracy is None else {"equal_time/seconds": shortest, "equal_time/accuracy": round(accuracy, 4)}
    return arms


def show(arms: Sequence[Row], rows: Sequence[Row]) -> None:
    """The means over seeds, by K."""
    table = Table(title="Means over seeds")
    for heading in ("K", "arms", "s", "age of a token", "on-policy share", "last accuracy", "at equal time"):
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
            mean("equal_time/accuracy", own),
        )
    Console().print(table)


def curve_of(ended: Sequence[Sequence[Row]]) -> str | None:
    """Held-out accuracy by step as SVG, a panel for each K. None: no arm has two evaluations."""
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for own in sorted(ended, key=lambda rows: int(str(rows[0]["staleness"]))):
        points = [(float(str(row["step"])), float(str(row["eval/accuracy"]))) for row in own if "eval/accuracy" in row]
        if len(points) > 1:
            curves.setdefault(f"K = {own[0]['staleness']}", []).append(points)
    return panels(curves, x="step", y="held-out accuracy")


def result_name(arguments: argparse.Namespace) -> str:
    """The name of the result. UserError: `--name`, `--out` or `--curve` cannot be written, or `--state` is a file."""
    if arguments.name is not None:
        refuse_name(arguments.name)
    name = arguments.name or Path(arguments.recipe).stem
    for option, file in (("--out", arguments.out / f"staleness_{name}.json"), ("--curve", arguments.curve)):
        if file is not None and file.is_dir():
            raise UserError(f"{option}: '{file}' is a folder, a file is written there; give another path")
        if file is not None and file.exists() and not os.access(file, os.W_OK):
            raise UserError(f"{option}: cannot write '{file}'; give another path")
    if arguments.state is not None and arguments.state.exists() and not arguments.state.is_dir():
        raise UserError(f"--state: '{arguments.state}' is a file; give a folder")
    return name


def checked_arms(arguments: argparse.Namespace, work: Path) -> list[Arm]:
    """All arms, in their order. UserError: an arm's recipe or folder is wrong, or a folder cannot be written. No folder
    is left then that was not there."""
    arms = [
        Arm(staleness, seed, work / f"{staleness}_{seed}")
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
        for staleness in arguments.staleness[:: -1 if seed % 2 else 1]
    ]
    of_curve = nullcontext() if arguments.curve is None else made_folder("--curve", arguments.curve.parent)
    with made_folder("--out", arguments.out), of_curve, made_folder("--state", work):
        for arm in arms:  # all of them before the first begins, which may run for hours
            arm.check(arguments)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="demo_grpo")
    parser.add_argument("--staleness", type=listed(0), default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=at_least(1, MOST_SEEDS), default=3)
    parser.add_argument("--first-seed", type=at_least(0), default=0)
    parser.add_argument("--steps", type=at_least(1), default=60)
    parser.add_argument("--eval-every", type=at_least(1), default=20)
    parser.add_argument("--cpus", type=listed(1, 2), default=[1, 1], help="workers that train, workers that generate")
    parser.add_argument("--gpus", type=listed(1, 2), default=None, help="the same on GPUs")
    parser.add_argument("--in-flight", choices=("off", "recompute_cache", "keep_cache"), default="off")
    parser.add_argument("--jobs", type=at_least(1), default=1, help="arms at once")
    parser.add_argument("--seconds", type=seconds, default=float("inf"))
    parser.add_argument("--state", type=Path, default=None, help="folder of the arms' runs; default: a temporary one")
    parser.add_argument("--curve", type=Path, default=None, help="SVG of the accuracy by step")
    parser.add_argument("--name", default=None, help="of the result; default: the recipe's")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("changes", nargs="*", help="key=value, as for octetrl train")
    arguments = parser.parse_args()
    name = result_name(arguments)
    with tempfile.TemporaryDirectory() if arguments.state is None else nullcontext(str(arguments.state)) as work:
        arms = checked_arms(arguments, Path(work))
        failed = run_arms(arms, arguments)
        ended = [arm.rows(arguments) for arm in arms if arm.has_ended(arguments.steps)]
    if not ended:
        why = failed[0] if failed else f"no arm ended in {arguments.seconds:g} s"
        raise UserError(f"{why}; run it again with the same --state to go on")
    rows, ends = [row for own in ended for row in own], with_equal_time(ended)
    show(ends, rows)
    print(write_result("staleness", name, rows, arguments.out, arms=ends))  # before a picture, which may fail
    if arguments.curve is not None:
        drawn = curve_of(ended)
        if drawn is None:
            print(f"--curve: no picture, because no arm has two evaluations; --eval-every is {arguments.eval_every}")
        else:
            arguments.curve.write_text(drawn)
    if failed:
        raise UserError(f"{len(failed)} of {len(arms)} arms failed; {failed[0]}")


if __name__ == "__main__":
    run_command("staleness", main)
