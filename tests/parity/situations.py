"""What may happen to a sequence in the engine and in the trainer without a bit of its log-probs changing.

The engine's situations give the same answers as the engine left alone, tokens and log-probs; the trainer's give the
engine's log-probs. Each situation says itself whether it came about: a preemption that never happened proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from octetrl.engine.engine import Engine
from octetrl.engine.prompt_rows import PromptRows
from octetrl.records import GenerationRequest
from tests.parity.sides import Answers, Sides
from tests.unit.engine.tiny_engine import Graphs

Asked = Sequence[GenerationRequest]
MakeEngine = Callable[..., Engine]
ROOM = 1 << 14  # tokens of a cache that outlives a call: on a CPU each call would allocate it


def one_by_one(make: MakeEngine, asked: Asked) -> Answers:
    """Each request by itself: decode alone, or with its siblings only."""
    engine = make()
    return [engine.generate([request])[0] for request in asked]


def small_pages(make: MakeEngine, asked: Asked) -> Answers:
    return make(page_size=16).generate(asked)


def small_chunks(make: MakeEngine, asked: Asked) -> Answers:
    return make(page_size=32, prefill_chunk=16).generate(asked)


def odd_chunks(make: MakeEngine, asked: Asked) -> Answers:
    return make(prefill_chunk=77).generate(asked)


def prompts_the_other_way(make: MakeEngine, asked: Asked) -> Answers:
    """Prompts as rows of decode's kernels, where they are chunks; as chunks, where they are rows, on a GPU."""
    engine = make(page_size=16)
    runner = engine._runner
    if runner.prompts is not None:
        runner.prompts = None
        return engine.generate(asked)
    graphs: Any = Graphs()
    runner.prompts = PromptRows(graphs, runner._forward, runner._max_tokens, 16)
    answers = engine.generate(asked)
    assert graphs.seconds > 0, "no prompt went the other way"
    return answers


def small_batches(make: MakeEngine, asked: Asked) -> Answers:
    """Other graph buckets, and other neighbours: the requests come in reverse."""
    return make(max_batch=3).generate(asked[::-1])[::-1]


def longest_first(make: MakeEngine, asked: Asked) -> Answers:
    known = [replace(request, expected_tokens=request.sampling.max_new_tokens) for request in asked]
    return make(max_batch=2).generate(known)


def prefix_hit(make: MakeEngine, asked: Asked) -> Answers:
    """The second call finds whole pages of its prompts in the cache."""
    engine = make(page_size=16, kv_cache_tokens=ROOM)
    first = engine.generate(asked)
    again = engine.generate(asked)
    assert again == first and engine.metrics is not None
    assert engine.metrics.prefilled_tokens < engine.metrics.prompt_tokens - 16, "no prompt was found in the cache"
    return again


def next_turn(make: MakeEngine, asked: Asked) -> Answers:
    """Decoded pages begin the next prompt: what a cold engine prefills, a warm one finds there, written by decode."""
    warm = make(page_size=16, kv_cache_tokens=ROOM)
    first = warm.generate(asked)
    turns = [
        replace(request, prompt_token_ids=request.prompt_token_ids + siblings[0].token_ids, num_siblings=1)
        for request, siblings in zip(asked, first, strict=True)
    ]
    found = warm.generate(turns)
    assert warm.metrics is not None
    warm_tokens = warm.metrics.prefilled_tokens
    cold = make(page_size=16, prefix_cache="off")
    assert cold.generate(turns) == found
    assert cold.metrics is not None and warm_tokens < cold.metrics.prefilled_tokens
    return first


def preempted(make: MakeEngine, asked: Asked) -> Answers:
    """A cache with room for little more than the longest: of siblings that all grow, the last is computed again."""
    longest = max(len(request.prompt_token_ids) + request.sampling.max_new_tokens for request in asked)
    engine = make(page_size=16, kv_cache_tokens=longest + 32)
    answers = engine.generate(asked)
    assert engine.metrics is not None and engine.metrics.preemptions > 0, "nobody was preempted"
    return answers


IN_THE_ENGINE: Mapping[str, Callable[[MakeEngine, Asked], Answers]] = {
    situation.__name__: situation
    for situation in (
        one_by_one,
        small_pages,
        small_chunks,
        odd_chunks,
        prompts_the_other_way,
        small_batches,
        longest_first,
        prefix_hit,
        next_turn,
        preempted,
    )
}


def in_the_trainer(longest: int) -> dict[str, dict[str, Any]]:
    """Settings of a trainer by name, for sequences of at most `longest` tokens."""
    return {
        "one sequence a micro-batch": {"tokens_per_micro_batch": max(16, longest // 4)},
        "everything kept": {"tokens_per_micro_batch": 2 * longest, "activation_checkpointing": "none"},
        "attention kept": {"tokens_per_micro_batch": 3 * longest, "activation_checkpointing": "attention"},
        "layers run again": {"tokens_per_micro_batch": 100 * longest, "activation_checkpointing": "layer"},
        "codes quantised again": {"tokens_per_micro_batch": 2 * longest, "weight_codes": "remade"},
        "small chunks of logits": {"tokens_per_micro_batch": 100 * longest, "logprob_chunk": 37},
        "large chunks of logits": {"tokens_per_micro_batch": 2 * longest, "logprob_chunk": 4096},
    }


def check_trainer(sides: Sides, asked: Asked, answers: Answers, **config: Any) -> None:
    """Every log-prob that the engine recorded is the trainer's."""
    engines, trainers = sides.logprobs(asked, answers, **config)
    assert len(engines) == sum(len(answer.token_ids) for siblings in answers for answer in siblings)
    assert engines.unique().numel() > len(engines) // 2, "log-probs that agree too well prove little"
    unequal = int((engines != trainers).sum())
    largest = float((engines - trainers).abs().max())
    assert torch.equal(engines, trainers), f"{unequal} of {len(engines)} log-probs differ, by up to {largest:.2e}"


def check_situations(
    sides: Sides,
    asked: Asked,
    context_length: int = 320,
    engine: Iterable[str] = tuple(IN_THE_ENGINE),
    trainer: Iterable[str] = tuple(in_the_trainer(1)),
) -> None:
    """An engine's answers alone and in these situations, and the trainer's log-probs of them; sequences of at most 320
    tokens."""

    def make(**config: Any) -> Engine:
        return sides.engine(context_length=context_length, **{"kv_cache_tokens": ROOM} | config)

    answers = make().generate(asked)
    for name in engine:
        assert IN_THE_ENGINE[name](make, asked) == answers, name
    for name in trainer:
        check_trainer(sides, asked, answers, **in_the_trainer(320)[name])


def check_some_situations(sides: Sides, asked: Asked) -> None:
    """`check_situations`, of an engine whose graphs take long to capture, and of the layers alone."""
    engine = ("one_by_one", "small_chunks", "prompts_the_other_way", "small_batches", "prefix_hit")
    check_situations(sides, asked, engine=engine, trainer=[name for name in in_the_trainer(1) if "logits" not in name])
