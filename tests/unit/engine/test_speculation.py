"""Speculation: tokens, log-probs, texts and stops are those of decoding one by one, whatever the drafts are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octetrl.config.schema import SpeculationConfig
from octetrl.engine import speculation
from octetrl.engine.draft_budget import TRIAL, DraftLosses
from octetrl.engine.draft_rows import DraftRows, num_right
from octetrl.engine.engine import Engine
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.model_runner import ModelRunner, Results
from octetrl.engine.request import RunningSequence, Step
from octetrl.engine.transcript import Batch
from octetrl.fp8.kv_scales import KVScales
from octetrl.layers.context import PagedContext
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, EarlierAnswer, GenerationRequest, LogitOptions, SessionEvent
from octetrl.rollout.backend import SessionRecord
from tests.unit.engine.tiny_engine import SCALES, SPEC, Graphs, policy_of, request, tiny_engine

ASKED = [
    request("drawn", prompt_length=21, num_siblings=2, seed=1, max_new_tokens=16),
    request("short", prompt_length=1, seed=2, max_new_tokens=12, top_k=20, top_p=0.9),
    request("greedy", prompt_length=33, seed=3, max_new_tokens=20, temperature=0.0),
    request("cool", prompt_length=16, seed=4, max_new_tokens=14, temperature=0.7, min_p=0.02),
    request("lettered", prompt_length=5, seed=5, max_new_tokens=20, ignore_eos=True, stop=("A", "CD", "P")),
    request("stopped", prompt_length=7, seed=6, max_new_tokens=20, stop_token_ids=(9, 10, 11)),
]


class Told:
    """Drafts from what is right: each token is the right one with probability `p`, given those before it."""

    def __init__(self, answers: dict[tuple[str, int], Sequence[int]], p: float) -> None:
        self._answers, self._p, self._draw = answers, p, random.Random(0)
        self._known: dict[tuple[str, int], int] = {}
        self.ended: list[tuple[str, int]] = []  # and were not cancelled
        self.losses = DraftLosses()

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        name = (sequence.group.request.id, sequence.sibling)
        known = self._known.get(name, 0)
        assert list(token_ids) == list(self._answers[name][known : known + len(token_ids)])
        self._known[name] = known + len(token_ids)

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        name = (sequence.group.request.id, sequence.sibling)
        known = self._known[name]
        right = list(self._answers[name][known : known + most])
        right += [3] * (most - len(right))  # past the end, so that a stop lies within the drafts
        return [token if self._draw.random() < self._p else (token + 1) % SPEC.vocab_size for token in right]

    def index(self) -> None: ...

    def end(self, sequence: RunningSequence, *, keeps: bool = True) -> None:
        self.ended += [(sequence.group.request.id, sequence.sibling)] if keeps else []

    def reset(self) -> None:
        self._known.clear()


class Random(Told):
    """Random drafts of random lengths."""

    def __init__(self) -> None:
        super().__init__({}, 0.0)
        self._draw = random.Random(1)

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None: ...

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        return [self._draw.randrange(SPEC.vocab_size) for _ in range(self._draw.randint(0, most))]


def speculative(precision: str = "bf16", source: Any = None, draft: int = 8, **config: Any) -> Engine:
    """An engine that always drafts; `source` None: from n-grams."""
    settings = SpeculationConfig(
        name="ngram", max_draft_tokens=draft, max_sequences=64, ngrams=(4, 2), min_gain=0.0, memory_tokens=5_000
    )
    engine = tiny_engine(precision, **{"page_size": 16, "max_batch": 24, **config, "speculation": settings})
    if source is not None:
        engine.draft_source = source
    return engine


def answers_of(asked: Sequence[GenerationRequest], answers: list[list[Completion]]) -> dict[tuple[str, int], Any]:
    return {
        (one.id, sibling): completion.token_ids
        for one, siblings in zip(asked, answers, strict=True)
        for sibling, completion in enumerate(siblings)
    }


@pytest.mark.parametrize(
    ("precision", "p"),
    [("bf16", 0.0), ("bf16", 1.0), ("fp8", 0.6), ("fp8_dynamic", 0.6), ("fp8_full", 0.0), ("fp8_full", 0.8)],
)
def test_answers_keep_their_bits(precision: str, p: float) -> None:
    plain = tiny_engine(precision, page_size=16, max_batch=24)
    engine = speculative(precision)
    if precision == "fp8_full":
        for one in (plain, engine):
            one.set_kv_scales(KVScales(0.4 * SCALES.scale_LS, 0))  # some values are clamped
    expected = plain.generate(ASKED)
    engine.draft_source = source = Told(answers_of(ASKED, expected), p)
    assert engine.generate(ASKED) == expected
    assert plain.metrics is not None and engine.metrics is not None
    drafts = engine.metrics.drafts
    assert drafts is not None and drafts.drafted > 30
    assert (drafts.accepted == 0) if p == 0 else (drafts.accepted > 10)
    if p == 1:
        assert engine.metrics.steps < 0.7 * plain.metrics.steps
    assert engine.metrics.generated_tokens == plain.metrics.generated_tokens
    if plain.metrics.kv_saturation_LS is not None:
        assert engine.metrics.kv_saturation_LS is not None and plain.metrics.kv_saturation > 0
        assert torch.equal(engine.metrics.kv_saturation_LS, plain.metrics.kv_saturation_LS)
    assert engine.metrics.non_finite_tokens == 0
    assert sorted(source.ended) == sorted(answers_of(ASKED, expected))


def test_random_drafts_in_small_batches_and_chunks() -> None:
    expected = tiny_engine().generate(ASKED)
    engine = speculative(source=Random(), max_batch=5, prefill_chunk=16)
    order = [2, 0, 5, 3, 1, 4]
    assert engine.generate([ASKED[n] for n in order]) == [expected[n] for n in order]
    assert engine.generate(ASKED[:2]) == expected[:2], "and again, with cached prefixes"


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_are_switched_on_and_off_at_any_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward with drafts is read before the next one is launched, whatever is decided while the device works."""
    expected = tiny_engine().generate(ASKED)
    draw, launch, read = random.Random(seed), ModelRunner.launch, Results.read
    unread: list[Results] = []

    def watched_launch(*how: Any) -> Results | None:
        assert not any(results.drafts is not None for results in unread)
        results = launch(*how)
        unread.extend([] if results is None else [results])
        return results

    def watched_read(results: Results) -> Any:
        unread.remove(results)
        return read(results)

    monkeypatch.setattr(ModelRunner, "launch", watched_launch)
    monkeypatch.setattr(Results, "read", watched_read)
    monkeypatch.setattr(speculation.DraftSwitch, "is_on", lambda *_: draw.random() < 0.6)
    engine = speculative(source=Told(answers_of(ASKED, expected), 0.8))
    engine._lag = 2
    assert engine.generate(ASKED) == expected
    assert engine.metrics is not None and engine.metrics.drafts is not None and engine.metrics.drafts.accepted > 10


