"""Finds tasks with room to learn: a pretrained model's accuracy on several reasoning_gym datasets, before training.

    python -m lab.study.probe --model models/SmolLM2-135M-Instruct [--tasks 256] [section.key=value ...]

The study's recipe for the model with other tasks. All answers are numbers; the reward is that of the recipe, the last
number of the answer. Greedy, as in the study's evaluations. Writes `study_probe.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.record import RESULTS, write_result
from lab.study.arms import SMOLLM2
from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.run.evaluate import evaluate_checkpoint

CANDIDATES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "sums of 2, 1 digit": ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "sums of 2-3, 1-2 digits": ("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}),
    "products, 1 digit": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
    "products, 1-2 digits": ("products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}),
    "gcd": ("gcd", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 30}),
    "lcm": ("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 12}),
    "letters of a word": ("letter_counting", {"min_words": 3, "max_words": 6}),
    "legs": ("leg_counting", {"min_animals": 1, "max_animals": 2}),
    "next of a sequence": ("number_sequence", {}),
    "simple equations": ("simple_equations", {}),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=int, default=256)
    parser.add_argument("--only", help="a part of the names, to try some")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    arguments = parser.parse_intermixed_args(words)
    rows = []
    for name, (dataset, parameters) in CANDIDATES.items():
        if arguments.only is not None and arguments.only not in name:
            continue
        changes = [
            f"model.path={json.dumps(arguments.model)}",
            "precision=bf16",
            "cluster.device=auto",
            f"environment.dataset={dataset}",
            f"environment.parameters={json.dumps(parameters)}",
            f"environment.train_size={arguments.tasks}",
            f"environment.eval_size={arguments.tasks}",
            "logging.console=quiet",
            *arguments.changes,
        ]
        accuracy = evaluate_checkpoint(arguments.model, load_recipe(shipped_path(SMOLLM2), changes)).accuracy
        rows.append({"precision": "bf16", "workload": name, "dataset": dataset, "eval/accuracy": accuracy})
        print(f"{name}: {accuracy}", flush=True)
    print(f"wrote {write_result('study', 'probe', rows, arguments.out)}")


if __name__ == "__main__":
    main()
