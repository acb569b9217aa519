"""`octetrl demo`, `make demo`: the main job on a laptop, from nothing.

    1  a tiny Qwen3-architecture model with its own tokenizer, saved in Hugging Face form
    2  a cold start: SFT on sums, some worked step by step, most with the bare result (recipes/demo_sft.yaml)
    3  GRPO with FP8 end to end, emulated (recipes/demo_grpo.yaml)
    4  a table: held-out accuracy before, between and after; speed; mismatch; saturation

After the cold start the model guesses more often than it works a sum out, since that is what it was shown. GRPO finds
out which of the two pays. Everything goes through the recipes, functions and files of a real run.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octetrl.config.load import load_recipe
from octetrl.config.presets import preset_config
from octetrl.config.schema import Recipe
from octetrl.environments.base import Taskset
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.records import Task
from octetrl.run.build import build_environment, full_precision
from octetrl.run.evaluate import EvalReport, evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.run.tiny_model import save_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
NUM_EXAMPLES = 30_000
BARE_SHARE = 0.72  # of the examples that show the result without the steps
TOKENIZER_EXAMPLES = 1_000
VOCAB_SIZE = 384


def main() -> None:
    console = Console()
    started = time.perf_counter()
    sft = load_recipe(str(RECIPES / "demo_sft.yaml"), [])
    grpo = load_recipe(str(RECIPES / "demo_grpo.yaml"), [])
    folder = Path(sft.output_dir).parent
    shutil.rmtree(folder, ignore_errors=True)
    console.rule("1 · a tiny model and its worked examples")
    make_model_and_examples(sft, preset_config("tiny"))
    reports = {"before SFT": evaluate_checkpoint(str(sft.model.path), sft)}
    console.rule("2 · cold start: SFT on worked sums")
    train(sft, resume=False)
    export_run(sft.output_dir, str(grpo.model.path))
    reports["after SFT"] = evaluate_checkpoint(sft.output_dir, grpo)
    console.rule("3 · GRPO, FP8 end to end (emulated)")
    train(grpo, resume=False)
    reports["after GRPO"] = evaluate_checkpoint(grpo.output_dir, grpo)
    console.rule("4 · what it did")
    console.print(summary(reports, Path(grpo.output_dir), time.perf_counter() - started))


def make_model_and_examples(recipe: Recipe, config: dict[str, Any], bare_share: float = BARE_SHARE) -> None:
    """Write a random model of this shape, its tokenizer and the worked examples where the SFT recipe expects them."""
    model_folder, conversations = Path(str(recipe.model.path)), Path(str(recipe.algorithm.conversations))
    model_folder.mkdir(parents=True)
    environment = build_environment(recipe.environment)
    taskset = Taskset(environment.tasks, eval_size=recipe.environment.eval_size, seed=recipe.environment.seed)
    chance = random.Random(recipe.seed)
    examples = [
        {"prompt": task.prompt, "answer": bare_answer(task) if chance.random() < bare_share else worked_answer(task)}
        for task in taskset.next_batch(NUM_EXAMPLES)
    ]
    conversations.write_text("".join(json.dumps(example) + "\n" for example in examples))
    texts = [example["prompt"] + example["answer"] for example in examples[:TOKENIZER_EXAMPLES]]
    tokenizer = save_tokenizer(texts, model_folder, vocab_size=VOCAB_SIZE)
    spec = spec_from_config({**config, "vocab_size": VOCAB_SIZE, "eos_token_id": tokenizer.eos_token_id})
    model = Decoder(spec, full_precision(spec), "train")
    model.random_init(recipe.seed)
    save_weights(model, model_folder)


def bare_answer(task: Task) -> str:
    return f"#### {task.answer}"


def worked_answer(task: Task) -> str:
    """A sum with its running totals written out: "4 - 1 = 3, 3 - 7 = -4 #### -4"."""
    first, *rest = task.metadata["entry"]["metadata"]["expression"].split()
    total, lines = int(first), []
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(number) if sign == "+" else total - int(number)
        lines.append(f"{total} {sign} {number} = {result}")
        total = result
    return f"{', '.join(lines)} #### {total}"


def summary(reports: dict[str, EvalReport], grpo_folder: Path, seconds: float) -> Table:
    """What the demo ends with."""
    steps = [json.loads(line) for line in (grpo_folder / "metrics.jsonl").read_text().splitlines()]

    def mean(name: str) -> float:
        values = [step[name] for step in steps if step.get(name) is not None]
        return sum(values) / len(values)

    rows = [(f"held-out accuracy {when}", f"{report.accuracy:.3f}") for when, report in reports.items()]
    rows += [
        ("rollout tokens/s", f"{mean('rollout/tokens_per_second'):,.0f}"),
        ("training tokens/s", f"{mean('train/tokens_per_second'):,.0f}"),
        ("mismatch (token_mult_prob_error)", f"{mean('mismatch/token_mult_prob_error'):.6f}"),
        ("largest log-prob difference", f"{max(step['mismatch/max_abs_diff'] for step in steps):.2e}"),
        ("saturated K and V values", f"{mean('fp8/kv_saturation'):.4%}"),
        ("minutes", f"{seconds / 60:.1f}"),
        ("run folder", str(grpo_folder)),
    ]
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*row)
    return table
