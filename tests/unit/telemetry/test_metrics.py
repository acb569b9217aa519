import time

import pytest
import torch

from octetrl.records import joined, worker_times
from octetrl.telemetry.metrics import slowest_workers
from octetrl.workers.clock import Clock


@pytest.mark.parametrize(
    ("mappings", "said"),
    [
        (({"loss": 1.0}, {"loss": 1.0}), "'loss' is reported twice"),
        (({"Loss Value": 1.0},), "not family/name"),
        (({"loss": "1.0"},), "is a str, not a number"),
    ],
)
def test_joining_refuses(mappings: tuple, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        joined(*mappings)


def test_a_clock_times_its_block_also_when_it_raises() -> None:
    clock = Clock()
    with clock("train") as trained, clock("calibrate") as calibrated:
        time.sleep(0.002)
    assert trained["time/train"] >= calibrated["time/calibrate"] >= 0.002
    with pytest.raises(ZeroDivisionError), clock("rollout") as took:
        _ = 1 / 0
    assert set(took) == {"time/rollout"}


def test_times_add_up_and_the_largest_peak_and_the_slowest_worker_count() -> None:
    once = {"time/train": 2.0, "memory/peak_gb": 3.0, "loss": 1.0}
    assert joined(once, {"time/train": 1.0, "memory/peak_gb": 2.0}) == {**once, "time/train": 3.0}
    assert worker_times("time/train", (1.0, 4.0), 2) == {
        "time/train/worker_2": 1.0,
        "time/train/worker_3": 4.0,
    }
    assert worker_times("time/train", ()) == {}
    calibrated = worker_times("time/calibrate", (5.0, 1.0))
    later = {**worker_times("time/calibrate", (1.0, 2.0)), **worker_times("time/train", (1.0, 4.0), 2)}
    found = slowest_workers(joined(calibrated, later, {"time/train": 9.0, "rollout/worker_1": 8.0}))
    assert found == {"time/calibrate/slowest": 0.0, "time/train/slowest": 3.0}


def test_a_block_s_peak_includes_that_of_a_block_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"now": 0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peaks.update(now=0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks["now"])
    clock = Clock(torch.device("cuda"))
    found = {}
    for before, within, after in ((9, 5, 4), (3, 8, 4), (3, 5, 7)):
        with clock("rollout") as outer:
            peaks["now"] = before * 10**9
            with clock("publish") as inner:
                peaks["now"] = within * 10**9
            peaks["now"] = max(peaks["now"], after * 10**9)
        found[before, within, after] = (outer["memory/peak_gb"], inner["memory/peak_gb"])
    assert found == {(9, 5, 4): (9.0, 5.0), (3, 8, 4): (8.0, 8.0), (3, 5, 7): (7.0, 5.0)}
