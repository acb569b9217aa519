"""Metrics of steps and workers; the mismatch of engine and trainer, its gate and its advice."""

import math
import time

import pytest
import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import MismatchConfig
from octetrl.records import TokenLogprobs, joined, worker_times
from octetrl.telemetry.metrics import MISMATCH, slowest_workers
from octetrl.telemetry.mismatch import (
    UNEQUAL,
    MismatchError,
    MismatchGate,
    kv_saturation_warning,
    mismatch_by_age,
    mismatch_metrics,
)
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
    assert worker_times("time/train", (1.0, 4.0), 2) == {"time/train/worker_2": 1.0, "time/train/worker_3": 4.0}
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


def test_metrics_equal_the_formulas_written_out() -> None:
    generator = -torch.rand(50)
    trainer = generator + 0.1 * torch.randn(50)
    lengths = torch.full((50,), 50)
    metrics = mismatch_metrics(generator, trainer, torch.arange(50), lengths)
    pairs = list(zip(generator.tolist(), trainer.tolist(), strict=True))
    mean = {
        "token_mult_prob_error": [math.exp(abs(g - p)) for g, p in pairs],
        "gen_kl": [math.exp(p - g) - (p - g) - 1 for g, p in pairs],
        "importance_ratio": [math.exp(p - g) for g, p in pairs],
    }
    for name, values in mean.items():
        assert metrics[f"mismatch/{name}"] == pytest.approx(sum(values) / 50, rel=1e-12)
    assert metrics["mismatch/max_abs_diff"] == max(abs(g - p) for g, p in pairs)
    last_tenth = mean["token_mult_prob_error"][45:]
    assert metrics["mismatch/decile_9/token_mult_prob_error"] == pytest.approx(sum(last_tenth) / 5, rel=1e-12)
    logprobs = -torch.rand(7)
    metrics = mismatch_metrics(logprobs, logprobs.clone(), torch.arange(7), torch.full((7,), 9))
    assert metrics[MISMATCH] == 1.0 and metrics["mismatch/gen_kl"] == 0.0 and metrics["mismatch/equal_fraction"] == 1.0


def test_deciles_follow_each_tokens_own_sequence_and_empty_ones_are_left_out() -> None:
    generator, positions, lengths = torch.zeros(3), torch.tensor([0, 9, 99]), torch.tensor([10, 10, 100])
    metrics = mismatch_metrics(generator, torch.tensor([0.0, 1.0, 1.0]), positions, lengths)
    assert metrics["mismatch/decile_0/token_mult_prob_error"] == 1.0
    assert metrics["mismatch/decile_9/token_mult_prob_error"] == pytest.approx(math.e)
    assert not any("decile_5" in name for name in metrics)
    assert mismatch_metrics(*[torch.zeros(0)] * 4) == {}


def test_one_token_that_breaks_parity_is_counted_and_said_and_can_stop_the_run() -> None:
    generator = -torch.rand(40)
    trainer = generator.clone()
    trainer[7] = torch.nextafter(generator[7], torch.tensor(0.0))
    places = torch.arange(40), torch.full((40,), 40)
    assert mismatch_metrics(generator, trainer, *places, equality_is_promised=True)[UNEQUAL] == 1
    assert mismatch_metrics(generator, generator.clone(), *places, equality_is_promised=True)[UNEQUAL] == 0
    assert UNEQUAL not in mismatch_metrics(generator, trainer, *places)
    trainer[8] = torch.nan
    assert mismatch_metrics(generator, trainer, *places, equality_is_promised=True)[UNEQUAL] == 2
    broken = {MISMATCH: 1.0, UNEQUAL: 3.0, "mismatch/equal_fraction": 0.75, "mismatch/max_abs_diff": 1e-7}
    said = MismatchGate(MismatchConfig(fail_on_difference=False)).check(4, broken) or ""
    assert "step 4" in said and "3 trained tokens (25.00%)" in said and "1.00e-07" in said and "octetrl doctor" in said
    assert MismatchGate(MismatchConfig()).check(4, broken | {UNEQUAL: 0.0}) is None
    for strict in (MismatchGate(MismatchConfig()), MismatchGate(MismatchConfig(fail_on_difference=True))):
        assert strict.check(4, broken | {UNEQUAL: 0.0}) is None and strict.check(4, {MISMATCH: 1.01}) is None
        with pytest.raises(MismatchError, match=r"octetrl doctor.*mismatch\.fail_on_difference"):
            strict.check(5, broken)


