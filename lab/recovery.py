"""How long a run on several workers takes to go on after one of them was killed in the middle of a step.

    python -m lab.recovery --gpus 2 --model qwen3-8b --prompts 16 --answer-tokens 1024 [section.key=value ...]
    python -m lab.recovery --cpus 2 --model tiny --prompts 8 --answer-tokens 64          # on a CPU, to try it

The run is `octetrl train` with rewards that mean nothing. `--model` is a Hugging Face folder, or a preset, whose random
weights are first written into such a folder, so that workers load files as in a real run. The second step is
undisturbed, and its checkpoint is written while the next steps run. When it is complete, and `--after` of a step's time
is over, the last worker is killed with SIGKILL. The run notices, builds all workers again, loads the checkpoint and
makes the steps since then again. A run of Qwen3-8B needs about 80 GB in `--folder` for the model and two checkpoints.
Leaves `lab/results/recovery_NAME.json`, one row:

    recovery/notice_seconds     from the kill to the line that says so
    recovery/build_seconds      from there until the checkpoint is loaded: workers, weights, engine
    recovery/step_seconds       from there until the killed step is done; kernels may compile again
    recovery/steps_again        steps made in that time: more than one if the checkpoint took longer than a step
    recovery/lost_seconds       from the kill to the end of the step, less what was left of an undisturbed step
    time/step                   of the undisturbed step
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lab.command import at_least, run_command
from lab.record import RESULTS, write_result
from octetrl.cli.bench_options import result_suffix, results_folder
from octetrl.config.cluster import local_lack
from octetrl.config.load import PRECISIONS, load_recipe
from octetrl.config.saved_state import saved_state
from octetrl.config.schema import Fp8Config, Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.run.folder.layout import CHECKPOINTS
from octetrl.run.tiny_model import write_tokenizer
from octetrl.shapes.presets import preset_config, refuse_unknown_model
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError, refuse_empty
from octetrl.telemetry.sinks import METRICS_FILE
from octetrl.workers.many.status import STATUS_FILE

STEPS, SAVED = 4, 2
LIMIT_SECONDS = 1800.0
END_SECONDS = 60.0  # that a run has to end after SIGTERM
NOTICED, LOADED = "building all workers again", "resumed after step"
DIFFERENCE = "mismatch/max_abs_diff"
DRAWN = 16_000_057  # random numbers, which all weights repeat; a prime, so that no two rows are equal


class Watched:
    """A run in a process of its own, and the moments at which it printed a line or ended a step."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """`folder`: the run's. Its lines come as they are printed, so that their moments are right."""
        self.folder, self.lines = folder, list[tuple[float, str]]()
        own = os.environ | {"PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=own)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait_for_step(self, step: int) -> float:
        """The moment at which the step's metrics are there."""
        return self._wait(lambda: len(self.metrics()) >= step, f"step {step}")

    def last_step(self) -> tuple[int, float]:
        """The last step that has ended, and when its metrics were written, by this process's clock."""
        written = (self.folder / METRICS_FILE).stat().st_mtime
        return len(self.metrics()), time.monotonic() - (time.time() - written)

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
                reason = "ended" if self.process.poll() is not None else f"took {LIMIT_SECONDS:.0f} s"
                raise UserError(f"the run {reason} before {what}:\n{self._last_lines()}")
            time.sleep(0.01)
        return time.monotonic()

    def _last_lines(self) -> str:
        return "\n".join(line for _, line in self.lines[-12:])

    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / METRICS_FILE
        whole = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in whole]

    def wait_for_checkpoint(self, step: int) -> float:
        """The moment at which the step's checkpoint is complete: it is renamed then."""
        folder = self.folder / CHECKPOINTS / f"step_{step:06d}"
        return self._wait(folder.exists, f"the checkpoint of step {step}")

    def kill_last_worker(self) -> None:
        """Raises UserError if the run has ended, whose workers' numbers may be those of other processes by now."""
        workers = json.loads((self.folder / STATUS_FILE).read_text())["workers"]
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(int(workers[-1]["pid"]), signal.SIGKILL)
                return
        raise UserError(f"the last worker had ended before it was killed:\n{self._last_lines()}")

    def wait_for_end(self) -> None:
        """Raises UserError if it ends with an error, or not in time."""
        self._wait(lambda: self.process.poll() is not None, "its end")
        if self.process.returncode:
            self._reader.join(5.0)
            said = f"the run recovered, and then ended with exit code {self.process.returncode}"
            raise UserError(f"{said}:\n{self._last_lines()}")

    def stop(self) -> None:
        """Ends it, if it has not ended. It may still write into its folder until then."""
        self.process.terminate()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def measure(run: Watched, after: float) -> dict[str, float]:
    try:
        ended = run.wait_for_step(SAVED)
        usual = float(run.metrics()[SAVED - 1]["time/step"])
        time.sleep(max(0.0, ended + after * usual - time.monotonic()))
        run.wait_for_checkpoint(SAVED)
        done, began = run.last_step()
        run.kill_last_worker()
        killed = time.monotonic()
        noticed, _ = run.wait_for_line(NOTICED)
        loaded, line = run.wait_for_line(LOADED)
        resumed = int(re.findall(rf"{LOADED} (\d+)", line)[-1])
        if resumed > done:
            raise UserError(f"the step had ended before its worker was missed ({line.strip()}); give longer answers")
        ended = run.wait_for_step(done + 1)
        run.wait_for_end()
    finally:
        run.stop()
    differences = [float(one[DIFFERENCE]) for one in run.metrics() if one.get(DIFFERENCE) is not None]
    return {
        "recovery/notice_seconds": noticed - killed,
        "recovery/build_seconds": loaded - noticed,
        "recovery/step_seconds": ended - loaded,
        "recovery/steps_again": float(done + 1 - resumed),
        "recovery/lost_seconds": ended - killed - max(0.0, usual - (killed - began)),
        "time/step": usual,
        **({DIFFERENCE: max(differences)} if differences else {}),
    }