def test_padded_batches() -> None:
    """As on a GPU: sizes are those of graphs, so idle rows lie behind the drafts."""
    expected = tiny_engine("fp8_full").generate(ASKED[:3])
    engine = speculative("fp8_full", Random(), draft=3, max_batch=16)
    engine._runner.graphs = Graphs()  # type: ignore[assignment]
    assert engine.generate(ASKED[:3]) == expected


def test_attention_knows_which_rows_are_of_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a sequence follow one another, with its pages, one key more each; idle rows are behind them, alone."""
    engine = speculative(source=Random(), draft=5, max_batch=16)
    engine._runner.graphs = Graphs()  # type: ignore[assignment]
    forward, contexts = ModelRunner._forward, []

    def record(runner: ModelRunner, token_T: Any, position_T: Any, context: PagedContext, **how: Any) -> Any:
        offset_B = context.draft_offset_B  # the next forward overwrites it
        contexts.append(context if offset_B is None else replace(context, draft_offset_B=offset_B.clone()))
        return forward(runner, token_T, position_T, context, **how)

    monkeypatch.setattr(ModelRunner, "_forward", record)
    engine.generate(ASKED[:3])
    drafted = [context for context in contexts if context.draft_offset_B is not None]
    assert len(drafted) < len(contexts) and all(context.max_query_len == 1 for context in drafted)
    longest = 0
    for context in drafted:
        offset_B, keys_B, table_BP = context.draft_offset_B, context.context_lens_B, context.block_table_BP
        assert offset_B is not None and offset_B.is_contiguous() and len(offset_B) == len(keys_B)
        assert offset_B[0] == 0 and (offset_B[keys_B == 0] == 0).all()
        (of_drafts,) = (offset_B > 0).nonzero(as_tuple=True)
        for values_B in (offset_B, keys_B):
            assert torch.equal(values_B[of_drafts], values_B[of_drafts - 1] + 1)
        assert torch.equal(table_BP[of_drafts], table_BP[of_drafts - 1])
        longest = max(longest, int(offset_B.max()))
    assert longest >= 3 and any((context.context_lens_B == 0).any() for context in drafted)


@pytest.mark.parametrize("lag", [0, 2])
def test_pages_that_run_out(lag: int) -> None:
    """Two sequences do not fit at full length. A draft never preempts, and forwards launched ahead are read first."""
    asked = [request(str(seed), seed=seed, max_new_tokens=26, ignore_eos=True) for seed in range(2)]
    expected = tiny_engine(page_size=16, kv_cache_tokens=160).generate(asked)
    for source, preempted in ((Random(), 1), (Told(answers_of(asked, expected), 0.7), 0)):
        tight = speculative(source=source, kv_cache_tokens=80)
        tight._lag = lag
        assert tight.generate(asked) == expected
        assert tight.metrics is not None and tight.metrics.preemptions == preempted


def test_turns_of_a_conversation_in_an_open_session() -> None:
    first = request("first", prompt_length=20, num_siblings=2, seed=1, max_new_tokens=20)

    def talk(engine: Engine) -> tuple[list[SessionEvent], int]:
        """The second turn's events, each answer's as one, and how many tokens were prefilled in both turns."""
        with engine.session() as session:
            session.submit(first)
            answers: dict[int, Completion] = {}
            while session.has_work:
                answers |= {event.sibling: event.completion for event in session.events() if event.completion}
            for n, answer in answers.items():
                prompt = (*first.prompt_token_ids, *answer.token_ids, 5, 6)
                session.submit(GenerationRequest(str(n), prompt, first.sampling, seed=7), streams=True)
            events: dict[str, SessionEvent] = {}
            while session.has_work:
                for event in session.events():
                    before = events.get(event.request_id)
                    told = event.token_ids if before is None else before.token_ids + event.token_ids
                    events[event.request_id] = replace(event, token_ids=told, logprobs=())
        assert engine.metrics is not None
        return [events[name] for name in sorted(events)], engine.metrics.prefilled_tokens

    expected = talk(tiny_engine(page_size=16))
    assert all(event.completion and event.token_ids == event.completion.token_ids for event in expected[0])
    (answers,) = tiny_engine().generate([first])
    second = {(event.request_id, 0): event.token_ids for event in expected[0]}
    source = Told(answers_of([first], [answers]) | second, 0.8)
    assert talk(speculative(source=source)) == expected, "pages of accepted drafts are found too"


def test_a_cancelled_request_leaves_no_page_and_no_drafts_behind() -> None:
    asked = [replace(one, id=one.id) for one in ASKED]
    expected = tiny_engine().generate(asked)
    engine = speculative(source=Random())
    source: Any = engine.draft_source
    with engine.session() as session:
        for one in asked:
            session.submit(one)
        events = [event for _ in range(12) for event in session.events()]
        session.cancel("drawn")
        while session.has_work:
            events += session.events()
    ended = {(event.request_id, event.sibling): event.completion for event in events if event.completion is not None}
    assert sorted(source.ended) == sorted(ended) and len(ended) == 6, "one of seven was cancelled"
    assert all(ended[name] == expected[[one.id for one in asked].index(name[0])][name[1]] for name in ended)


def test_requests_with_logit_options_are_decoded_one_by_one() -> None:
    asked = [
        request("penalised", num_siblings=2, max_new_tokens=20, logits=LogitOptions(frequency_penalty=0.7, num_top=2)),
        request("free", prompt_length=12, num_siblings=2, max_new_tokens=30, ignore_eos=True),
    ]
    expected = tiny_engine().generate(asked)
    engine = speculative(source=Random())
    assert engine.generate(asked) == expected
    assert engine.metrics is not None and engine.metrics.drafts is not None and engine.metrics.drafts.drafted > 0


@pytest.mark.parametrize("precision", ["bf16", "fp8_dynamic", "fp8_full"])
def test_a_draft_that_is_not_finite_spoils_nothing(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 49's embedding is NaN. Where it is drafted, the forward is undone; nothing of it stays in a page."""
    monkeypatch.setattr(speculation, "PAUSE", 2)
    spec = replace(SPEC, tied_embeddings=False)
    model = Decoder(spec, policy_of(precision), "rollout")
    model.random_init(seed=0)
    with torch.no_grad():
        model.embedding.weight[49] = float("nan")
    sampling = {"max_new_tokens": 16, "ignore_eos": True, "stop_token_ids": (49,)}  # as a query it would be an error
    asked = [request(str(n), prompt_length=9 + n, seed=n, **sampling) for n in range(2)]
    plain = tiny_engine(precision, model, page_size=16)
    expected = plain.generate(asked)

    class Poisoned(Told):
        def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
            drafts = list(super().propose(sequence, most))
            return [49 if self._draw.random() < 0.2 else token for token in drafts]

    engine = speculative(precision)
    engine = tiny_engine(precision, model, page_size=16, max_batch=24, speculation=engine._config.speculation)
    engine.draft_source = Poisoned(answers_of(asked, expected), 0.8)
    launch, num_undone = engine._runner.launch, 0

    def checked(step: Step, batch: Batch, cache: KVCache) -> Results | None:
        nonlocal num_undone
        num_undone += bool(step.decode) and not step.new_pages and not step.joined and step.drafts is None
        for pool in cache._pools.values():
            assert pool.pages.float().isfinite().all(), "what was drafted is still in a page"
            assert pool.token_scale is None or pool.token_scale.isfinite().all()
        return launch(step, batch, cache)

    engine._runner.launch = checked  # type: ignore[method-assign]
    assert engine.generate(asked) == expected
    assert num_undone > 0
    assert plain.metrics is not None and engine.metrics is not None and engine.metrics.drafts is not None
    assert engine.metrics.drafts.accepted > 0
    assert engine.metrics.non_finite_tokens == plain.metrics.non_finite_tokens == 0
    assert engine.metrics.kv_saturation == plain.metrics.kv_saturation


