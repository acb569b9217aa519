"""Runs a few steps of a recipe without saving anything: does it fit the GPU, and what does a step cost?

    python -m lab.one_step RECIPE.yaml NAME [section.key=value ...] [--steps 2]

Everything is as the recipe says, with two exceptions: with `model.init=random` the weights are random, and a recipe
without a tokenizer gets a small one. Prints memory, times and mismatch of each step and writes `results/fit_NAME.json`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from lab.record import RESULTS, write_result
from octetrl.config.load import load_recipe
from octetrl.run.build import build_run
from octetrl.run.loop import one_step
from octetrl.run.tiny_model import save_tokenizer

SHOWN = (
    "memory/peak_gb",
    "time/step",
    "time/rollout",
    "time/train",
    "time/calibrate",
    "time/publish",
    "rollout/tokens_per_second",
    "train/tokens_per_second",
    "mismatch/token_mult_prob_error",
    "mismatch/max_abs_diff",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("name")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Path(folder)
        save_tokenizer(["State the final answer to the following arithmetic problem: 1 + 2 ="], tokenizer)
        given = [*arguments.overrides, f"model.tokenizer={tokenizer}", f"output_dir={tokenizer / 'run'}"]
        recipe = load_recipe(arguments.recipe, given)
        began = time.perf_counter()
        run = build_run(recipe)
        print(f"built in {time.perf_counter() - began:.1f} s", flush=True)
        rows = []
        try:
            for step in range(1, arguments.steps + 1):
                metrics = one_step(run, step).metrics
                row = {name: metrics[name] for name in SHOWN if name in metrics}
                print(f"step {step}", {name: round(value, 5) for name, value in row.items()}, flush=True)
                rows.append({"precision": str(recipe.precision), "workload": arguments.name, "step": step, **row})
        finally:
            run.close()
    print(f"wrote {write_result('fit', arguments.name, rows, arguments.out)}")


if __name__ == "__main__":
    main()
