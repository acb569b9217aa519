import json
import time

import pytest

from octetrl.telemetry.metrics import StepMetrics
from octetrl.telemetry.spans import Spans


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


def test_spans_add_up_nest_and_start_anew() -> None:
    spans = Spans()
    for _ in range(2):
        with spans("train"), spans("calibrate"):
            time.sleep(0.002)
    taken = spans.take()
    assert set(taken) == {"time/train", "time/calibrate"}
    assert taken["time/train"] >= taken["time/calibrate"] >= 0.004
    assert spans.take() == {}
    with spans("train"), spans("rollout"):
        pass
    assert set(spans.take(but="rollout")) == {"time/train"} and set(spans.take(only="rollout")) == {"time/rollout"}
    assert spans.take() == {}, "each was taken once"


def test_a_span_is_recorded_when_its_block_raises_and_waits_for_the_device() -> None:
    waits = []
    spans = Spans(synchronize=lambda: waits.append(None))
    with pytest.raises(ZeroDivisionError), spans("rollout"):
        _ = 1 / 0
    assert len(waits) == 2
    assert "time/rollout" in spans.take()
