"""One job of the study: a cold start, or one arm with one seed. `runs` starts it as a process of its own.

    python -m lab.study.job STATE TABLE start SEED [--model FOLDER] [section.key=value ...]
    python -m lab.study.job STATE TABLE ARM SEED [--model FOLDER] [section.key=value ...]

The folder STATE holds

    starts/TABLE-SEED/           the cold start's model, shared by all arms of the seed
    before/                      accuracies of the starts
    runs/TABLE-ARM-SEED/         the run folder, while the job is not complete
    lines/TABLE-ARM-SEED.json    one line, written when the job is complete: the result

A start holds `made_with.json`: the changes of the cold start's recipe.

A line: table, arm, seed, status (`complete`, or `failed` with `why`), steps, accuracy of the start and of the end in
the arm's precision (`start/accuracy`, `end/accuracy`) and in BF16 (`start/accuracy_bf16`, `end/accuracy_bf16`: the same
weights), the curve of held-out accuracies, mean rewards, mismatch, saturation, seconds, and where it was measured. It
also has the recipe's `changes`, and `start_changes` (of the cold start) or `model` (a digest of the pretrained model).

Ctrl-C ends the run after its step, with a checkpoint; the exit code is then `UNFINISHED`, and the next call goes on
from the checkpoint. So does one after the process was killed, from the last checkpoint before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.upcycle import upcycle
from lab.jobs import UNFINISHED
from lab.record import run_command
from lab.study.arms import ARMS, TABLES
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.config.shipped import shipped_path
from octetrl.run.demo import make_model_and_examples
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import RunFailed, UserError
from octetrl.telemetry.provenance import provenance
from octetrl.telemetry.sinks import METRICS_FILE

START = "start"
CHECKPOINT_EVERY = 15
MADE_WITH = "made_with.json"  # of a start
Line = dict[str, Any]


def key(table: str, arm: str, seed: int) -> str:
    return f"{table}-{arm}-{seed}"


def line_path(state: Path, table: str, arm: str, seed: int) -> Path:
    return state / "lines" / f"{key(table, arm, seed)}.json"


def start_folder(state: Path, table: str, seed: int) -> Path:
    return state / "starts" / f"{table}-{seed}"


def model_digest(model: str) -> str:
    """A digest of the weights, shape and tokenizer in a model's folder, wherever it lies; what is no folder is returned
    as it was given."""
    folder, digest = Path(model), hashlib.sha256()
    if not folder.is_dir():
        return model
    for path in sorted([*folder.glob("*.safetensors"), folder / "config.json", folder / "tokenizer.json"]):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def quietly(folder: Path, seed: int) -> list[str]:
    return [
        f"seed={seed}",
        f"output_dir={json.dumps(str(folder))}",
        "cluster.device=auto",
        "logging.console=quiet",
        "logging.tensorboard=false",
        "logging.rollouts=false",
    ]


def start_run(state: Path, name: str, seed: int) -> Path:
    """Where the seed's model is made."""
    return state / "runs" / key(name, START, seed)


def start_recipe(state: Path, name: str, seed: int, changes: Sequence[str]) -> Recipe:
    """The cold start's recipe; the caller's changes come last."""
    table, folder = TABLES[name], start_run(state, name, seed)
    assert table.start is not None, "a pretrained model has no cold start"
    paths = [f"model.path={folder / 'random'}", f"algorithm.conversations={folder / 'examples.jsonl'}"]
    given = [*table.start_changes, *quietly(folder / "sft", seed), f"checkpoint.every={CHECKPOINT_EVERY * 4}", *paths]
    return load_recipe(shipped_path(table.start), [*given, *changes])


