"""`octetrl init`: a folder with a recipe, its data, an environment and its test, which trains a tiny model at once."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from itertools import product
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Literal, NamedTuple

import typer

from octetrl.cli.output import writes
from octetrl.config.shipped import FOLDER, SCHEMA
from octetrl.run.tiny_model import write_tokenizer
from octetrl.system.errors import UserError

RECIPE = """\
# yaml-language-server: $schema=recipe.schema.json
# Trains a tiny model with random weights by {name}, with FP8 emulated on a CPU, in about {seconds} s.
# For a real model: model: {path: Qwen/Qwen3-0.6B}, or the path of a folder, lr: {lr}, and no cpu_threads.
model: {preset: tiny, init: random, tokenizer: tokenizer, context_length: 128}
{fields}
engine: {page_size: 16}
environment: {kind: python, dataset: "environment:environment", eval_size: 16}
evaluation: {every: 10}
cluster: {cpu_threads: 1}  # for a larger model on a CPU leave it out
steps: {steps}
output_dir: runs/first
"""
GRPO = """\
precision: fp8_full
fp8: {kv_cache: dynamic}  # a scale for each token, because these weights change fast
rollout: {prompts_per_step: 8, group_size: 8, max_prompt_tokens: 64, max_new_tokens: 8}
trainer:
  tokens_per_micro_batch: 4096
  optimizer: {lr: 5.0e-3}
algorithm:
  name: grpo
  overlong_buffer: 1.0  # a longer answer has less reward, so the model learns to end; 0 where long answers are right"""
PPO = """\
precision: fp8_full
fp8: {kv_cache: dynamic}  # a scale for each token, because these weights change fast
rollout: {prompts_per_step: 64, group_size: 1, max_prompt_tokens: 64, max_new_tokens: 8}
trainer:
  tokens_per_micro_batch: 4096
  optimizer: {lr: 5.0e-3}
algorithm:
  name: ppo
  gae_lambda: 1.0
  overlong_buffer: 1.0  # a longer answer has less reward, so the model learns to end; 0 where long answers are right
critic:  # learns the reward to expect at each token; it begins with the model's weights
  optimizer: {lr: 5.0e-3}"""
SFT = """\
precision: fp8
rollout: {max_prompt_tokens: 64, max_new_tokens: 8}  # of evaluations
trainer:
  tokens_per_micro_batch: 4096
  optimizer: {lr: 5.0e-3}
algorithm:
  name: sft
  conversations: conversations.jsonl  # lines of prompt and answer, or of messages
  batch_size: 32"""
