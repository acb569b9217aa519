"""Several workers train one model: each engine draws the answers of all others, with its own trainer's log-probs."""

from __future__ import annotations

import pytest

from octetrl.config.schema import LoraConfig
from octetrl.trainer.shards import GradientMode
from tests.parity.shapes import MODELS
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.team import run_team

STEPS = 2


@pytest.mark.parametrize(
    ("family", "precision", "count", "gradients", "lora"),
    [
        ("qwen3", "fp8_full", 2, "local", None),
        ("qwen2.5", "bf16", 2, "sharded", None),
        ("llama", "fp8_full", 3, "sharded", None),
        ("qwen3", "fp8_full", 2, "local", LoraConfig(rank=4)),
        ("low_rank", "fp8_full", 2, "sharded", None),
        ("gpt-oss", "fp8_full", 2, "sharded", None),
        ("delta", "fp8_full", 2, "sharded", None),
    ],
)
def test_log_probs_are_equal_on_every_worker(
    family: str, precision: str, count: int, gradients: GradientMode, lora: LoraConfig | None
) -> None:
    def run(peers):  # type: ignore[no-untyped-def]
        options = {"answers": 12, "tokens_per_micro_batch": 256, "lora": lora}
        options |= {"router": {"bias_rate": 0.01}} if family == "low_rank" else {}  # by the loads of all workers
        return short_run(MODELS[family], precision, "cpu", STEPS, peers=peers, **options)

    runs = run_team(count, run, gradients=gradients, deadline_seconds=120.0)
    for one in runs:
        assert_equal_in_every_step(one)
        assert_same(one, runs[0])
        assert one.digests == runs[0].digests
        assert one.metrics[0]["mismatch/tokens"] == 4 * 4 * 12  # of all workers
        assert_learned(one)
