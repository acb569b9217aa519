"""The example tasks can be solved, in every form."""

from __future__ import annotations

import pytest

from octetrl.config.sandbox import SandboxConfig
from octetrl.data.tasks import read_tasks
from octetrl.environments.code_scorer import CodeScorer
from octetrl.process.levels import Level
from octetrl.process.sandbox import find_sandbox
from octetrl.system.errors import UserError
from tests.required import missing

TASKS = {task.id: task for task in read_tasks("examples/code_tasks.jsonl")}
SOLUTIONS = {
    "add": "def add(a, b): return a + b",
    "vowels": "def vowels(text): return sum(letter in 'aeiou' for letter in text.lower())",
    "runs": "from itertools import groupby\ndef runs(items): return [(x, len(list(run))) for x, run in groupby(items)]",
    "stack": "class Stack(list):\n    push = list.append",
    "total": "import sys\nprint(sum(map(int, sys.stdin)))",
    "fizz": "for n in range(1, int(input()) + 1): print('Fizz' if n % 3 == 0 else n)",
    "reversed": "def turn(items): items.reverse()",
    "primes": "def primes(n):\n    for p in range(2, n):\n        if all(p % q for q in range(2, p)): yield p",
}


def test_all_have_a_solution() -> None:
    assert SOLUTIONS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", TASKS)
def test_it_passes(name: str) -> None:
    try:
        find_sandbox()
    except UserError as error:
        missing(Level.LANDLOCK, str(error))
    scorer = CodeScorer(SandboxConfig(wall_seconds=30.0))
    answer = scorer(TASKS[name], f"```python\n{SOLUTIONS[name]}\n```")
    assert answer == 1.0, answer.detail
