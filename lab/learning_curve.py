"""Learning curves of one recipe under several precisions and seeds, trained side by side on one GPU.

    python -m lab.learning_curve --model models/SmolLM2-135M-Instruct --precision bf16,fp8_full --seconds 280

Every arm (a precision and a seed) is a process of its own: `octetrl train` with the shipped recipe. Only the precision,
the seed, the number of steps, the evaluation interval and what is written to the disk differ from the recipe, and the
KV cache has a fixed size because the arms share one GPU's memory. The accuracy at step 0 comes from `octetrl eval`.

A clock stops all arms, so an arm may end before its last step; the table and the result say how many steps each did.
The arms compete for the GPU and the host: `seconds` is the time at which a step was complete, not a measure of speed.
Leaves `lab/results/learning_<model>.json`:

    rows    one per arm and step: precision, workload, seed, step, eval/accuracy (only where evaluated), reward/mean,
            mismatch/max_abs_diff, mismatch/tokens (compared), seconds (since the arms' start)
    arms    one per arm: precision, seed, steps, of_steps, ended (all steps, clock, failed), seconds
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from lab.record import RESULTS, write_result
from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.system.errors import UserError
from octetrl.telemetry.sinks import METRICS_FILE

RECIPE = "grpo_chain-sum_smollm2-135m_1gpu_fp8-full"
SHOWN = ("eval/accuracy", "reward/mean", "mismatch/max_abs_diff", "mismatch/tokens")
LAST_STEP_SECONDS = 20  # from the request to stop until the processes are killed: a step, an evaluation, a checkpoint
POLL_SECONDS = 0.2
Row = dict[str, object]
Ending = Literal["all steps", "clock", "failed"]


@dataclass(slots=True)
class Arm:
    """One training process and what has been read of its `metrics.jsonl`."""

    precision: str
    seed: int
    folder: Path
    process: subprocess.Popen[bytes]
    evaluation: subprocess.Popen[bytes]
    steps: list[Row] = field(default_factory=list)
    read_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.precision}, seed {self.seed}"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None or self.evaluation.poll() is None

    def read_new_steps(self, seconds: float) -> None:
        """Add the steps whose lines are complete; `seconds` is the time since the start."""
        path = self.folder / "run" / METRICS_FILE
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self.read_bytes)
            lines = file.read().rpartition(b"\n")[0]
        self.read_bytes += len(lines) + 1 if lines else 0
        for metrics in map(json.loads, lines.splitlines()):
            shown = {name: metrics[name] for name in SHOWN if metrics.get(name) is not None}
            self.steps.append({"step": metrics["step"], **shown, "seconds": round(seconds, 1)})
            if "eval/accuracy" in shown:
                print(
                    f"{seconds:5.0f} s  {self.name}, step {metrics['step']}: {shown['eval/accuracy']:.3f}", flush=True
                )

    def accuracy_before(self) -> float | None:
        """Held-out accuracy of the model before training; None if its evaluation did not end."""
        path = self.folder / "before.json"
        if self.evaluation.poll() != 0 or not path.is_file():
            return None
        (model,) = json.loads(path.read_text())["models"]
        return float(model["estimates"]["accuracy"]["mean"])

    def rows(self) -> list[Row]:
        """The arm's rows for the result, from step 0 if that was evaluated."""
        own: Row = {"precision": self.precision, "workload": f"seed {self.seed}", "seed": self.seed}
        before = self.accuracy_before()
        first: list[Row] = [] if before is None else [{"step": 0, "eval/accuracy": before, "seconds": 0.0}]
        return [own | step for step in first + self.steps]

    def ending(self, asked_to_stop: bool) -> Ending:
        if self.process.returncode == 0:
            return "all steps"
        return "clock" if asked_to_stop and self.process.returncode in (130, -signal.SIGKILL) else "failed"


def recipe_changes(arguments: argparse.Namespace, precision: str, seed: int, folder: Path) -> list[str]:
    """What differs from the recipe; the caller's own `key=value` words come last and win."""
    model = [] if arguments.model is None else [f"model.path={json.dumps(arguments.model)}"]
    return [
        *model,
        f"precision={precision}",
        f"seed={seed}",
        f"steps={arguments.steps}",
        f"evaluation.every={arguments.eval_every}",
        f"engine.kv_cache_tokens={arguments.kv_cache_tokens}",
        f"output_dir={json.dumps(str(folder / 'run'))}",
        "checkpoint.every=0",
        "checkpoint.keep_best=0",
        "logging.tensorboard=false",
        "logging.rollouts=false",
        *arguments.changes,
    ]