DPO = """\
precision: fp8
rollout: {max_prompt_tokens: 64, max_new_tokens: 8}  # of evaluations
trainer:
  tokens_per_micro_batch: 4096
  optimizer: {lr: 1.0e-3}
algorithm:
  name: dpo
  conversations: pairs.jsonl  # lines of prompt, chosen and rejected
  batch_size: 32
  preference_beta: 0.1"""
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
AGENT = '''\
"""Tasks of one letter each, an agent that asks the model, and the reward of what it brings back."""

import json
import string
import urllib.request

from octetrl import Conversation, Model, Task, reward

ANIMALS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "owl", "pig")


def ask(model: Model, messages: list) -> str:
    """What the model answers: OpenAI's client, or any program with a base URL and a key, does the same."""
    body = json.dumps({"model": model.name, "messages": messages}).encode()
    headers = {"authorization": f"Bearer {model.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{model.base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def rating(text: str) -> float:
    """1 for "a", 1/3 for "abc"; half as much for "Abc", which has its small letters behind; 0 without any."""
    small = [letter in string.ascii_lowercase for letter in text]
    return (1.0 if small[0] else 0.5) / len(text) if any(small) else 0.0


class TwoLetters:
    tasks = tuple(
        Task(id=f"{animal}/{n}", prompt=f"Give {animal} {n} a letter.") for n in range(10) for animal in ANIMALS
    )

    def agent(self, task: Task, model: Model) -> list[str]:
        """Called once for each rollout. All that the model answers here is trained on."""
        messages = [{"role": "user", "content": task.prompt}]
        first = ask(model, messages)
        if rating(first) < 1:
            return [first]
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Another."}]
        return [first, ask(model, messages)]

    @reward
    def short(self, conversation: Conversation) -> float:
        return sum(map(rating, conversation.result)) / 2


environment = TwoLetters()
'''
AGENT_TEST = '''\
"""Run it in this folder: `python test_environment.py`, or `pytest` if it is installed."""

from environment import environment, rating


def test_a_short_answer_is_worth_more():
    assert [rating(text) for text in ("a", "ab", "Ab", "A", "")] == [1.0, 0.5, 0.25, 0.0, 0.0]


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
    octetrl check recipe.yaml{sample:<15}# what the recipe means, and whether it fits
    octetrl train recipe.yaml               # {steps} steps of a tiny model: {result}
    octetrl eval runs/first                 # held-out tasks
    octetrl {look}
    octetrl report runs/first               # a page with curves, times and answers

`environment.py` has tasks and score, {rows}`recipe.yaml` the rest. `tokenizer/` belongs to the tiny model.
"""
TOKENIZER = "tokenizer"
# Pairs of capitals fill the tiny model's vocabulary, so that each of its ids has a text; the prompt's words come first.
TOKENIZER_TEXTS = 2 * ["Give a letter."] + ["".join(pair) for pair in product(ascii_uppercase, repeat=2)]
ANIMALS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "owl", "pig")
NUMBERS = range(20, 70)  # of rows; the environment's tasks, of which some are held out, have others


class Project(NamedTuple):
    """What differs between objectives. rows: a file of data, and what its rows have besides the prompt."""

    seconds: int
    fields: str
    result: str
    rows: tuple[str, Callable[[str], dict[str, str]]] | None = None
    steps: int = 30
    lr: str = "1.0e-6"  # of a real model, as in docs/start.md
    environment: str = ENVIRONMENT
    test: str = TEST

    def files(self, name: str) -> dict[str, str]:
        """The files of the project by name; the recipe first."""
        recipe = RECIPE.replace("{fields}", self.fields).replace("{seconds}", str(self.seconds))
        recipe = recipe.replace("{steps}", str(self.steps)).replace("{lr}", self.lr)
        files = {"recipe.yaml": recipe.replace("{name}", name), "environment.py": self.environment}
        sample, learns_from, look = " --sample 2", "", "rollouts runs/first             # what the model said"
        if self.rows is not None:
            file, row = self.rows
            rows = [{"prompt": f"Give {one} {number} a letter.", **row(one)} for number in NUMBERS for one in ANIMALS]
            files[file] = "".join(json.dumps(row) + "\n" for row in rows)
            sample, learns_from = "", f"`{file}` what to learn from, "
            look = 'generate runs/first -p "Give owl 7 a letter."'
        readme = README.format(sample=sample, steps=self.steps, result=self.result, rows=learns_from, look=look)
        schema = (FOLDER / SCHEMA).read_text(encoding="utf-8")
        return {**files, "test_environment.py": self.test, "README.md": readme, SCHEMA: schema}


PROJECTS = {
    "grpo": Project(15, GRPO, "the reward rises from about 0 towards 1"),
    "sft": Project(10, SFT, "the loss falls", ("conversations.jsonl", lambda one: {"answer": one[0]}), lr="1.0e-5"),
    "dpo": Project(
        15,
        DPO,
        "it prefers what was chosen",
        ("pairs.jsonl", lambda one: {"chosen": one[0], "rejected": one.title()}),
        lr="5.0e-7",
    ),
    "ppo": Project(35, PPO, "the reward rises"),
    "agent": Project(60, GRPO, "the reward rises to 1", steps=60, environment=AGENT, test=AGENT_TEST),
}


def init(
    objective: Annotated[
        Literal["grpo", "sft", "dpo", "ppo", "agent"],
        typer.Argument(
            metavar="OBJECTIVE",
            help="What it trains by: grpo, sft, dpo, ppo; agent: grpo on a program that calls the model.",
            show_default=False,
        ),
    ],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to create.", show_default=False)],
) -> None:
    """Create a project: recipe, environment, test and README. It trains a tiny model at once."""
    target, files = Path(folder), PROJECTS[objective].files("GRPO" if objective == "agent" else objective.upper())
    there = [name for name in (*files, TOKENIZER) if (target / name).exists()]
    if there:
        raise UserError(f"init: '{folder}' already has {', '.join(there)}; give a new folder")
    with writes("init", target, "folder"):
        target.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (target / name).write_text(text, encoding="utf-8")
    write_tokenizer(TOKENIZER_TEXTS, target / TOKENIZER)
    typer.echo(f"wrote {', '.join(files)} and {TOKENIZER}/ in {target}")
    typer.echo(f"next: cd {shlex.quote(str(target))} && octetrl train recipe.yaml")
