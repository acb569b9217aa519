"""Digests of what eight demo recipes do in three steps on a CPU. Code that only moves leaves them as they are.

    python -m tests.house.step_digests FOLDER >before.json    # at the old commit
    python -m tests.house.step_digests FOLDER >after.json     # at the new one, on the same machine

FOLDER keeps the models, so both train the same. The recipes run as a user runs them, by `octetrl train`, with one
thread. A digest covers the metrics without times and rates, the rollouts, or the checkpoint's files. `--keep` leaves
the run folders in FOLDER/runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STEPS = 3
TIMED = re.compile(  # metrics that differ from run to run
    r"^time/|^memory/|per_second|_seconds|_occupancy$|^rollout/(waiting_share|in_flight|with_environment)"
)
OF_A_RUN = {"run", "sha256"}  # of a checkpoint's manifest: the run's id, and the digest of the manifest itself
SMALL = ("rollout.prompts_per_step=4", "environment.eval_size=16", f"evaluation.every={STEPS}")
ONE = ("cluster.cpu_threads=1",)
TWO = ("cluster.cpus=2", *ONE)
AHEAD = ("cluster.trainer_cpus=1", "cluster.engine_cpus=1", "cluster.max_staleness=1", *ONE)
RECIPES: dict[str, tuple[str, str, tuple[str, ...]]] = {  # name: recipe, model, changes
    "grpo": ("demo_grpo", "dense", (*SMALL, *ONE)),
    "dpo": ("demo_dpo", "dense", ("algorithm.conversations={folder}/pairs.jsonl", "algorithm.batch_size=8", *ONE)),
    "ppo": ("demo_ppo", "dense", (*SMALL, "rollout.prompts_per_step=16", "critic.pretrain_steps=1", *ONE)),
    "moe": ("demo_moe", "moe", (*SMALL, *ONE)),
    "tools": ("demo_tools", "tools/model", (*SMALL, *ONE)),
    "lora": ("demo_grpo_lora", "dense", (*SMALL, *ONE)),
    "two_workers": ("demo_grpo", "dense", (*SMALL, *TWO)),
    "ahead": ("demo_grpo", "dense", (*SMALL, *AHEAD)),
}


def make_models(folder: Path) -> None:
    """A dense model, a mixture and preference pairs, once."""
    if (folder / "made").exists():
        return
    from examples.preference_pairs import write_pairs
    from examples.upcycle import upcycle
    from octetrl.config.load import load_recipe
    from octetrl.config.shipped import shipped_path
    from octetrl.run.demo import make_model_and_examples
    from octetrl.shapes.presets import preset_config

    examples = f"algorithm.conversations={folder}/examples.jsonl"
    recipe = load_recipe(shipped_path("demo_sft"), [f"model.path={folder}/dense", examples, f"output_dir={folder}/sft"])
    make_model_and_examples(recipe, preset_config("tiny"))
    upcycle(folder / "dense", folder / "moe")
    write_pairs(folder / "pairs.jsonl", 64)
    subprocess.run([sys.executable, "-m", "examples.tool_conversations", str(folder / "tools")], check=True)
    (folder / "made").touch()


def run_recipe(name: str, folder: Path) -> Path:
    recipe, model, changes = RECIPES[name]
    run = folder / "runs" / name
    shutil.rmtree(run, ignore_errors=True)
    words = [change.format(folder=folder) for change in changes]
    words += [f"model.path={folder}/{model}", f"output_dir={run}", f"steps={STEPS}", f"checkpoint.every={STEPS}"]
    words += ["logging.console=quiet", "mismatch.fail_above=null", "failures.max_empty_steps=0"]
    command = [sys.executable, "-m", "octetrl", "train", recipe, *words]
    ended = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{name}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    return run


def timeless(value: Any) -> Any:
    """The same JSON without what belongs to one run: its times and its id."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in OF_A_RUN and not TIMED.search(key)}
    return [timeless(inner) for inner in value] if isinstance(value, list) else value


def canonical(text: str) -> bytes:
    return json.dumps(timeless(json.loads(text)), sort_keys=True).encode()


def sha256(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def json_lines(paths: Iterable[Path]) -> Iterable[bytes]:
    for path in paths:
        yield from map(canonical, path.read_text(encoding="utf-8").splitlines())


def checkpoint_bytes(folder: Path) -> Iterable[bytes]:
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield str(path.relative_to(folder)).encode()
        yield canonical(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def digests_of(run: Path) -> dict[str, str]:
    return {
        "metrics": sha256(json_lines([run / "metrics.jsonl"])),
        "rollouts": sha256(json_lines(sorted((run / "rollouts").glob("*.jsonl")))),
        "checkpoint": sha256(checkpoint_bytes(run / "checkpoints" / f"step_{STEPS:06d}")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", choices=list(RECIPES), action="append")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder)
    print(json.dumps({name: digests_of(run_recipe(name, folder)) for name in arguments.only or RECIPES}, indent=1))
    if not arguments.keep:
        shutil.rmtree(folder / "runs")


if __name__ == "__main__":
    main()