def start_arm(arguments: argparse.Namespace, precision: str, seed: int, work: Path) -> Arm:
    """Start training and, beside it, the evaluation of the model before training."""
    folder = work / f"{precision}_{seed}"
    folder.mkdir()
    recipe, changes = str(shipped_path(arguments.recipe)), recipe_changes(arguments, precision, seed, folder)
    model = str(load_recipe(recipe, changes).model.path)  # refuses a wrong recipe before anything starts
    octetrl = [sys.executable, "-m", "octetrl"]

    def start(name: str, *words: str) -> subprocess.Popen[bytes]:
        with (folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen([*octetrl, *words], stdout=log, stderr=subprocess.STDOUT)

    before = str(folder / "before.json")
    return Arm(
        precision,
        seed,
        folder,
        process=start("train", "train", recipe, *changes),
        evaluation=start("eval", "eval", model, "--recipe", recipe, "--out", before, *changes),
    )


def run_until(arms: Sequence[Arm], began: float, seconds: float) -> bool:
    """Read the arms' steps until all have ended. Ask for the end LAST_STEP_SECONDS before `seconds` have passed, and
    kill what then still runs at `seconds`. Returns whether the clock had to ask."""
    asked = False
    while any(arm.is_running for arm in arms):
        time.sleep(POLL_SECONDS)
        passed = time.monotonic() - began
        for arm in arms:
            arm.read_new_steps(passed)
        if passed >= seconds:
            break
        if not asked and passed >= seconds - LAST_STEP_SECONDS:
            asked = True
            for arm in arms:
                arm.process.send_signal(signal.SIGINT)
    stop(arms)
    for arm in arms:
        arm.read_new_steps(time.monotonic() - began)
    return asked


def stop(arms: Sequence[Arm]) -> None:
    """Kill what still runs; the lines of whole steps are on the disk."""
    for process in [process for arm in arms for process in (arm.process, arm.evaluation)]:
        if process.poll() is None:
            process.kill()
        process.wait()


def arm_row(arm: Arm, steps: int, asked_to_stop: bool) -> Row:
    last = arm.steps[-1] if arm.steps else {"step": 0, "seconds": 0.0}
    return {
        "precision": arm.precision,
        "seed": arm.seed,
        "steps": last["step"],
        "of_steps": steps,
        "ended": arm.ending(asked_to_stop),
        "seconds": last["seconds"],
    }


def show(arms: Sequence[Row], rows: Sequence[Row]) -> None:
    table = Table(title="Held-out accuracy while training")
    for heading in ("precision", "seed", "steps", "ended by", "s", "accuracy at step", "largest log-prob difference"):
        table.add_column(heading)
    for arm in arms:
        own = [row for row in rows if (row["precision"], row["seed"]) == (arm["precision"], arm["seed"])]
        curve = " ".join(f"{row['step']}: {row['eval/accuracy']:.3f}" for row in own if "eval/accuracy" in row)
        worst = max((float(str(row[SHOWN[2]])) for row in own if SHOWN[2] in row), default=float("nan"))
        steps = f"{arm['steps']} of {arm['of_steps']}"
        table.add_row(
            str(arm["precision"]), str(arm["seed"]), steps, str(arm["ended"]), str(arm["seconds"]), curve, f"{worst:g}"
        )
    Console(width=160).print(table)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of the model; default: the recipe's")
    parser.add_argument("--recipe", default=RECIPE, help="a shipped name or a file")
    parser.add_argument("--precision", default="bf16,fp8_full", help="precisions to compare")
    parser.add_argument("--seeds", default="0", help="comma-separated; each precision trains with each seed")
    parser.add_argument("--steps", type=int, default=100, help="the most steps of an arm")
    parser.add_argument("--eval-every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--seconds", type=float, default=280.0, help="after this time nothing runs any more")
    parser.add_argument("--kv-cache-tokens", type=int, default=400_000, help="of each arm")
    parser.add_argument("--name", help="the JSON is learning_NAME.json; default: the model folder's name, lower case")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("changes", nargs="*", metavar="section.key=value", help="further changes of the recipe")
    arguments = parser.parse_args(words)
    if arguments.seconds <= LAST_STEP_SECONDS:
        parser.error(f"--seconds: {arguments.seconds:g} is too short; give more than {LAST_STEP_SECONDS}")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(words)
    work = Path(tempfile.mkdtemp(prefix="octetrl-learning-"))
    began = time.monotonic()
    arms: list[Arm] = []
    try:
        for seed in map(int, arguments.seeds.split(",")):
            for precision in arguments.precision.split(","):
                arms.append(start_arm(arguments, precision, seed, work))
        asked = run_until(arms, began, arguments.seconds)
    finally:
        stop(arms)
    rows = [row for arm in arms for row in arm.rows()]
    summary = [arm_row(arm, arguments.steps, asked) for arm in arms]
    show(summary, rows)
    folder = str(load_recipe(str(shipped_path(arguments.recipe)), arguments.changes).model.path)
    name = arguments.name or Path(arguments.model or folder).name.lower()
    print(f"wrote {write_result('learning', name, rows, arguments.out, arms=summary)}")
    failed = [arm for arm in arms if arm.ending(asked) == "failed"]
    for arm in failed:
        log = (arm.folder / "train.log").read_text(errors="replace").strip().splitlines()
        print(f"{arm.name} failed: {log[-1] if log else 'it printed nothing'} (log: {arm.folder / 'train.log'})")
    if not failed:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"lab.learning_curve: {error}", file=sys.stderr)
        raise SystemExit(2) from None
