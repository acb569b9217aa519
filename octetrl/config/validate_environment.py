"""Check the combinations of fields in a recipe's `environment` section."""

from __future__ import annotations

import re
from collections.abc import Iterator

from octetrl.config.environment import EnvironmentConfig
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.system.errors import UserError, nearest

FILES = ("math", "jsonl", "code")
READY_TOOLS = ("calculator", "python", "search")
_OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_DATASETS = {
    "reasoning_gym": "the name of a reasoning_gym dataset, such as chain_sum",
    "code": 'the path of a JSONL file of {"prompt": ..., "tests": [...]}',
    "python": "your own environment as 'module:name'",
    "verifiers": "the name of an installed verifiers environment",
    "gymnasium": "the id of a Gymnasium environment, or 'module:name' of a function or class that creates one",
}
_SCORERS = ("reward", "reward_model", "judge")


def environment_problems(recipe: Recipe, training: bool) -> Iterator[Problem]:
    environment = recipe.environment
    draws = not training or recipe.algorithm.learns_from == "rollouts" or recipe.evaluation.every > 0
    if environment.dataset is None and draws:
        what = _DATASETS.get(environment.kind, 'the path of a JSONL file of {"prompt": ..., "answer": ...}')
        text = f"environment.dataset: missing; kind {environment.kind} needs {what}"
        yield Problem(("environment.dataset", "environment.kind"), text)
    yield from _unused_problems(environment)
    yield from _scorer_problems(environment)
    yield from _tool_problems(environment)
    if "{prompt}" not in environment.prompt_template:
        text = "environment.prompt_template: it has no {prompt}, so all prompts would be the same; add {prompt} to it"
        yield Problem(("environment.prompt_template",), text)
    for name in ("answer_marker", "reference_marker"):
        if getattr(environment, name) == "":
            whole = "completion" if name == "answer_marker" else "answer"
            text = f"environment.{name}: an empty text marks nothing; give a text, or null for the whole {whole}"
            yield Problem((f"environment.{name}",), text)


def _unused_problems(environment: EnvironmentConfig) -> Iterator[Problem]:
    kind = environment.kind
    if environment.parameters and kind in (*FILES, "python"):
        text = (
            f"environment.parameters: {', '.join(environment.parameters)} have no effect, because"
            f" kind {kind} has no parameters; set environment.parameters={{}}"
        )
        yield Problem(("environment.parameters", "environment.kind"), text)
    if environment.answer_tolerance != EnvironmentConfig.model_fields["answer_tolerance"].default and kind != "math":
        text = f"environment.answer_tolerance: kind {kind} does not compare numbers, so it has no effect; remove it"
        yield Problem(("environment.answer_tolerance", "environment.kind"), text)
    for name in ("columns", "reference_marker"):
        if getattr(environment, name) and kind not in FILES:
            text = f"environment.{name}: kind {kind} reads no file, so it has no effect; remove it"
            yield Problem((f"environment.{name}", "environment.kind"), text)
    for name in ("split", "subset", "eval_split"):
        chosen = getattr(environment, name)
        if chosen != EnvironmentConfig.model_fields[name].default and not _has_splits(environment):
            text = (
                f"environment.{name}: '{chosen}' has no effect, because only a Hugging Face data set has"
                f" {'subsets' if name == 'subset' else 'splits'} (owner/name, or a folder); remove it"
            )
            yield Problem((f"environment.{name}", "environment.dataset", "environment.kind"), text)
    if environment.eval_split == environment.split and environment.eval_split is not None:
        text = (
            f"environment.eval_split: '{environment.eval_split}' is also the split of the training tasks, so none would"
            " be left; give another split, or leave it out to hold out eval_size tasks"
        )
        yield Problem(("environment.eval_split", "environment.split"), text)


def _has_splits(environment: EnvironmentConfig) -> bool:
    """Whether the tasks come from a Hugging Face data set: of the hub, or a folder of one."""
    dataset = environment.dataset
    if environment.kind not in FILES or dataset is None:
        return False
    return not dataset.endswith((".jsonl", ".json", ".parquet"))


def _scorer_problems(environment: EnvironmentConfig) -> Iterator[Problem]:
    if environment.reward is not None and not _OBJECT.fullmatch(environment.reward):
        text = f"environment.reward: '{environment.reward}' is not module:name, such as my_rewards:length"
        yield Problem(("environment.reward",), text)
    given = [name for name in _SCORERS if getattr(environment, name) is not None]
    if len(given) > 1:
        first, *others = reversed(given)
        text = f"environment.{first}: cannot be combined with environment.{' and environment.'.join(others)}; keep one"
        yield Problem(tuple(f"environment.{name}" for name in (first, *others)), text)


def _tool_problems(environment: EnvironmentConfig) -> Iterator[Problem]:
    for name in environment.tools:
        if name not in READY_TOOLS and not _OBJECT.fullmatch(name):
            known = f"{nearest(name, READY_TOOLS)}; give {', '.join(READY_TOOLS)} or module:name"
            yield Problem(("environment.tools",), f"environment.tools: there is no tool '{name}'{known}")
    if environment.tools and environment.kind not in (*FILES, "reasoning_gym"):
        text = f"environment.tools: an environment of kind {environment.kind} has its own tools; remove these"
        yield Problem(("environment.tools", "environment.kind"), text)
    if ("search" in environment.tools) != (environment.corpus is not None):
        what = "the tool search needs a corpus" if environment.corpus is None else "only the tool search reads it"
        remedy = "give a file or folder" if environment.corpus is None else "add search to environment.tools"
        yield Problem(("environment.corpus", "environment.tools"), f"environment.corpus: {what}; {remedy}")


def refuse_for_turns(recipe: Recipe) -> None:
    """Refuse settings that an environment with several turns does not support. Raises UserError.

    Call it after loading the environment, because only then it is known to have several turns."""
    if recipe.environment.reward_model is not None:
        raise UserError(
            "environment.reward_model: it scores one answer to one prompt, but this environment has several turns;"
            " set it to null, or use environment.reward"
        )
    server = recipe.engine.openai
    if recipe.engine.backend == "openai" and server is not None and server.answers == "text":
        raise UserError(
            "engine.openai.answers: text has no token ids, and the turns of this environment are joined token by token;"
            " use a server that gives them (answers: tokens), or an environment with one turn"
        )
    if recipe.rollout.learn_beside_tail:
        raise UserError(
            "rollout.learn_beside_tail: it needs answers of one turn, but this environment has several; set it to false"
        )
    tokens, context = recipe.engine.kv_cache_tokens, recipe.model.context_length
    if tokens is not None and tokens < context:
        raise UserError(
            f"engine.kv_cache_tokens: {tokens} cannot hold a conversation of model.context_length {context} tokens;"
            f" raise it to at least {context}, or lower model.context_length"
        )
