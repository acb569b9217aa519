"""Preference pairs for the demo's reward model: a sum worked out rightly, and one that goes wrong on the way.

python examples/preference_pairs.py runs/demo/pairs.jsonl
"""

import json
import random
import sys
from pathlib import Path

from octetrl.config.load import load_recipe
from octetrl.environments.base import Taskset
from octetrl.records import Task
from octetrl.run.build import build_environment
from octetrl.run.demo import RECIPES, worked_answer

NUM_PAIRS = 4000


def wrong_answer(task: Task, chance: random.Random) -> str:
    """The worked answer with one result changed, which the steps after it do not know of."""
    steps, result = worked_answer(task).split(" #### ")
    totals = steps.split(", ")
    place = chance.randrange(len(totals))
    left, total = totals[place].split(" = ")
    totals[place] = f"{left} = {int(total) + chance.choice([-3, -2, -1, 1, 2, 3])}"
    if place == len(totals) - 1:
        result = totals[place].split(" = ")[1]
    return f"{', '.join(totals)} #### {result}"


def main(path: Path) -> None:
    recipe = load_recipe(str(RECIPES / "demo_sft.yaml"), [])
    environment = build_environment(recipe.environment)
    taskset = Taskset(environment.tasks, eval_size=recipe.environment.eval_size, seed=recipe.environment.seed)
    chance = random.Random(0)
    pairs = [
        {"prompt": task.prompt, "chosen": worked_answer(task), "rejected": wrong_answer(task, chance)}
        for task in taskset.next_batch(NUM_PAIRS)
    ]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
