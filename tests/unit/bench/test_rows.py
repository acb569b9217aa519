"""Rows of a bench beside one another: ratios to BF16, to one worker and to both roles; work by formula; warnings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octetrl.bench.rows import Key, Row, compare, decode_steps, model_flops, warnings
from octetrl.engine.metrics import EngineMetrics
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config

METRICS = EngineMetrics(
    completions=4, generated_tokens=80, prompt_tokens=8, prefilled_tokens=8, steps=25, seconds=2.0, preemptions=0,
    batch_occupancy=1.0, cache_occupancy=0.5, kv_capacity_tokens=100, kv_saturation=0.0, kv_saturation_LS=None,
    non_finite_tokens=0, tail_share=0.0, step_seconds=(), capture_seconds=0.0, session_capture_seconds=None,
    cancelled=0, idle_share=0.0,
)  # fmt: skip


def row(*words: str, seconds: float, kind: str = "embedded", workers: int = 1, **more: float) -> tuple[Key, Row]:
    of = dict(word.split("=") for word in words)
    found: Row = {
        "precision": of.get("precision", "fp8_full"),
        "workload": "8x4+4",
        "arm": " ".join(word for word in words if not word.startswith("precision")),
        "cluster/kind": kind,
        "cluster/workers": workers,
    }
    times = {f"time/{phase}": seconds for phase in ("step", "produce", "learn", "rollout")}
    return ("8x4+4", words), found | times | more


def test_precisions_are_compared_with_equal_other_overrides() -> None:
    rows = dict(
        row(f"precision={precision}", f"seed={seed}", seconds=seconds)
        for precision, seed, seconds in (("bf16", 1, 3.0), ("fp8", 1, 2.0), ("bf16", 2, 10.0), ("fp8", 2, 4.0))
    )
    compare(rows, ("step", "produce", "learn"))
    assert [one["step/step_speedup_over_bf16"] for one in rows.values()] == [1.0, 1.5, 1.0, 2.5]
    compare(rows, ("rollout",))
    assert [one["rollout/speedup_over_bf16"] for one in rows.values()] == [1.0, 1.5, 1.0, 2.5]
    (alone,) = dict([row("precision=fp8", seconds=1.0)]).items()
    compare(dict([alone]), ("step",))
    assert "step/step_speedup_over_bf16" not in alone[1]


def test_workers_are_compared_with_one_on_ray_and_with_the_embedded_one() -> None:
    rows = dict(
        [
            row("cluster.cpus=null", seconds=4.0),
            row("cluster.cpus=1", seconds=5.0, kind="ray"),
            row("cluster.cpus=2", seconds=2.5, kind="ray", workers=2),
            row("cluster.cpus=2", "seed=2", seconds=2.5, kind="ray", workers=2),
        ]
    )
    compare(rows, ("step", "learn"))
    _, one, two, other = rows.values()
    assert (one["step/efficiency"], two["step/efficiency"], two["learn/efficiency"]) == (1.0, 1.0, 1.0)
    assert one["step/over_embedded"] == pytest.approx(0.25) and "step/over_embedded" not in two
    assert "step/efficiency" not in other, "another seed is other work"


def test_roles_are_compared_with_workers_that_do_both() -> None:
    roles = {"cluster/trainers": 1, "cluster/engines": 1}
    rows = dict(
        [
            row("cluster.cpus=2", seconds=3.0, kind="ray", workers=2),
            row("cluster.trainer_cpus=1", "cluster.engine_cpus=1", seconds=2.0, kind="ray", workers=2, **roles),
        ]
    )
    compare(rows, ("step",))
    assert list(rows.values())[1]["step/speedup_over_both"] == 1.5
    assert list(warnings(list(rows.values()))) == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"time/capture": 0.1}, "captured CUDA graphs"),
        ({"cluster/trainers": 1, "time/rollout": 3.0}, "cannot be shorter"),
        ({"step/efficiency": 1.4}, "compare nothing"),
        ({"step/over_embedded": 1.4}, "compare nothing"),
        ({"rollout/digest": 1.0}, "sampled other tokens"),
    ],
)
def test_times_that_are_not_fair_are_named(more: dict[str, float], words: str) -> None:
    first, second = row("cluster.cpus=1", seconds=2.0)[1], row("cluster.cpus=2", seconds=2.0)[1] | more
    found = list(warnings([first, second]))
    assert len(found) == 1 and words in found[0] and "cluster.cpus=2" in found[0]


def test_model_flops_of_a_dense_model() -> None:
    spec = spec_from_config(preset_config("qwen3-0.6b"))
    linears = 28 * (1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072)
    by_hand = 6 * linears * 30 + 6 * 151_936 * 1024 * 12
    by_hand += 28 * int(3.5 * 4) * 16 * 128 * (10 * 11 // 2 + 20 * 21 // 2)
    assert model_flops(spec, [10, 20], 12) == by_hand


def test_decode_steps_do_not_count_prefills() -> None:
    assert decode_steps(METRICS, max_batch=4) == 20
    assert decode_steps(replace(METRICS, batch_occupancy=0.5), max_batch=4) == 40
