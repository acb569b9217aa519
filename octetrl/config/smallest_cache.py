"""The smallest KV cache with which a backend generates, and settings of the cache that contradict others. No torch.

Our engine needs room for one prompt and answer. vLLM starts only if a whole `model.context_length` fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.backends import TRAITS
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem


def longest_rollout(recipe: Recipe) -> int:
    """Tokens of the longest prompt and answer, also of an evaluation, in whole pages."""
    return _in_pages(recipe, _longest(recipe))


def generates(recipe: Recipe) -> bool:
    """Whether the run samples answers, so that it needs a KV cache."""
    return recipe.algorithm.learns_from == "rollouts" or recipe.evaluation.every > 0


def smallest_cache(recipe: Recipe) -> int:
    """Tokens of the smallest KV cache with which a worker generates, in whole pages."""
    context = recipe.model.context_length if TRAITS[recipe.engine.backend].needs_context else 0
    return _in_pages(recipe, max(_longest(recipe), context))


def describe_smallest(recipe: Recipe) -> str:
    """What `smallest_cache` holds."""
    backend = TRAITS[recipe.engine.backend]
    if backend.needs_context:
        return f"model.context_length {recipe.model.context_length:,}, without which {backend.title} does not start"
    return "one rollout"


def cache_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the settings of the KV cache that contradict others."""
    engine, least = recipe.engine, smallest_cache(recipe)
    given = engine.kv_cache_tokens
    if given is not None and given // engine.page_size * engine.page_size < least:
        lengths = ("rollout.max_prompt_tokens", "rollout.max_new_tokens")
        what, also = f"one prompt and answer of {_longest(recipe)} tokens in pages of {engine.page_size}", ""
        if TRAITS[recipe.engine.backend].needs_context:
            lengths = ("engine.backend", "model.context_length")
            what = f"{describe_smallest(recipe)} (in pages of {engine.page_size})"
            also = ", or lower model.context_length"
        text = f"engine.kv_cache_tokens: {given} cannot hold {what}; raise it to at least {least}{also}"
        yield Problem(("engine.kv_cache_tokens", "engine.page_size", *lengths), text)
    if engine.prefix_cache == "keep" and recipe.fp8.kv_cache == "calibrated":
        text = (
            "engine.prefix_cache: 'keep' would read old codes with the new scales of a calibrated KV cache;"
            " use 'drop_on_publish', or fp8.kv_cache 'int8', 'dynamic' or 'none'"
        )
        yield Problem(("engine.prefix_cache", "fp8.kv_cache"), text)


def _longest(recipe: Recipe) -> int:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    return rollout.max_prompt_tokens + max(rollout.max_new_tokens, evaluation.max_new_tokens or 0)


def _in_pages(recipe: Recipe, tokens: int) -> int:
    page = recipe.engine.page_size
    return -(-tokens // page) * page
