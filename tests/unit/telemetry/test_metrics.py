import json
import time

import pytest

from octetrl.records import joined, worker_times
from octetrl.telemetry.metrics import StepMetrics
from octetrl.workers.clock import Clock


def test_merge_joins_and_reads_like_a_dict() -> None:
    metrics = StepMetrics.merge({"loss": 0.5}, {"reward/mean": 1}, StepMetrics.merge({"time/step": 2.0}))
    assert dict(metrics) == {"loss": 0.5, "reward/mean": 1, "time/step": 2.0}
    assert json.loads(json.dumps(dict(metrics))) == dict(metrics)


@pytest.mark.parametrize(
    ("mappings", "said"),
    [
        (({"loss": 1.0}, {"loss": 1.0}), "'loss' is reported twice"),
        (({"Loss Value": 1.0},), "not family/name"),
        (({"loss": "1.0"},), "is a str, not a number"),
    ],
)
def test_merge_refuses(mappings: tuple, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        StepMetrics.merge(*mappings)


def test_a_clock_times_its_block_also_when_it_raises() -> None:
    clock = Clock()
    with clock("train") as trained, clock("calibrate") as calibrated:
        time.sleep(0.002)
    assert trained["time/train"] >= calibrated["time/calibrate"] >= 0.002
    with pytest.raises(ZeroDivisionError), clock("rollout") as took:
        _ = 1 / 0
    assert set(took) == {"time/rollout"}


def test_times_add_up_and_the_largest_peak_counts() -> None:
    once = {"time/train": 2.0, "memory/peak_gb": 3.0, "loss": 1.0}
    assert joined(once, {"time/train": 1.0, "memory/peak_gb": 2.0}) == {**once, "time/train": 3.0}
    assert worker_times("time/train", (1.0, 4.0), 2) == {
        "time/train/worker_2": 1.0,
        "time/train/worker_3": 4.0,
        "time/train/slowest": 3.0,
    }
    assert worker_times("time/train", ()) == {}
