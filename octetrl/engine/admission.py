"""Checks a request, splits it into sequences, and computes the pages that they may need.

A request that cannot succeed is refused here, before the first forward, in one line that names the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from octetrl.config.schema import LEAST_TEMPERATURE
from octetrl.engine.block_manager import BlockManager
from octetrl.engine.grammars import Grammars
from octetrl.engine.logit_options import SequenceLogits
from octetrl.engine.prompt_scores import PromptScores
from octetrl.engine.request import RequestGroup, RunningSequence
from octetrl.engine.stopping import Stopping, TextDecoder
from octetrl.records import GenerationRequest, LogitOptions, SamplingParams
from octetrl.system.errors import UserError

MOST_TOP = 20  # likeliest tokens reported with each token, as in OpenAI's API
MOST_TOP_K = 1 << 40
LEAST_REPETITION = 0.01  # smaller penalties can make a logit infinite, which would end all requests of the engine


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of the model, the cache and the recipe that a request must fit."""

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    decode: TextDecoder  # of short windows, memoised
    grammars: Grammars | None = None  # None: none is compiled here

    def group(self, index: int, request: GenerationRequest) -> RequestGroup:
        """Checks the request. Raises UserError."""
        self._check_prompt(request)
        _check_sampling(request, self.vocab_size)
        limit = min(len(request.prompt_token_ids) + request.sampling.max_new_tokens, self.context_length)
        return RequestGroup(
            request, index, limit, num_unfinished=request.num_siblings, prompt_scores=self._check_logits(request)
        )

    def siblings(self, group: RequestGroup) -> list[RunningSequence]:
        """The group's sequences. None has begun here; one that continues (`said`) looks like a preempted one."""
        sampling = group.request.sampling
        stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_token_ids |= self.eos_token_ids
        token_ids, logprobs = group.request.said
        siblings = [
            RunningSequence(
                group,
                sibling,
                Stopping(stop_token_ids, sampling.stop, group.limit_of(sibling), self.decode),
                [*group.request.prompt_token_ids, *token_ids],
                list(logprobs),
                logits=self._sequence_logits(group, stop_token_ids),
            )
            for sibling in range(group.request.first_sibling, group.request.first_sibling + group.request.num_siblings)
        ]
        for one in siblings:
            for number, token in enumerate(token_ids, start=group.prompt_length + 1):
                one.stopping.after(token, number)  # for stop strings that began in them
        return siblings

    def _sequence_logits(self, group: RequestGroup, stop_token_ids: frozenset[int]) -> SequenceLogits | None:
        options = group.request.sampling.logits
        if options is None or not (options.edits or options.num_top):
            return None
        repeats = options.repetition_penalty != 1.0
        return SequenceLogits(
            options,
            stop_token_ids,
            prompt_token_ids=frozenset(group.request.prompt_token_ids if repeats else ()),
            guide=None if options.grammar is None else self._compiling.guide(options.grammar),
        )

    @property
    def _compiling(self) -> Grammars:
        if self.grammars is None:
            raise UserError("grammars are not followed here; leave the grammar out")
        return self.grammars

    def _check_logits(self, request: GenerationRequest) -> PromptScores | None:
        """Checks the request's options, its grammar too. Returns what collects its prompt's log-probs, if it asks."""
        options, sampling = request.sampling.logits, request.sampling
        if options is None:
            return None
        for name, given, allowed in _wrong_options(options, sampling, self.vocab_size):
            raise UserError(f"request '{request.id}': {name} is {given!r}; give {allowed}")
        if options.grammar is not None:
            self._compiling.guide(options.grammar)
        if not options.prompt_logprobs:
            return None
        return PromptScores(request.prompt_token_ids, temperature=sampling.temperature, num_top=options.num_top)

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


def _check_sampling(request: GenerationRequest, vocab_size: int) -> None:
    sampling: SamplingParams = request.sampling
    stops = [token for token in sampling.stop_token_ids if not 0 <= token < vocab_size]
    is_usable = sampling.temperature == 0 or LEAST_TEMPERATURE <= sampling.temperature < math.inf
    rules = (
        (request.num_siblings >= 1, "num_siblings", request.num_siblings, "1 or more"),
        (request.first_sibling >= 0, "first_sibling", request.first_sibling, "0 or more"),
        (sampling.max_new_tokens >= 1, "max_new_tokens", sampling.max_new_tokens, "1 or more"),
        (_can_continue(request), "said", request.said, "one sibling, fewer tokens than its limit, a log-prob for each"),
        (_has_limits(request), "answer_limits", request.answer_limits, "1 to max_new_tokens for every sibling"),
        (is_usable, "temperature", sampling.temperature, f"0 (greedy), or {LEAST_TEMPERATURE:g} or more"),
        (0 <= sampling.top_k <= MOST_TOP_K, "top_k", sampling.top_k, "0 (all) or more, at most the vocabulary"),
        (0 < sampling.top_p <= 1, "top_p", sampling.top_p, "above 0 and at most 1"),
        (0 <= sampling.min_p <= 1, "min_p", sampling.min_p, "between 0 and 1"),
        (all(sampling.stop), "stop", sampling.stop, "strings of at least one character"),
        (not stops, "stop_token_ids", stops, f"token ids below {vocab_size}"),
    )
    for holds, name, given, allowed in rules:
        if not holds:
            raise UserError(f"request '{request.id}': {name} is {given!r}; give {allowed}")


def _has_limits(request: GenerationRequest) -> bool:
    limits = request.answer_limits
    covers = len(limits) >= request.first_sibling + request.num_siblings
    return not limits or (covers and all(1 <= one <= request.sampling.max_new_tokens for one in limits))


def _can_continue(request: GenerationRequest) -> bool:
    token_ids, logprobs = request.said
    is_one = request.num_siblings == 1 and request.sampling.logits is None
    return not token_ids or (is_one and len(token_ids) == len(logprobs) < request.sampling.max_new_tokens)


def _wrong_options(
    options: LogitOptions, sampling: SamplingParams, vocab_size: int
) -> Iterator[tuple[str, object, str]]:
    """Name, value and allowed values of each option that can't be followed."""
    least, penalty = options.min_new_tokens, options.repetition_penalty
    biases = [token for token, _ in options.logit_bias if not 0 <= token < vocab_size]
    rules = (
        (0 <= least <= sampling.max_new_tokens, "min_new_tokens", least, "0 to max_new_tokens"),
        (not (least and sampling.stop), "min_new_tokens", least, "0 with stop strings, or stop_token_ids instead"),
        (not (least and options.grammar), "min_new_tokens", least, "0 with a grammar"),
        (abs(options.presence_penalty) <= 2, "presence_penalty", options.presence_penalty, "-2 to 2"),
        (abs(options.frequency_penalty) <= 2, "frequency_penalty", options.frequency_penalty, "-2 to 2"),
        (LEAST_REPETITION <= penalty <= 10, "repetition_penalty", penalty, f"{LEAST_REPETITION:g} to 10"),
        (not biases, "logit_bias", biases, f"token ids below {vocab_size}"),
        (all(abs(bias) <= 100 for _, bias in options.logit_bias), "logit_bias", "too large", "-100 to 100"),
        (0 <= options.num_top <= MOST_TOP, "num_top", options.num_top, f"0 to {MOST_TOP}"),
    )
    return ((name, given, allowed) for holds, name, given, allowed in rules if not holds)


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
