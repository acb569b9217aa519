"""The figures of one run for docs/tutorial.md: its curve, and its answers before and after.

    octetrl eval models/SmolLM2-135M-Instruct --recipe tutorial_smollm2-135m --out runs/before
    octetrl train tutorial_smollm2-135m
    octetrl eval runs/tutorial --out runs/after
    python -m benchmarks.tutorial runs/tutorial --before runs/before --after runs/after --name smollm2-135m

Nothing runs here: the folders are read. The two evaluations must have the same held-out tasks. Prints the page's tables
in Markdown and writes `benchmarks/results/tutorial_NAME.json`:

    rows      step 0 and the last step with eval/*, and a row per step: reward/mean, rollout/mean_length,
              rollout/truncated_share, reward/zero_variance_fraction, mismatch/max_abs_diff, mismatch/tokens, time/step
    answers   a row per held-out task: task, prompt, answer, before, before_reward, after, after_reward
    samples   a row per sampled answer of the first and of the last step: step, prompt, answer, text, reward
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, write_result
from octetrl.config.errors import UserError
from octetrl.config.load import load_recipe

STEP_FIELDS = (
    "reward/mean", "reward/zero_variance_fraction", "rollout/mean_length", "rollout/truncated_share",
    "mismatch/max_abs_diff", "mismatch/tokens", "time/step",
)  # fmt: skip
EVAL_FIELDS = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/tasks", "eval/mean_length")
Row = dict[str, Any]


def lines(path: Path) -> list[Row]:
    """The objects of a JSONL file."""
    if not path.is_file():
        raise UserError(f"'{path}' does not exist; give the folders of a run and of two `octetrl eval --out FOLDER`")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def evaluation(folder: Path) -> tuple[Row, list[Row]]:
    """The metrics and the answers of `octetrl eval --out FOLDER`."""
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    if len(files) != 1:
        raise UserError(f"'{folder}' has the answers of {len(files)} evaluations; give a folder of one `octetrl eval`")
    return lines(folder / "metrics.jsonl")[-1], lines(files[0])


def curve(run: Path, before: Row, after: Row) -> list[Row]:
    """The rows of the result, from step 0."""
    recipe = load_recipe(run / "config.yaml")
    rollout = recipe.rollout
    own: Row = {
        "precision": recipe.precision,
        "workload": f"{rollout.prompts_per_step}x{rollout.group_size}",
    }
    steps = [
        {"step": step["step"], **{name: step[name] for name in STEP_FIELDS if name in step}}
        for step in lines(run / "metrics.jsonl")
    ]
    if not steps:
        raise UserError(f"'{run}' has no step yet; train first")
    shown = [{name: metrics[name] for name in EVAL_FIELDS} for metrics in (before, after)]
    return [own | row for row in ({"step": 0, **shown[0]}, *steps[:-1], steps[-1] | shown[1])]


def pairs(before: list[Row], after: list[Row]) -> list[Row]:
    """Each held-out task with its answer before and after."""
    later = {one["task_id"]: one for one in after}
    if [one["task_id"] for one in before] != list(later):
        raise UserError("the two evaluations have different tasks; give both the recipe of the run")
    return [
        {
            "task": one["task_id"],
            "prompt": one["prompt"],
            "answer": one["answer"],
            "before": one["text"],
            "before_reward": one["reward"],
            "after": later[one["task_id"]]["text"],
            "after_reward": later[one["task_id"]]["reward"],
        }
        for one in before
    ]


def samples(run: Path, steps: Sequence[int]) -> list[Row]:
    """What the model sampled in these steps."""
    return [
        {"step": step, **{name: one[name] for name in ("prompt", "answer", "text", "reward")}}
        for step in steps
        for one in lines(run / "rollouts" / f"step_{step:06d}.jsonl")
    ]


def cell(text: str) -> str:
    """A text in a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())


def show(rows: list[Row], answers: list[Row], most: int) -> None:
    print("| step | mean reward | mean length, tokens | cut off | held-out accuracy |\n|---|---|---|---|---|")
    for row in rows:
        trained = row["step"] > 0
        shown = [
            f"{row['reward/mean']:.3f}" if trained else "",
            f"{row['rollout/mean_length']:.1f}" if trained else "",
            f"{row['rollout/truncated_share']:.1%}" if trained else "",
            f"{row['eval/accuracy']:.3f}" if "eval/accuracy" in row else "",
        ]
        print(f"| {row['step']} | {' | '.join(shown)} |")
    print("\n| task | right answer | before | after |\n|---|---|---|---|")
    changed = [one for one in answers if one["before"] != one["after"]]
    for one in changed[:most]:
        print(f"| {cell(one['prompt'])} | {one['answer']} | {cell(one['before'])} | {cell(one['after'])} |")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--before", type=Path, required=True, help="evaluation of the model before training")
    parser.add_argument("--after", type=Path, required=True, help="evaluation of the run")
    parser.add_argument("--name", required=True, help="the JSON is tutorial_NAME.json")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--tasks", type=int, default=12, help="answers in the printed table")
    arguments = parser.parse_args(words)
    before, first = evaluation(arguments.before)
    after, last = evaluation(arguments.after)
    rows, answers = curve(arguments.run, before, after), pairs(first, last)
    sampled = samples(arguments.run, [1, rows[-1]["step"]])
    show(rows, answers, arguments.tasks)
    print(f"wrote {write_result('tutorial', arguments.name, rows, arguments.out, answers=answers, samples=sampled)}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(f"benchmarks.tutorial: {error}", file=sys.stderr)
        raise SystemExit(2) from None
