"""`octetrl init`: a folder with a recipe, an environment and its test, which trains a tiny model at once."""

from __future__ import annotations

import shlex
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Literal

import typer

from octetrl.cli.output import writes
from octetrl.run.tiny_model import write_tokenizer
from octetrl.system.errors import UserError

RECIPE = """\
# Trains a tiny model with random weights on the tasks of environment.py, with FP8 emulated on a CPU, in about a minute.
# For a real model: model: {path: Qwen/Qwen3-0.6B}, or the path of a folder, lr: 1.0e-6, and no cpu_threads.
precision: fp8_full
fp8: {kv_cache: dynamic}  # a scale for each token, because these weights change fast
model: {preset: tiny, init: random, tokenizer: tokenizer, context_length: 128}
rollout: {prompts_per_step: 8, group_size: 8, max_prompt_tokens: 64, max_new_tokens: 8}
engine: {page_size: 16}
trainer:
  tokens_per_micro_batch: 4096
  optimizer: {lr: 5.0e-3}
algorithm:
  name: grpo
  overlong_buffer: 1.0  # a longer answer has less reward, so the model learns to end; 0 where long answers are right
environment: {kind: python, dataset: "environment:environment", eval_size: 16}
evaluation: {every: 10}
cluster: {cpu_threads: 1}  # for a larger model on a CPU leave it out
steps: 30
output_dir: runs/first
"""
ENVIRONMENT = '''\
"""Tasks, and a score for each answer. Replace both with your own."""

import string

from octetrl import Task

ANIMALS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "owl", "pig")


class OneLetter:
    """The model is asked for one small letter. Any will do; anything after it lowers the score."""

    tasks = [
        Task(id=f"{animal}-{number}", prompt=f"Give {animal} {number} a letter.", answer="a")
        for animal in ANIMALS
        for number in range(20)
    ]

    def score(self, task, text):
        """A number; it may not depend on anything but task and text. Here: 1 for "a", 1/3 for "abc", 0 for "Abc"."""
        return 1 / len(text) if text and text[0] in string.ascii_lowercase else 0.0


environment = OneLetter()
'''
TEST = '''\
"""Run it in this folder: `python test_environment.py`, or `pytest` if it is installed."""

from environment import environment


def test_a_short_answer_is_worth_more():
    task = environment.tasks[0]
    assert environment.score(task, task.answer) == 1.0
    assert environment.score(task, "ab") == 0.5
    assert environment.score(task, "Ab") == 0.0
    assert environment.score(task, "") == 0.0


def test_prompts_differ():
    prompts = [task.prompt for task in environment.tasks]
    assert len(set(prompts)) == len(prompts)


if __name__ == "__main__":
    test_a_short_answer_is_worth_more()
    test_prompts_differ()
    print("2 tests passed")
'''
README = """\
# A first run with OctetRL

    python test_environment.py              # the tests of the tasks and the score
    octetrl check recipe.yaml --sample 2    # what the recipe means, and two answers with their rewards
    octetrl train recipe.yaml               # 30 steps of a tiny model: the reward rises from about 0 towards 1
    octetrl eval runs/first                 # held-out tasks
    octetrl rollouts runs/first             # what the model said
    octetrl report runs/first               # a page with curves, times and answers

Tasks and score are in `environment.py`, everything else in `recipe.yaml`. `tokenizer/` belongs to the tiny model.
"""
FILES = {"recipe.yaml": RECIPE, "environment.py": ENVIRONMENT, "test_environment.py": TEST, "README.md": README}
TOKENIZER = "tokenizer"
# Pairs of capitals fill the tiny model's vocabulary, so that each of its ids has a text; the prompt's words come first.
TOKENIZER_TEXTS = 2 * ["Give a letter."] + ["".join(pair) for pair in product(ascii_uppercase, repeat=2)]


def init(
    objective: Annotated[
        Literal["grpo"],
        typer.Argument(
            metavar="OBJECTIVE", help="Training objective of the project; only grpo so far.", show_default=False
        ),
    ],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to create.", show_default=False)],
) -> None:
    """Create a project: recipe, environment, test and README. It trains a tiny model at once."""
    target = Path(folder)
    there = [name for name in (*FILES, TOKENIZER) if (target / name).exists()]
    if there:
        raise UserError(f"init: '{folder}' already has {', '.join(there)}; give a new folder")
    with writes("init", target, "folder"):
        target.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (target / name).write_text(text, encoding="utf-8")
    write_tokenizer(TOKENIZER_TEXTS, target / TOKENIZER)
    typer.echo(f"wrote {', '.join(FILES)} and {TOKENIZER}/ in {target}")
    typer.echo(f"next: cd {shlex.quote(str(target))} && octetrl train recipe.yaml")