def test_drafting_pauses_while_it_gains_nothing_or_many_sequences_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward takes a second, with drafts and without."""
    monkeypatch.setattr(speculation, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    asked = [request(str(n), seed=n, max_new_tokens=90, ignore_eos=True) for n in range(3)]
    settings = SpeculationConfig(name="ngram", max_sequences=2, min_gain=0.2)
    expected = tiny_engine(page_size=16).generate(asked)
    answers = answers_of(asked, expected)

    def counts(source: Any, asked: list[GenerationRequest]) -> tuple[int, int]:
        engine = tiny_engine(page_size=16, max_batch=24, speculation=settings)
        engine.draft_source = source
        assert engine.generate(asked) == expected[: len(asked)]
        assert engine.metrics is not None and engine.metrics.drafts is not None
        return engine.metrics.drafts.forwards, engine.metrics.steps

    assert 0 < counts(Told(answers, 0.0), asked[:2])[0] <= TRIAL + 1
    assert counts(Told(answers, 1.0), asked[:2])[1] < 25
    assert counts(Told(answers, 1.0), asked) == (0, 91), "three run until the end"


def test_drafts_that_took_time_are_not_tried_again_in_the_next_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward takes a second, and a proposal half a second more."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    class Slow(Told):
        def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
            now[0] += 0.5
            return super().propose(sequence, most)

    monkeypatch.setattr(speculation, "time", SimpleNamespace(perf_counter=clock))
    asked = [request(str(n), seed=n, max_new_tokens=30, ignore_eos=True) for n in range(2)]
    answers = answers_of(asked, tiny_engine(page_size=16).generate(asked))
    engine = tiny_engine(page_size=16, max_batch=24, speculation=SpeculationConfig(name="ngram"))

    def num_drafted() -> int:
        engine.generate(asked)
        assert engine.metrics is not None and engine.metrics.drafts is not None
        return engine.metrics.drafts.drafted

    engine.draft_source = Slow(answers, 0.0)
    assert num_drafted() > 0 == num_drafted()
    engine.draft_source = Slow(answers, 0.0)
    assert num_drafted() > 0, "another source"


def test_what_is_accepted() -> None:
    # sequence 0 has no drafts; 1: the first right, the second wrong, the third right by chance; 2: both right
    drafts = DraftRows(
        np.zeros(8, dtype=np.int64),
        np.array([0, 0, 6, 9, 61, 0, 7, 70]),
        np.array([0, 0, 1, 2, 3, 0, 1, 2]),
        np.array([0, 1, 5]),
        np.array([0, 3, 2]),
    )
    sampled = np.array([5, 6, 60, 61, 62, 7, 70, 71], dtype=np.int32)
    assert num_right(drafts, sampled).tolist() == [0, 1, 2]


def test_ngrams_of_an_engine_over_several_calls() -> None:
    """The second call knows the first one's answers: with the same seeds all drafts are right."""
    asked = [request(str(n), 10 + n, num_siblings=2, seed=n, max_new_tokens=30, ignore_eos=True) for n in range(2)]
    plain = tiny_engine(page_size=16)
    expected = plain.generate(asked)
    engine = speculative()
    assert engine.generate(asked) == expected
    assert engine.metrics is not None and engine.metrics.drafts is not None
    first = engine.metrics.drafts
    engine.forget_prefixes()
    assert engine.generate(asked) == expected
    second = engine.metrics.drafts
    assert second.accepted > 70 > first.accepted and second.accepted > 0.7 * second.drafted
    assert engine.rollout_metrics()["rollout/forwards_saved"] == pytest.approx(second.saved)
    resumed = speculative()
    said = zip(asked, expected, strict=True)
    resumed.remember([EarlierAnswer(one.prompt_token_ids, each.token_ids) for one, group in said for each in group])
    assert resumed.generate(asked) == expected
    assert resumed.metrics is not None and resumed.metrics.drafts == second
    assert "rollout/drafted_tokens" not in tiny_engine().rollout_metrics()


