"""The metrics of the last generation."""

from __future__ import annotations

import pytest

from octetrl.rollout.backend import SessionRecord
from tests.unit.engine.test_speculation import Told, answers_of, speculative
from tests.unit.engine.tiny_engine import Graphs, request, tiny_engine


def test_the_time_of_capturing_is_the_last_calls() -> None:
    engine = tiny_engine()
    assert engine.rollout_metrics() == {}
    asked = [request(max_new_tokens=2, ignore_eos=True)]
    engine.generate(asked)
    assert "time/capture" not in engine.rollout_metrics(), "what was not measured is left out"
    engine._runner.graphs = Graphs(engine)  # type: ignore[assignment]
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
