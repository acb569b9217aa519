"""Each step has the times of its own batch, whenever that was generated."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from octetrl.rollout.collect import collect_batch
from octetrl.rollout.collected import CollectedBatch
from octetrl.run.loop import one_step
from octetrl.run.step import learn
from octetrl.telemetry.metrics import StepMetrics
from tests.e2e.tiny_run import make_model
from tests.unit.workers.many.thread_team import run_on


def test_a_batch_that_ends_within_an_earlier_step_keeps_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took: list[float] = []
    model = make_model(tmp_path / "model")
    generated, learnt = threading.Event(), threading.Event()
    with run_on(1, model, tmp_path, engines=1, ahead=1, steps=3, precision="bf16") as run:

        def collect(*given: Any) -> CollectedBatch:
            began = time.perf_counter()
            collected = collect_batch(*given)
            took.append(time.perf_counter() - began)
            if given[-2].step == 2:
                generated.set()
                assert learnt.wait(120.0)
            return collected

        def learn_after_it(*given: Any) -> StepMetrics:
            assert generated.wait(120.0), "the second batch ends before the first step does"
            return learn(*given)

        monkeypatch.setattr("octetrl.run.ahead.collect_batch", collect)
        monkeypatch.setattr("octetrl.run.ahead.learn", learn_after_it)
        lines = []
        for step in (1, 2, 3):
            try:
                lines.append(one_step(run, step).metrics)
            finally:
                learnt.set()
    for line, seconds in zip(lines, took, strict=True):
        assert 0.0 < line["time/rollout/worker_1"] <= line["time/rollout"] <= seconds
        assert "time/reward" in line and "time/wait_for_batch" in line