# ---------------------------------------------------------------- the run


def find_model(model: str) -> tuple[ModelSpec, Path | None]:
    """The shape, and the folder with weights; None: it is a preset. Raises UserError."""
    if Path(model).is_dir():
        return load_spec(model), Path(model).resolve()
    refuse_unknown_model(model)
    return spec_from_config(preset_config(model)), None


@torch.no_grad()
def write_model(spec: ModelSpec, folder: Path) -> None:
    """A Hugging Face folder of this shape with random weights and a tokenizer. Repeating some random numbers takes
    seconds; drawing billions would take a minute."""
    policy = precision_policy(spec, Fp8Config())
    model = Decoder(spec, policy, "train", dtype=torch.bfloat16, device=torch.device("meta"), backend="emulated")
    model.to_empty(device="cpu")  # a model that is built there draws its weights first
    drawn = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)).bfloat16()
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        flat, std = parameter.view(-1), parameter.shape[-1] ** -0.5 if name.startswith("layers.") else 0.02
        for start in range(0, len(flat), DRAWN):
            piece = flat[start : start + DRAWN]
            piece.copy_(drawn[: len(piece)]).mul_(std)
    write_tokenizer(["State the final answer to: 1 + 2 - 3 ="], folder)
    save_weights(model, folder)


def write_recipe(asked: argparse.Namespace, folder: Path, spec: ModelSpec, weights: Path | None) -> tuple[Path, Recipe]:
    """The recipe and its file. Raises UserError before anything is written that takes long."""
    context = 256 + asked.answer_tokens
    if context > spec.max_positions:
        longest = spec.max_positions - 256
        raise UserError(f"--answer-tokens: {asked.answer_tokens} is too long for {asked.model}; give {longest} or less")
    tree: dict[str, Any] = {
        "model": {"path": str(weights or folder / "model"), "context_length": context},
        "precision": asked.precision,
        "environment": {"dataset": "chain_sum", "reward": "lab.recovery_reward:varied"},
        "rollout": {
            "prompts_per_step": asked.prompts,
            "group_size": asked.group,
            "max_prompt_tokens": 200,
            "max_new_tokens": asked.answer_tokens,
        },
        "trainer": {"optimizer": {"lr": 1e-6, "states": "8bit", "master": "stochastic_rounding"}},
        "cluster": {"gpus": asked.gpus, "cpus": asked.cpus, "max_restarts": 1},
        "checkpoint": {"every": SAVED, "keep_last": 1},
        "logging": {"tensorboard": False},
        "steps": STEPS,
        "output_dir": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tree))
    try:
        recipe = load_recipe(path, asked.changes)
    except UserError as error:  # it names the file, which is ours
        raise UserError(str(error).replace(f"{path}: ", "")) from None
    if recipe.steps <= SAVED + 1:
        raise UserError(f"steps: {recipe.steps} are too few; step {SAVED + 1} is the earliest that can be killed in")
    if recipe.cluster.num_workers < 2:
        raise UserError("--gpus, --cpus: a run of one worker cannot go on without it; give 2 or more")
    if not recipe.cluster.starts_ray:
        raise UserError("cluster.address: a worker is killed by its number on this machine; leave the address out")
    lack = local_lack(recipe.cluster, torch.cuda.device_count()) if recipe.cluster.num_gpus else None
    if lack is not None:
        raise UserError(lack)
    return path, recipe


