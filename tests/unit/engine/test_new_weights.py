"""New weights in an open session: what was sampled stays, what follows is of the new weights, and no page is stale.

The reference of recomputed caches are the log-probs that a prefill of the whole sequence gives, by an engine that has
had one set of weights only. A kept cache is compared with a session in which the sequence is alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from octetrl.engine.engine import Engine
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, GenerationRequest, LogitOptions, WeightSet
from octetrl.rollout.samples import versions_by_token
from tests.unit.engine.test_session import ROOMS, drain, finished
from tests.unit.engine.tiny_engine import SPEC, policy_of, request, tiny_engine, tiny_model

MANY = [
    request("drawn", prompt_length=21, num_siblings=3, seed=1, max_new_tokens=24, ignore_eos=True),
    request("short", prompt_length=1, num_siblings=2, seed=2, max_new_tokens=9, top_k=20),
    request("long", prompt_length=40, num_siblings=2, seed=5, max_new_tokens=30, ignore_eos=True),
    request("streamed", prompt_length=16, num_siblings=1, seed=6, max_new_tokens=20, ignore_eos=True),
]
Answers = dict[tuple[str, int], Completion]
DRAFTS: dict[str, tuple[dict[str, Any], int]] = {"drafts": ({"page_size": 16, "speculation": {"name": "ngram"}}, 2)}


def weights_of(precision: str, version: int) -> WeightSet:
    model = tiny_model(precision, seed=version)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return WeightSet(version, tensors, {})  # the engine quantises them


def engine_of(room: str, precision: str, version: int = 0) -> Engine:
    config, lag = (ROOMS | DRAFTS)[room]
    model = Decoder(SPEC, policy_of(precision), "rollout")
    engine = tiny_engine(precision, model, **config)
    engine._lag = lag
    engine.put_weights(weights_of(precision, version))
    return engine


def putting(engine: Engine, precision: str, version: int) -> Callable[[], int]:
    def put() -> int:
        engine.put_weights(weights_of(precision, version))
        engine.weights_digest(covers_all=True)
        return version

    return put


def drawn(
    room: str, precision: str, asked: list[GenerationRequest], forwards: tuple[int, ...], **how: Any
) -> tuple[Answers, Engine]:
    """`forwards[n]`: how many steps are run before the weights of version n + 1 come."""
    engine = engine_of(room, precision)
    events = []
    with engine.session() as session:
        for one in asked:
            session.submit(one, streams=one.id == "streamed")
        for version, count in enumerate(forwards, 1):
            for _ in range(count):
                events += session.events()
            events += session.adopt(putting(engine, precision, version), **how)
            session._scheduler.check()
        events += drain(session)
        assert session.pages_in_use == 0
    for token_event in events:
        if token_event.completion is not None:
            told = [
                one for one in events if (one.request_id, one.sibling) == (token_event.request_id, token_event.sibling)
            ]
            assert sum((one.token_ids for one in told), ()) == token_event.completion.token_ids
    return finished(events), engine


def by_prefill(precision: str, version: int, asked: GenerationRequest, completion: Completion) -> tuple[float, ...]:
    """Log-probs of the completion's tokens by the weights of `version` alone: the whole sequence as a prompt."""
    sampling = replace(asked.sampling, max_new_tokens=1, logits=LogitOptions(prompt_logprobs=True))
    whole = GenerationRequest("whole", asked.prompt_token_ids + completion.token_ids, sampling)
    with engine_of("roomy", precision, version).session() as session:
        session.submit(whole)
        details = [event.details for event in drain(session)]
    scores = next(one.prompt for one in details if one is not None and one.prompt is not None)
    return scores.logprobs[len(asked.prompt_token_ids) - 1 :]


@pytest.mark.parametrize(
    ("room", "precision"),
    [
        ("roomy", "fp8_dynamic"),
        ("ahead", "bf16"),
        ("crowded", "bf16"),
        ("few pages ahead", "fp8"),
        ("no prefixes", "bf16"),
        ("drafts", "bf16"),
    ],
)
def test_a_recomputed_cache_is_that_of_the_new_weights_alone(room: str, precision: str) -> None:
    answers, engine = drawn(room, precision, MANY, (9, 8), keeps_cache=False)
    assert len(answers) == sum(one.num_siblings for one in MANY)
    assert max(len(completion.updates) for completion in answers.values()) == 2
    for one in MANY:
        for sibling in range(one.num_siblings):
            completion = answers[one.id, sibling]
            versions = versions_by_token(completion)
            assert versions == sorted(versions) and len(versions) == len(completion.token_ids)
            expected = {version: by_prefill(precision, version, one, completion) for version in set(versions)}
            assert completion.logprobs == tuple(expected[version][n] for n, version in enumerate(versions))
    assert engine.policy_version == 2


