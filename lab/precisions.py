"""Trains one model by GRPO under bf16, fp8_rollout, fp8 and fp8_full: speed, mismatch, memory, calibration, publishing.

    python -m lab.precisions [--steps 20] [--sft-steps 150] [--seeds 1] [--precision bf16,fp8_full] [--name 50]

One model learns worked sums by SFT in BF16. Each precision then trains it with the same recipe and seed, in this one
process, by recipes, `train` and metrics.jsonl as a user has them. Needs a Hopper GPU; `--tiny` shows the form of the
output on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lab.record import RESULTS, need_hopper, write_result
from octetrl.config.load import recipe_from_mapping
from octetrl.run.demo import make_model_and_examples
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.shapes.presets import preset_config

PRECISIONS = ("bf16", "fp8_rollout", "fp8", "fp8_full")
WIDE = {  # Qwen3-0.6B's width in 8 layers: 126 million parameters besides the embedding
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
COLUMNS = {
    "rollout/tokens_per_second": ",.0f",
    "train/tokens_per_second": ",.0f",
    "mismatch/token_mult_prob_error": ".5f",
    "mismatch/gen_kl": ".2e",
    "mismatch/max_abs_diff": ".2e",
    "mismatch/equal_fraction": ".3f",
    "memory/peak_gb": ".2f",
    "time/rollout": ".3f",
    "time/train": ".3f",
    "time/calibrate": ".4f",
    "time/publish": ".4f",
    "time/step": ".3f",
}


def recipe_tree(folder: Path, arguments: argparse.Namespace, precision: str, seed: int) -> dict[str, Any]:
    """The recipe all arms share."""
    terms = (3, 4) if arguments.tiny else (8, 12)
    return {
        "precision": precision,
        "model": {"path": str(folder / "start"), "context_length": 128 if arguments.tiny else 512},
        "rollout": {
            "prompts_per_step": 4 if arguments.tiny else 32,
            "group_size": 4 if arguments.tiny else 8,
            "max_prompt_tokens": 64,
            "max_new_tokens": 48 if arguments.tiny else 256,
        },
        "engine": {"page_size": 128, "max_batch": 256, "kv_cache_tokens": 8192 if arguments.tiny else 131072},
        "trainer": {
            "tokens_per_micro_batch": 4096 if arguments.tiny else 32768,
            "activation_checkpointing": "none",
            "optimizer": {"lr": 2e-6 if not arguments.tiny else 1e-4},
        },
        "environment": {
            "kind": "reasoning_gym",
            "dataset": "chain_sum",
            "parameters": {"min_terms": terms[0], "max_terms": terms[1], "min_digits": 1, "max_digits": 1},
            "answer_marker": "####",
            "train_size": 20000,
            "eval_size": 128,
        },
        "checkpoint": {"every": 0, "keep_last": 1},
        "logging": {"console": "plain" if arguments.verbose else "quiet", "tensorboard": False},
        "seed": seed,
        "steps": arguments.steps,
        "output_dir": str(folder / f"{precision}_{seed}"),
    }


def cold_start(folder: Path, arguments: argparse.Namespace) -> float | None:
    """Make the model and train it by SFT in BF16; returns its held-out accuracy."""
    recipe = recipe_from_mapping(sft_tree(folder, arguments))
    make_model_and_examples(recipe, model_shape(arguments))
    train(recipe)
    export_run(recipe.output_dir, str(folder / "start"))
    return evaluate_checkpoint(str(folder / "start"), recipe).accuracy


def sft_tree(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The recipe of the cold start: from `folder/random` by `folder/examples.jsonl`."""
    tree = recipe_tree(folder, arguments, "bf16", 0)
    tree["model"]["path"] = str(folder / "random")
    tree["algorithm"] = {"name": "sft", "conversations": str(folder / "examples.jsonl"), "batch_size": 64}
    tree["trainer"]["optimizer"] = {
        "lr": 3e-3 if arguments.tiny else 4e-4,
        "warmup_steps": 10,
        "decay": "linear",
        "min_lr_fraction": 0.1,
    }
    return tree | {"steps": arguments.sft_steps, "output_dir": str(folder / "sft")}


def model_shape(arguments: argparse.Namespace) -> dict[str, Any]:
    """config.json of the model that is trained."""
    return preset_config("tiny") | ({} if arguments.tiny else WIDE)


def run_arm(folder: Path, arguments: argparse.Namespace, precision: str, seed: int) -> dict[str, object]:
    """Train one precision and return its row: medians over all steps except the first two, which compile. The largest
    log-prob difference is that of all steps."""
    recipe = recipe_from_mapping(recipe_tree(folder, arguments, precision, seed))
    train(recipe)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    lines = (Path(recipe.output_dir) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    settled = steps[2:] or steps
    row: dict[str, object] = {"precision": precision, "workload": f"seed {seed}", "steps": len(steps)}
    for name in COLUMNS:
        of_all = name == "mismatch/max_abs_diff"
        values = [step[name] for step in (steps if of_all else settled) if step.get(name) is not None]
        if values:
            row[name] = max(values) if of_all else statistics.median(values)
    sums = ("train/trained_tokens", "mismatch/tokens", "mismatch/unequal_tokens")  # the last where equality is promised
    for name in sums:
        told = [step[name] for step in steps if name in step]
        if told:
            row[name] = sum(told)
    differences = [step["mismatch/max_abs_diff"] for step in steps if "mismatch/max_abs_diff" in step]
    row |= {"mismatch/steps": len(differences), "mismatch/steps_at_zero": differences.count(0.0)}
    rewards = [step["reward/mean"] for step in steps]
    row |= {"reward/first": statistics.fmean(rewards[:5]), "reward/last": statistics.fmean(rewards[-5:])}
    saturation = [step["fp8/kv_saturation"] for step in steps if "fp8/kv_saturation" in step]
    if saturation:
        row["fp8/kv_saturation"] = max(saturation)
    row["eval/accuracy"] = evaluate_checkpoint(recipe.output_dir, recipe).accuracy
    return row


def show(rows: list[dict[str, object]]) -> None:
    table = Table(title="GRPO under four precisions")
    for name in ("precision", *COLUMNS, "reward/first", "reward/last", "eval/accuracy"):
        table.add_column(name.split("/")[-1])
    for row in rows:
        cells = [format(row[name], form) if name in row else "" for name, form in COLUMNS.items()]
        ends = [f"{row[name]:.3f}" for name in ("reward/first", "reward/last", "eval/accuracy")]
        table.add_row(str(row["precision"]), *cells, *ends)
    Console(width=200).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sft-steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--precision", default=",".join(PRECISIONS), help="which, side by side")
    parser.add_argument("--name", default="precisions", help="of the result: step_126m_NAME.json, or step_tiny_...")
    parser.add_argument("--tiny", action="store_true", help="the demo's model, on any machine")
    parser.add_argument("--verbose", action="store_true", help="a line a step")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if not arguments.tiny:
        need_hopper("precisions", ", or with --tiny")
    folder = Path(tempfile.mkdtemp(prefix="octetrl-precisions-"))
    try:
        print(f"cold start: held-out accuracy {cold_start(folder, arguments)}", flush=True)
        rows = [
            run_arm(folder, arguments, precision, seed)
            for seed in range(arguments.seeds)
            for precision in arguments.precision.split(",")
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows)
    name = f"{'tiny' if arguments.tiny else '126m'}_{arguments.name}"
    print(f"wrote {write_result('step', name, rows, arguments.out)}")


if __name__ == "__main__":
    main()