# ---------------------------------------------------------------- metrics of the last generation


def test_the_time_of_capturing_is_the_last_calls() -> None:
    engine = tiny_engine()
    assert engine.rollout_metrics() == {}
    asked = [request(max_new_tokens=2, ignore_eos=True)]
    engine.generate(asked)
    assert "time/capture" not in engine.rollout_metrics(), "what was not measured is left out"
    engine._runner.graphs = Graphs()  # type: ignore[assignment]
    for _ in range(2):
        engine.generate(asked)
        assert engine.rollout_metrics()["time/capture"] == 0.5


def test_sessions_of_a_step_count_as_one() -> None:
    """Sums of sums: a filter that refills a step generates several times."""
    engine = tiny_engine()
    sessions = []
    for length in (3, 9):
        engine.generate([request(max_new_tokens=length, ignore_eos=True)])
        assert engine.metrics is not None
        sessions.append(engine.metrics)
    first, second = sessions
    records = [SessionRecord({"time/rollout": one.seconds}, one, worker_seconds=(one.seconds,)) for one in sessions]
    taken = records[0].followed_by(records[1]).named()
    assert taken["time/rollout"] == taken["time/rollout/worker_0"] == first.seconds + second.seconds
    assert taken["rollout/prefilled_tokens"] == first.prefilled_tokens + second.prefilled_tokens > 0
    assert taken["rollout/tokens_per_second"] == pytest.approx(12 / (first.seconds + second.seconds))
    assert taken["rollout/cache_occupancy"] == max(first.cache_occupancy, second.cache_occupancy)
    assert min(first.batch_occupancy, second.batch_occupancy) <= taken["rollout/batch_occupancy"]


def test_saturation_is_a_metric_of_calibrated_caches_alone() -> None:
    for precision, measured in (("fp8_full", True), ("fp8_dynamic", False)):
        engine = tiny_engine(precision)
        engine.generate([request(max_new_tokens=2, ignore_eos=True)])
        assert ("fp8/kv_saturation" in engine.rollout_metrics()) == measured


@pytest.mark.parametrize("siblings", [1, 3])
def test_right_drafts_save_as_many_forwards_as_are_reported(siblings: int) -> None:
    """Of sequences that run side by side to one length: each forward saves what one of them has accepted."""
    asked = [request("same", num_siblings=siblings, seed=1, max_new_tokens=26, ignore_eos=True)]
    plain = tiny_engine(page_size=16)
    answers = answers_of(asked, plain.generate(asked))
    engine = speculative(source=Told(answers, 1.0), draft=4)
    engine.generate(asked)
    assert plain.metrics is not None and engine.metrics is not None and engine.metrics.drafts is not None
    drafts = engine.metrics.drafts
    assert drafts.saved == pytest.approx(plain.metrics.steps - engine.metrics.steps) and drafts.saved > 15
    assert drafts.accepted == drafts.drafted == siblings * drafts.saved, "drafted tokens, without the rows before them"
