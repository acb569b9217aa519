"""Writes preference pairs for the demo's DPO and reward model: a worked sum, and a wrong guess.

python examples/preference_pairs.py runs/demo/pairs.jsonl
"""

import json
import random
import sys
from pathlib import Path

from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.environments.tasks import Taskset
from octetrl.records import Task
from octetrl.run.demo import worked_answer
from octetrl.run.environment import build_environment

NUM_PAIRS = 4000


def guess(task: Task, chance: random.Random) -> str:
    """A result without steps that is wrong by 1 to 3."""
    assert task.answer is not None
    return f"#### {int(task.answer) + chance.choice([-3, -2, -1, 1, 2, 3])}"


def write_pairs(path: Path, count: int) -> None:
    recipe = load_recipe(shipped_path("demo_sft"))
    environment = build_environment(recipe.environment)
    taskset = Taskset(environment.tasks, eval_size=recipe.environment.eval_size, seed=recipe.environment.seed)
    chance = random.Random(0)
    pairs = [
        {"prompt": task.prompt, "chosen": worked_answer(task), "rejected": guess(task, chance)}
        for task in taskset.next_batch(count)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


if __name__ == "__main__":
    write_pairs(Path(sys.argv[1]), NUM_PAIRS)
