"""`octetrl init`: a folder with a recipe, an environment and its test, which trains a tiny model at once."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from octetrl.config.errors import UserError

RECIPE = """\
# Trains a tiny model with random weights on the tasks of environment.py, with FP8 emulated on a CPU.
# For a real model: model: {path: Qwen/Qwen3-0.6B}, or the path of a folder.
precision: fp8_full
model: {preset: tiny, init: random, tokenizer: tokenizer, context_length: 128}
rollout: {prompts_per_step: 8, group_size: 8, max_prompt_tokens: 64, max_new_tokens: 16}
engine: {page_size: 16}
trainer:
  tokens_per_micro_batch: 4096
  optimizer: {lr: 1.0e-3}
algorithm: {name: grpo}
environment: {kind: python, dataset: "environment:environment", eval_size: 16}
evaluation: {every: 10, right_from: 0.5}
steps: 20
output_dir: runs/first
"""
ENVIRONMENT = '''\
"""Tasks, and a score for each answer. Replace both with your own."""

import string

from octetrl import Task

ANIMALS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "owl", "pig")


class SmallLetters:
    """The model is asked for a word. The more of its answer are small letters, the better."""

    tasks = [
        Task(id=f"{animal}-{number}", prompt=f"Name {animal} {number} in small letters.", answer=animal)
        for animal in ANIMALS
        for number in range(20)
    ]

    def score(self, task, text):
        """A number; it may not depend on anything but task and text."""
        return sum(letter in string.ascii_lowercase for letter in text) / max(len(text), 1)


environment = SmallLetters()
'''
TEST = '''\
"""Run it with `pytest` in this folder."""

from environment import environment


def test_a_good_answer_is_worth_more():
    task = environment.tasks[0]
    assert environment.score(task, task.answer) == 1.0
    assert environment.score(task, "ANT!") == 0.0
    assert environment.score(task, "") == 0.0


def test_prompts_differ():
    prompts = [task.prompt for task in environment.tasks]
    assert len(set(prompts)) == len(prompts)
'''
README = """\
# A first run with OctetRL

    octetrl check recipe.yaml --sample 2    # what the recipe means, and two answers with their rewards
    octetrl train recipe.yaml               # 20 steps of a tiny model
    octetrl eval runs/first                 # held-out tasks
    octetrl rollouts runs/first             # what the model said

`environment.py` has the tasks and the score, `test_environment.py` tests them, `recipe.yaml` has everything else.
`tokenizer/` belongs to the tiny model; a real model brings its own.
"""
FILES = {"recipe.yaml": RECIPE, "environment.py": ENVIRONMENT, "test_environment.py": TEST, "README.md": README}
TOKENIZER = "tokenizer"


def init(
    objective: Annotated[
        Literal["grpo"],
        typer.Argument(metavar="OBJECTIVE", help="What the recipe trains by: grpo.", show_default=False),
    ],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to create.", show_default=False)],
) -> None:
    """Create a project: recipe, environment, test and README. It trains a tiny model at once."""
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise UserError(f"init: '{folder}' is a file; give a new folder")
    there = [name for name in (*FILES, TOKENIZER) if (target / name).exists()]
    if there:
        raise UserError(f"init: '{folder}' already has {', '.join(there)}; give a new folder")
    from octetrl.run.tiny_model import save_tokenizer

    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"init: '{folder}' can't be created ({error.strerror}); give another folder") from None
    for name, text in FILES.items():
        (target / name).write_text(text, encoding="utf-8")
    save_tokenizer(["Name in small letters."], target / TOKENIZER)
    typer.echo(f"wrote {', '.join(FILES)} and {TOKENIZER}/ in {target}")
    typer.echo(f"next: cd {shlex.quote(str(target))} && octetrl train recipe.yaml")