def make_start(state: Path, name: str, seed: int, changes: Sequence[str]) -> None:
    """Train the seed's model by SFT and leave it at `starts/`, whole or not at all."""
    table, folder = TABLES[name], start_run(state, name, seed)
    recipe = start_recipe(state, name, seed, changes)
    resumes = has_checkpoint(recipe)
    if not resumes:
        shutil.rmtree(folder, ignore_errors=True)
        write_line(folder / MADE_WITH, {"start_changes": list(changes)})
        shape = preset_config("tiny") | dict(table.shape)
        make_model_and_examples(recipe, shape, answers=table.answers)
    try:
        train(recipe, resume=resumes)
    except KeyboardInterrupt:
        raise SystemExit(UNFINISHED) from None
    target = start_folder(state, name, seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    dense = folder / "dense" if table.experts else part
    for left in (part, dense):
        shutil.rmtree(left, ignore_errors=True)
    export_run(recipe.output_dir, str(dense))
    if table.experts:
        upcycle(dense, part)
    shutil.copy(folder / MADE_WITH, part)
    part.rename(target)
    shutil.rmtree(folder)


def arm_recipe(state: Path, name: str, arm: str, seed: int, model: str | None, changes: Sequence[str]) -> Recipe:
    """The table's recipe with the arm's changes; the caller's own changes come last."""
    table = TABLES[name]
    folder = model if table.start is None else str(start_folder(state, name, seed))
    if folder is None:
        raise UserError(f"--model: table '{name}' needs the folder of a pretrained model")
    return load_recipe(
        shipped_path(table.recipe),
        [
            *table.common,
            f"steps={table.steps}",
            f"model.path={json.dumps(folder)}",
            "mismatch.fail_above=null",
            f"checkpoint.every={CHECKPOINT_EVERY}",
            "checkpoint.keep_last=1",
            "checkpoint.keep_best=0",
            *quietly(state / "runs" / key(name, arm, seed), seed),
            *ARMS[arm].for_layers(table.layers),
            *changes,
        ],
    )


def in_bf16(recipe: Recipe) -> Recipe:
    """The same recipe with nothing in FP8: what the weights alone are worth."""
    plain = {"rollout": False, "train": False, "kv_cache": "none", "kv_cache_tensors": "both"}
    return recipe.model_copy(update={"precision": "bf16", "fp8": recipe.fp8.model_copy(update=plain)})


def run_arm(state: Path, name: str, arm: str, seed: int, model: str | None, changes: Sequence[str]) -> None:
    """Train the arm from where it stopped, and write its line."""
    recipe = arm_recipe(state, name, arm, seed, model, changes)
    folder = Path(recipe.output_dir)
    resumes = has_checkpoint(recipe)
    if not resumes:
        shutil.rmtree(folder, ignore_errors=True)
    line: Line = {"table": name, "arm": arm, "seed": seed, "of_steps": recipe.steps, "changes": list(changes)}
    if TABLES[name].start is None and model is not None:
        line["model"] = model_digest(model)
    else:
        line |= json.loads((start_folder(state, name, seed) / MADE_WITH).read_text())
    try:
        train(recipe, resume=resumes)
        line |= {"status": "complete", **summary(recipe)}
        last_step, last = line["curve"][-1] if line["curve"] else (0, None)
        plain = in_bf16(recipe)
        line["start/accuracy"] = start_accuracy(state, name, seed, recipe)
        line["start/accuracy_bf16"] = start_accuracy(state, name, seed, plain)
        line["end/accuracy"] = last if last_step == recipe.steps else evaluate_checkpoint(str(folder), recipe).accuracy
        same = plain.fp8 == recipe.fp8
        line["end/accuracy_bf16"] = line["end/accuracy"] if same else evaluate_checkpoint(str(folder), plain).accuracy
    except KeyboardInterrupt:  # after a step, with a checkpoint
        raise SystemExit(UNFINISHED) from None
    except RunFailed as failed:
        line |= {"status": "failed", "why": str(failed), **summary(recipe)}
    line |= {"seconds": round(sum(step["time/step"] for step in metrics_of(recipe)), 1), "from": provenance()}
    write_line(line_path(state, name, arm, seed), line)
    shutil.rmtree(folder)


def start_accuracy(state: Path, name: str, seed: int, recipe: Recipe) -> float | None:
    """Held-out accuracy of the seed's start in this recipe's formats, evaluated once and kept in `before/`."""
    formats = json.dumps([recipe.fp8.model_dump(mode="json"), recipe.seed, recipe.environment.eval_size])
    digest = hashlib.sha256(formats.encode()).hexdigest()[:12]
    path = state / "before" / f"{name}-{seed}-{digest}.json"
    if not path.exists():
        write_line(path, {"accuracy": evaluate_checkpoint(str(recipe.model.path), recipe).accuracy})
    found: float | None = json.loads(path.read_text())["accuracy"]
    return found


def summary(recipe: Recipe) -> Line:
    """What `metrics.jsonl` says of the whole run."""
    steps = metrics_of(recipe)

    def values(name: str) -> list[float]:
        return [step[name] for step in steps if step.get(name) is not None]

    found: Line = {
        "steps": len(steps),
        "curve": [[step["step"], step["eval/accuracy"]] for step in steps if step.get("eval/accuracy") is not None],
        "rewards": [round(value, 5) for value in values("reward/mean")],
    }
    for name, reduced in (
        ("mismatch/max_abs_diff", max),
        ("mismatch/gen_kl", statistics.fmean),
        ("mismatch/token_mult_prob_error", statistics.fmean),
        ("correction/mean_weight", statistics.fmean),
        ("fp8/kv_saturation", max),
        ("grad_norm", statistics.fmean),
        ("time/step", statistics.median),
    ):
        if values(name):
            found[name] = reduced(values(name))
    return found


def metrics_of(recipe: Recipe) -> list[dict[str, Any]]:
    path = Path(recipe.output_dir) / METRICS_FILE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_checkpoint(recipe: Recipe) -> bool:
    return any((Path(recipe.output_dir) / "checkpoints").glob("step_*"))


def write_line(path: Path, line: Line) -> None:
    """Write a file of one line, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(line) + "\n")
    part.replace(path)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("arm", choices=[START, *ARMS])
    parser.add_argument("seed", type=int)
    parser.add_argument("--model")
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(words)
    if arguments.arm == START:
        make_start(arguments.state, arguments.table, arguments.seed, arguments.changes)
    else:
        run_arm(arguments.state, arguments.table, arguments.arm, arguments.seed, arguments.model, arguments.changes)


if __name__ == "__main__":
    run_command("study.job", main)