@pytest.mark.parametrize(("room", "precision"), [("roomy", "bf16"), ("ahead", "fp8_dynamic")])
def test_a_kept_cache_is_that_of_a_sequence_alone(room: str, precision: str) -> None:
    answers, _ = drawn(room, precision, MANY, (13,), keeps_cache=True)
    recomputed, _ = drawn(room, precision, MANY, (13,), keeps_cache=False)
    updated = 0
    for one in MANY:
        for sibling in range(one.num_siblings):
            completion = answers[one.id, sibling]
            if not completion.updates:
                continue
            ((begin, _),) = completion.updates
            updated += 1
            assert alone(precision, one, sibling, begin) == completion
            assert completion.logprobs[: begin + 1] != recomputed[one.id, sibling].logprobs[: begin + 1]
    assert updated >= 4


def alone(precision: str, asked: GenerationRequest, sibling: int, begin: int) -> Completion:
    """The same sibling without others; new weights come after `begin` of its tokens."""
    engine, sampled = engine_of("roomy", precision), 0
    with engine.session() as session:
        session.submit(replace(asked, num_siblings=1, first_sibling=sibling), streams=True)
        while sampled < begin:
            sampled += sum(len(event.token_ids) for event in session.events())
        session.adopt(putting(engine, precision, 1), keeps_cache=True)
        return finished(drain(session))[asked.id, sibling]


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_who_starts_later_finds_no_page_of_the_old_weights(keeps_cache: bool) -> None:
    early = request("early", prompt_length=40, num_siblings=2, seed=5, max_new_tokens=30, ignore_eos=True)
    late = replace(early, id="late", seed=9)
    engine = engine_of("roomy", "bf16")
    events = []
    with engine.session() as session:
        session.submit(early)
        for _ in range(10):
            events += session.events()
        events += session.adopt(putting(engine, "bf16", 1), keeps_cache=keeps_cache)
        session.submit(late)  # the early ones still run, and have pages with its prompt
        events += drain(session)
        said = next(event.completion for event in events if event.completion and event.request_id == "early")
        turn = replace(late, id="turn", prompt_token_ids=early.prompt_token_ids + said.token_ids)
        session.submit(replace(late, id="last"))  # by now they are finished, and their pages are free
        session.submit(turn)  # an old answer with a cache of both weights, which a later turn must not find
        events += drain(session)
    answers = finished(events)
    for name, asked in (("late", late), ("last", late), ("turn", turn)):
        expected = engine_of("roomy", "bf16", 1).generate([asked])[0]
        assert [answers[name, sibling] for sibling in (0, 1)] == expected
    assert not any(answers["late", sibling].updates for sibling in (0, 1))


@pytest.mark.parametrize("keeps_cache", [True, False])
def test_siblings_that_start_later_share_no_prefix_of_the_old_weights(keeps_cache: bool) -> None:
    asked = request("crowd", prompt_length=40, num_siblings=9, seed=5, max_new_tokens=12, ignore_eos=True)
    answers, _ = drawn("crowded", "bf16", [asked], (8,), keeps_cache=keeps_cache)
    later = [sibling for sibling in range(9) if answers["crowd", sibling].policy_version == 1]
    assert 2 < len(later) < 9
    expected = engine_of("crowded", "bf16", 1).generate([asked])[0]
    assert [answers["crowd", sibling] for sibling in later] == [expected[sibling] for sibling in later]


def test_an_answer_that_begins_after_the_update_has_one_version() -> None:
    sequence_updates = drawn("crowded", "bf16", MANY, (0,), keeps_cache=False)[0]
    assert {(one.policy_version, one.updates) for one in sequence_updates.values()} == {(1, ())}


def test_weights_are_still_refused_beside_an_open_session() -> None:
    engine = engine_of("roomy", "bf16")
    with engine.session() as session:
        session.submit(MANY[0])
        session.adopt(putting(engine, "bf16", 1), keeps_cache=True)
        with pytest.raises(RuntimeError, match="open session"):
            engine.put_weights(weights_of("bf16", 2))