def test_gate_passes_warns_once_and_stops() -> None:
    gate = MismatchGate(MismatchConfig(warn_above=1.03, fail_above=1.2))
    assert gate.check(1, {MISMATCH: 1.01}) is None
    assert gate.check(1, {"loss": 1.0}) is None
    assert "mismatch.warn_above=1.03" in (gate.check(2, {MISMATCH: 1.1}) or "")
    with pytest.raises(MismatchError, match=r"step 3: .* is 1\.3000, above mismatch\.fail_above=1\.2"):
        gate.check(3, {MISMATCH: 1.3})
    with pytest.raises(MismatchError, match="nan"):
        gate.check(4, {MISMATCH: math.nan})
    assert MismatchGate(MismatchConfig()).check(5, {MISMATCH: 9.0}) is not None
    gate = MismatchGate(MismatchConfig(warn_above=1.03))
    values = [1.02, 1.2, 1.21, 1.04, 1.219, 1.23, 1.25, math.nan, 1.25, 1.26]
    said = [gate.check(step, {MISMATCH: value}) for step, value in enumerate(values, start=1)]
    assert [step for step, text in enumerate(said, start=1) if text] == [2, 6, 8, 10]
    assert "Raise mismatch.warn_above if" in (said[1] or "") and "rises by a further 10%" in (said[1] or "")
    assert (said[5] or "").startswith(f"step 6: {MISMATCH} has risen to 1.2300")


FIRST, LAST = (f"mismatch/decile_{n}/token_mult_prob_error" for n in (0, 9))


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({FIRST: 1.01, LAST: 1.2}, "fp8.kv_replay"),
        ({FIRST: 1.1, LAST: 1.1}, "linears"),
        ({"fp8/kv_saturation": 0.02, "rollout/on_policy_share": 0.25}, "75% of the tokens were sampled by earlier"),
        ({"fp8/kv_saturation": 1e-4}, "fp8.calibration_margin"),
        ({"fp8/kv_saturation": 4e-5}, "linears"),
    ],
)
def test_advice_follows_the_evidence(metrics: dict[str, float], said: str) -> None:
    assert said in (MismatchGate(MismatchConfig()).check(1, {MISMATCH: 1.1, **metrics}) or "")


def test_saturation_warning_names_the_field_and_the_remedy() -> None:
    config = Fp8Config(kv_cache="calibrated")
    assert kv_saturation_warning({"fp8/kv_saturation": 0.0005}, config) is None
    assert kv_saturation_warning({}, config) is None
    assert "fp8.calibration_margin=1.58" in (kv_saturation_warning({"fp8/kv_saturation": 0.02}, config) or "")
    dynamic = kv_saturation_warning({"fp8/kv_saturation": 0.02}, Fp8Config(kv_cache="dynamic")) or ""
    assert "margin" not in dynamic and "fp8.kv_cache=none" in dynamic


def test_tokens_of_several_versions_are_measured_by_their_age() -> None:
    generator, trainer = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.0, -1.5, -0.75])
    places = torch.arange(3), torch.full((3,), 4)
    measured = mismatch_by_age(TokenLogprobs(generator, trainer, *places, torch.tensor([7, 5, 5])), 7)
    assert measured == pytest.approx(
        {
            "mismatch/age_0/tokens": 1.0,
            "mismatch/age_0/gen_kl": 0.0,
            "mismatch/age_0/max_abs_diff": 0.0,
            "mismatch/age_2/tokens": 2.0,
            "mismatch/age_2/gen_kl": (math.expm1(0.5) - 0.5 + math.expm1(-0.25) + 0.25) / 2,
            "mismatch/age_2/max_abs_diff": 0.5,
        }
    )
    assert mismatch_by_age(TokenLogprobs(generator, trainer, *places), 7) == {}
