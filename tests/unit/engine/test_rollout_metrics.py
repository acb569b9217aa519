"""The metrics of the last generation."""

from __future__ import annotations

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
