"""The profile of a decode step on a GPU: all kernels of a captured graph, as often as a step runs them."""

from __future__ import annotations

import pytest
import torch

from octetrl.bench.model import find_model
from octetrl.bench.profile import BETWEEN_KERNELS, STEPS, profile_rows
from octetrl.bench.rollout import Bench
from octetrl.bench.workload import Shape, fixed_lengths

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_a_decode_step_is_its_kernels_and_the_time_between_them(precision: str) -> None:
    model = find_model("tiny")
    long, short = (fixed_lengths(Shape(8, 100, answer), 4, model.spec.vocab_size, seed=0) for answer in (3 * STEPS, 8))
    said: list[str] = []
    plan = Bench(model, (precision,), (long, short), torch.device("cuda"), warmup_tokens=4, kv_cache_tokens=1 << 13)
    *kernels, between = profile_rows(plan, said.append)
    assert len(said) == 1 and said[0].startswith(f"no profile of {precision}, {short.name}")
    assert {row["workload"] for row in (*kernels, between)} == {long.name}
    assert between["kernel"] == BETWEEN_KERNELS and between["calls_per_step"] == 0
    times = [float(row["us_per_step"]) for row in kernels]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    assert sum(float(row["share"]) for row in (*kernels, between)) == pytest.approx(1, abs=0.05)
    calls = {row["kernel"]: float(row["calls_per_step"]) for row in kernels}
    assert calls["_attention_decode_kernel"] == pytest.approx(model.spec.num_layers, rel=0.1)
