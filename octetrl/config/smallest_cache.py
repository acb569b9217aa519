"""The smallest KV cache with which a backend generates, and settings of the cache that contradict others. No torch.

Our engine needs room for one prompt and answer. vLLM starts only if a whole `model.context_length` fits.
"""

from __future__ import annotations

from octetrl.config.backends import TRAITS
from octetrl.config.schema import Recipe


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


def _longest(recipe: Recipe) -> int:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    return rollout.max_prompt_tokens + max(rollout.max_new_tokens, evaluation.max_new_tokens or 0)


def _in_pages(recipe: Recipe, tokens: int) -> int:
    page = recipe.engine.page_size
    return -(-tokens // page) * page
