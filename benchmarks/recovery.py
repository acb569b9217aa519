"""How long a run on several workers takes to go on after one of them was killed in the middle of a step.

    python -m benchmarks.recovery --gpus 2 --model qwen3-8b --prompts 16 --answer-tokens 1024 [section.key=value ...]
    python -m benchmarks.recovery --cpus 2 --model tiny --prompts 8 --answer-tokens 64          # on a CPU, to try it

The run is `octetrl train` with random weights, rewards that mean nothing, and a checkpoint after each step. Its second
step is undisturbed. In the third the last worker is killed with SIGKILL, when `--after` of the second step's time is
over. The run notices, builds all workers again, loads the checkpoint of the second step and makes the third one.
Leaves `benchmarks/results/recovery_NAME.json`, one row:

    recovery/notice_seconds     from the kill to the line that says so
    recovery/build_seconds      from there until the checkpoint is loaded: workers, weights, engine
    recovery/step_seconds       from there until the step is done; kernels may compile again
    recovery/lost_seconds       from the kill to the end of the step, less what was left of an undisturbed step
    time/step                   of the undisturbed step
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, write_result
from octetrl.config.errors import UserError
from octetrl.config.load import load_recipe
from octetrl.run.tiny_model import save_tokenizer
from octetrl.telemetry.sinks import METRICS_FILE
from octetrl.workers.many.status import STATUS_FILE

STEPS, KILLED_IN = 4, 3
LIMIT_SECONDS = 1800.0
NOTICED, LOADED = "building all workers again", "resumed after step"


def varied(task: object, text: str) -> float:
    """A reward that siblings differ in, so that every group has a gradient."""
    return float(sum(text.encode()) % 11)


class Watched:
    """A run in a process of its own, and the moments at which it printed a line or ended a step."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """`folder`: the run's."""
        self.folder, self.lines = folder, list[tuple[float, str]]()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait_for_step(self, step: int) -> float:
        """The moment at which the step's metrics are there."""
        return self._wait(lambda: len(self.metrics()) >= step, f"step {step}")

    def wait_for_line(self, words: str) -> tuple[float, str]:
        """The last line with these words, and when it was printed."""
        self._wait(lambda: any(words in line for _, line in self.lines), f"'{words}'")
        return next(one for one in reversed(self.lines) if words in one[1])

    def _wait(self, is_so: Callable[[], bool], what: str) -> float:
        until = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            if self.process.poll() is not None or time.monotonic() > until:
                self._reader.join(5.0)
                if is_so():
                    break
                last = "\n".join(line for _, line in self.lines[-12:])
                raise UserError(f"the run ended before {what}:\n{last}")
            time.sleep(0.01)
        return time.monotonic()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS_FILE
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def kill_last_worker(self) -> None:
        workers = json.loads((self.folder / STATUS_FILE).read_text())["workers"]
        os.kill(int(workers[-1]["pid"]), signal.SIGKILL)


def measure(run: Watched, after: float) -> dict[str, float]:
    try:
        began = run.wait_for_step(KILLED_IN - 1)
        usual = float(run.metrics()[-1]["time/step"])
        time.sleep(after * usual)
        run.kill_last_worker()
        killed = time.monotonic()
        noticed, _ = run.wait_for_line(NOTICED)
        loaded, line = run.wait_for_line(LOADED)
        if f"{LOADED} {KILLED_IN - 1} " not in f"{line} ":
            raise UserError(f"the step had ended before its worker was missed ({line.strip()}); give longer answers")
        ended = run.wait_for_step(KILLED_IN)
        run.wait_for_step(STEPS)
        run.process.wait(120.0)
    finally:
        run.process.terminate()
    return {
        "recovery/notice_seconds": noticed - killed,
        "recovery/build_seconds": loaded - noticed,
        "recovery/step_seconds": ended - loaded,
        "recovery/lost_seconds": ended - killed - max(0.0, usual - (killed - began)),
        "time/step": usual,
        "mismatch/max_abs_diff": max(float(line["mismatch/max_abs_diff"]) for line in run.metrics()),
    }


def write_recipe(asked: argparse.Namespace, folder: Path) -> Path:
    save_tokenizer(["State the final answer to: 1 + 2 - 3 ="], folder / "tokenizer", vocab_size=300)
    tree: dict[str, Any] = {
        "model": {
            "preset": asked.model,
            "init": "random",
            "tokenizer": str(folder / "tokenizer"),
            "context_length": 256 + asked.answer_tokens,
        },
        "precision": asked.precision,
        "environment": {"dataset": "chain_sum", "reward": "benchmarks.recovery:varied"},
        "rollout": {
            "prompts_per_step": asked.prompts,
            "group_size": asked.group,
            "max_prompt_tokens": 200,
            "max_new_tokens": asked.answer_tokens,
        },
        "trainer": {"optimizer": {"lr": 1e-6, "states": "8bit", "master": "stochastic_rounding"}},
        "cluster": {"gpus": asked.gpus, "cpus": asked.cpus, "max_restarts": 1},
        "checkpoint": {"every": 1, "keep_last": 1},
        "logging": {"tensorboard": False},
        "steps": STEPS,
        "output_dir": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))
    load_recipe(path, asked.changes)  # refused before the run begins
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--precision", default="fp8_full")
    workers = parser.add_mutually_exclusive_group(required=True)
    workers.add_argument("--gpus", type=int)
    workers.add_argument("--cpus", type=int)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=1024)
    parser.add_argument("--after", type=float, default=0.4, help="of a step's time, when the worker is killed")
    parser.add_argument("--name", help="of the result: recovery_NAME.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("changes", nargs="*", help="section.key=value of the recipe")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="octetrl-recovery-") as name:
        folder = Path(name)
        try:
            command = [sys.executable, "-m", "octetrl", "train", str(write_recipe(asked, folder)), *asked.changes]
            found = measure(Watched(command, folder / "run"), asked.after)
        except UserError as error:
            raise SystemExit(f"benchmarks.recovery: {error}") from error
    count = asked.gpus or asked.cpus
    workload = f"{asked.prompts * asked.group}x{asked.answer_tokens}"
    row: dict[str, object] = {"precision": asked.precision, "workload": workload, "cluster/workers": count, **found}
    table = Table(title=f"a killed worker, {asked.model}, {count} workers")
    for column in found:
        table.add_column(column.removeprefix("recovery/").replace("_", "\n"), justify="right")
    table.add_row(*(f"{value:.2f}" for value in found.values()))
    Console().print(table)
    kind = "gpus" if asked.gpus else "cpus"
    print(write_result("recovery", asked.name or f"{asked.model}_{count}_{kind}", [row], asked.out))


if __name__ == "__main__":
    main()