def check_disk(recipe: Recipe, spec: ModelSpec, folder: Path, *, writes_model: bool) -> None:
    """Raise UserError if the folder has no room for the model and two checkpoints, an old one and one being written."""
    needed = 2 * saved_state(recipe, spec, None).num_bytes + 2 * spec.num_parameters * writes_model
    free = shutil.disk_usage(folder).free
    if needed > free:
        takes = f"--folder: model and checkpoints take about {needed / 1e9:.0f} GB"
        raise UserError(f"{takes}, and '{folder}' has {free / 1e9:.0f} free; give a folder on a larger disk")


def recover(asked: argparse.Namespace, folder: Path) -> tuple[Recipe, dict[str, float]]:
    spec, weights = find_model(asked.model)
    path, recipe = write_recipe(asked, folder, spec, weights)
    check_disk(recipe, spec, folder, writes_model=weights is None)
    if weights is None:
        write_model(spec, folder / "model")
    command = [sys.executable, "-m", "octetrl", "train", str(path), *asked.changes]
    return recipe, measure(Watched(command, Path(recipe.output_dir)), asked.after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp8_full")
    workers = parser.add_mutually_exclusive_group(required=True)
    workers.add_argument("--gpus", type=at_least(2))
    workers.add_argument("--cpus", type=at_least(2))
    parser.add_argument("--prompts", type=at_least(1), default=16)
    parser.add_argument("--group", type=at_least(2), default=8)
    parser.add_argument("--answer-tokens", type=at_least(1), default=1024)
    parser.add_argument(
        "--after", type=float, default=0.4, help="of a step's time, when the worker is killed: 0 to 0.9"
    )
    parser.add_argument("--folder", type=Path, help="for model and checkpoints; default: the system's temporary folder")
    parser.add_argument("--name", help="of the result: recovery_NAME.json")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("changes", nargs="*", help="section.key=value of the recipe")
    asked = parser.parse_args()
    result_suffix(asked.name), results_folder(str(asked.out))  # refuse what could not be written at the end
    refuse_empty(asked.model, "model", "a folder or a preset")
    if not 0.0 <= asked.after <= 0.9:
        raise UserError(f"--after: {asked.after:g} is out of range; give 0 to 0.9 of a step's time")
    if asked.folder is not None and not asked.folder.is_dir():
        raise UserError(f"--folder: '{asked.folder}' is not a folder; create it, or give another")
    with tempfile.TemporaryDirectory(prefix="octetrl-recovery-", dir=asked.folder) as name:
        recipe, found = recover(asked, Path(name))
    rollout, cluster = recipe.rollout, recipe.cluster
    row: dict[str, object] = {
        "precision": recipe.precision,
        "workload": f"{rollout.prompts_per_step * rollout.group_size}x{rollout.max_new_tokens}",
        "cluster/workers": cluster.num_workers,
        "cluster/device": "cuda" if cluster.num_gpus else "cpu",
        **found,
    }
    model = Path(asked.model).name
    table = Table(title=f"a killed worker, {model}, {cluster.num_workers} workers")
    for column in found:
        table.add_column(column.removeprefix("recovery/").replace("_", "\n"), justify="right")
    table.add_row(*(f"{value:.2f}" for value in found.values()))
    Console().print(table)
    kind = "gpus" if cluster.num_gpus else "cpus"
    print(write_result("recovery", asked.name or f"{model}_{cluster.num_workers}_{kind}", [row], asked.out))


if __name__ == "__main__":
    run_command("recovery", main)
