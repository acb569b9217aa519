"""What a worker says of a step's generation."""

from __future__ import annotations

from octetrl.workers.worker import Worker
from tests.unit.engine.tiny_engine import Graphs, policy_of, request, tiny_engine


def test_the_time_of_capturing_is_the_last_calls() -> None:
    worker = object.__new__(Worker)
    worker.engine, worker.policy = tiny_engine(), policy_of("bf16")
    assert worker.rollout_metrics() == {}
    asked = [request(max_new_tokens=2, ignore_eos=True)]
    worker.engine.generate(asked)
    assert "time/capture" not in worker.rollout_metrics(), "what was not measured is left out"
    worker.engine._runner.graphs = Graphs(worker.engine)  # type: ignore[assignment]
    for _ in range(2):
        worker.engine.generate(asked)
        assert worker.rollout_metrics()["time/capture"] == 0.5
