"""Writes conversations for recipes/demo_sft_messages.yaml: worked sums, some in two turns, and results without steps.

python examples/conversations.py runs/demo
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.environments.tasks import Taskset
from octetrl.run.demo import bare_answer, worked_answer
from octetrl.run.environment import build_environment

NUM_CONVERSATIONS = 4000


def conversation(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]}


def main(folder: Path) -> None:
    recipe = load_recipe(shipped_path("demo_sft"))
    environment = build_environment(recipe.environment)
    taskset = Taskset(environment.tasks, eval_size=recipe.environment.eval_size, seed=recipe.environment.seed)
    chance = random.Random(0)
    worked, bare = [], []
    for task in taskset.next_batch(NUM_CONVERSATIONS):
        if chance.random() < 0.25:
            worked.append(conversation(task.prompt, bare_answer(task), "Show the steps.", worked_answer(task)))
        else:
            worked.append(conversation(task.prompt, worked_answer(task)))
        bare.append(conversation(task.prompt, bare_answer(task)))
    for name, rows in (("worked.jsonl", worked), ("bare.jsonl", bare)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
