"""Checks a request, splits it into sequences, and computes the pages that they may need.

A request that cannot succeed is refused here, before the first forward, in one line that names the request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octetrl.config.errors import UserError
from octetrl.engine.block_manager import BlockManager
from octetrl.engine.request import RequestGroup, RunningSequence
from octetrl.engine.stopping import Decode, Stopping
from octetrl.records import GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of the model, the cache and the recipe that a request must fit."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    decode: Decode  # of short windows, memoised

    def group(self, index: int, request: GenerationRequest) -> RequestGroup:
        """Checks the request. Raises UserError."""
        self._check_prompt(request)
        _check_sampling(request)
        limit = min(len(request.prompt_token_ids) + request.sampling.max_new_tokens, self.context_length)
        return RequestGroup(request, index, limit, num_unfinished=request.num_siblings)

    def siblings(self, group: RequestGroup) -> list[RunningSequence]:
        """The group's sequences, none of which has begun."""
        sampling = group.request.sampling
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        return [
            RunningSequence(
                group,
                sibling,
                Stopping(stop_token_ids, sampling.stop, group.limit, self.decode),
                list(group.request.prompt_token_ids),
            )
            for sibling in range(group.request.first_sibling, group.request.first_sibling + group.request.num_siblings)
        ]

    def _check_prompt(self, request: GenerationRequest) -> None:
        prompt = request.prompt_token_ids
        if not prompt:
            raise UserError(f"request '{request.id}': the prompt has no tokens; give at least one (BOS is enough)")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            raise UserError(
                f"request '{request.id}': prompt tokens lie between {min(prompt)} and {max(prompt)},"
                f" the model knows 0 to {self.vocab_size - 1}; use the model's own tokenizer"
            )
        if len(prompt) >= self.context_length:
            raise UserError(
                f"request '{request.id}': the prompt has {len(prompt)} tokens and model.context_length is"
                f" {self.context_length}, which leaves none to generate; shorten the prompt or raise it"
            )


def _check_sampling(request: GenerationRequest) -> None:
    sampling: SamplingParams = request.sampling
    rules = (
        (request.num_siblings >= 1, "num_siblings", request.num_siblings, "1 or more"),
        (request.first_sibling >= 0, "first_sibling", request.first_sibling, "0 or more"),
        (sampling.max_new_tokens >= 1, "max_new_tokens", sampling.max_new_tokens, "1 or more"),
        (0 <= sampling.temperature < math.inf, "temperature", sampling.temperature, "0 (greedy) or more"),
        (sampling.top_k >= 0, "top_k", sampling.top_k, "0 (all) or more"),
        (0 < sampling.top_p <= 1, "top_p", sampling.top_p, "above 0 and at most 1"),
        (0 <= sampling.min_p <= 1, "min_p", sampling.min_p, "between 0 and 1"),
        (all(sampling.stop), "stop", sampling.stop, "strings of at least one character"),
    )
    for holds, name, given, allowed in rules:
        if not holds:
            raise UserError(f"request '{request.id}': {name} is {given!r}; give {allowed}")


def check_fits(groups: Sequence[RequestGroup], blocks: BlockManager) -> None:
    """Raises UserError for a request that needs more pages than the cache has, even if it runs alone."""
    for group in groups:
        needed = blocks.pages_for(group.limit - 1)  # the last token is never a query
        if needed > blocks.num_pages:
            raise UserError(
                f"request '{group.request.id}': prompt and answer may take {group.limit} tokens, {needed} pages of"
                f" {blocks.page_size}, and the KV cache has {blocks.num_pages}; raise engine.kv_cache_tokens to"
                f" {needed * blocks.page_size} (or engine.kv_memory_fraction), or lower max_new_tokens"
            )


def pages_wanted(groups: Sequence[RequestGroup], max_batch: int, page_size: int) -> int:
    """Pages with which the longest `max_batch` sequences run at full length without preemption."""
    own: list[int] = []
    prefixes: list[int] = []
    for group in groups:
        shared_tokens = len(group.request.prompt_token_ids) - 1 if group.shares_prefix else 0
        growth = 1  # the scheduler keeps one page free for each running sequence
        pages = -(-(group.limit - 1) // page_size) - shared_tokens // page_size + growth
        own += [pages] * min(group.request.num_siblings, max_batch)
        prefixes.append(-(-shared_tokens // page_size))
    return sum(sorted(own, reverse=True)[:max_batch]) + sum(sorted(prefixes, reverse=True)[:max_batch])
