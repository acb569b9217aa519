"""The figures of one run for docs/tutorial.md: its curve, and its answers before and after.

    octetrl eval models/SmolLM2-135M-Instruct --recipe tutorial_smollm2-135m --out runs/before
    octetrl train tutorial_smollm2-135m
    octetrl eval runs/tutorial --out runs/after
    python -m lab.tutorial runs/tutorial --before runs/before --after runs/after --name smollm2-135m

`python -m lab.tutorial --picture RESULT.json` draws the curve into docs/pictures/tutorial.svg instead.

Nothing runs here: the folders are read. The two evaluations must have the same held-out tasks. Prints the page's tables
in Markdown and writes `lab/results/tutorial_NAME.json`:

    rows      step 0 and the last step with eval/*, and a row per step: reward/mean, rollout/mean_length,
              rollout/truncated_share, reward/zero_variance_fraction, mismatch/max_abs_diff, mismatch/tokens, time/step
    answers   a row per held-out task: task, prompt, answer, before, before_reward, after, after_reward
    samples   a row per sampled answer of the first and of the last step: step, prompt, answer, text, reward
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.picture import STYLE
from lab.record import RESULTS, run_command, write_result
from octetrl.config.load import load_recipe
from octetrl.system.errors import UserError

STEP_FIELDS = (
    "reward/mean", "reward/zero_variance_fraction", "rollout/mean_length", "rollout/truncated_share",
    "mismatch/max_abs_diff", "mismatch/tokens", "time/step",
)  # fmt: skip
EVAL_FIELDS = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/tasks", "eval/mean_length")
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "tutorial.svg"
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


def draw(rows: list[Row]) -> str:
    """The mean reward of each step as a line, and held-out accuracy with its 95% interval as dots."""
    last = rows[-1]["step"]

    def place(step: float, value: float) -> tuple[float, float]:
        return round(60 + step * 600 / last, 1), round(240 - value * 190, 1)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 290" width="700" height="290" role="img">',
        STYLE,
    ]
    parts.append('<rect width="700" height="290" rx="6" style="fill: var(--ground)"/>')
    parts.append(
        '<text class="title" x="20" y="26">Mean reward by step, and held-out accuracy with its 95% interval</text>'
    )
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(0, value)
        parts.append(f'<path class="grid" d="M60 {y}H660"/><text class="tick end" x="52" y="{y + 4}">{value:g}</text>')
    parts += [f'<text class="tick middle" x="{place(row["step"], 0)[0]}" y="258">{row["step"]}</text>' for row in rows]
    parts.append('<text class="tick middle" x="360" y="278">step</text>')
    trained = [place(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
    points = " ".join(f"{x},{y}" for x, y in trained)
    parts.append(f'<polyline points="{points}" fill="none" style="stroke: var(--fp8_rollout)" stroke-width="2"/>')
    for row in rows:
        if "eval/accuracy" in row:
            x, y = place(row["step"], row["eval/accuracy"])
            low, high = (place(0, row[f"eval/accuracy_{end}"])[1] for end in ("low", "high"))
            beside = f'x="{x + 9}"' if row["step"] == 0 else f'class="end" x="{x - 9}"'
            parts.append(f'<path d="M{x} {low}V{high}" style="stroke: var(--fp8_full)" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{x}" cy="{y}" r="5" style="fill: var(--fp8_full)"/>')
            parts.append(f'<text {beside} y="{y + 20}">{row["eval/accuracy"]:.3f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/tutorial"), help="folder of the run")
    parser.add_argument("--before", type=Path, default=Path("runs/before"), help="evaluation of the model as it was")
    parser.add_argument("--after", type=Path, default=Path("runs/after"), help="evaluation of the run")
    parser.add_argument("--name", default="mine", help="the JSON is tutorial_NAME.json")
    parser.add_argument("--picture", type=Path, metavar="RESULT.json", help="only draw this result")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--tasks", type=int, default=12, help="answers in the printed table")
    arguments = parser.parse_args(words)
    if arguments.picture is not None:
        PICTURE.write_text(draw(json.loads(arguments.picture.read_text())["rows"]), encoding="utf-8")
        print(f"wrote {PICTURE}")
        return
    before, first = evaluation(arguments.before)
    after, last = evaluation(arguments.after)
    rows, answers = curve(arguments.run, before, after), pairs(first, last)
    sampled = samples(arguments.run, [1, rows[-1]["step"]])
    show(rows, answers, arguments.tasks)
    print(f"wrote {write_result('tutorial', arguments.name, rows, arguments.out, answers=answers, samples=sampled)}")


if __name__ == "__main__":
    run_command("tutorial", main)
