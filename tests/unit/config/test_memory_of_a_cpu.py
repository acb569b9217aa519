"""The estimate on a CPU, and of runs that sample nothing."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.config.memory import estimate_memory, logits_bytes
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from tests.unit.config.test_memory import PLAIN, TINY, parts_of, recipe


def test_logits_on_a_cpu_are_float64() -> None:
    """A chunk of 1,024 rows; with micro-batches of eight chunks the gradients of four in float32 are more."""
    sizes: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": 512}
    spec = spec_from_config(preset_config("tiny") | sizes)
    for tokens, most in (
        (2048, 37 * 1024 * 32_000),
        (512, 37 * 512 * 32_000),
        (8192, (16 * 1024 + 4 * 4096) * 32_000 + 8 * spec.vocab_rows * 512),
    ):
        found = logits_bytes(spec, tokens, 2, 1024, frozen=False, on_gpu=False)
        assert found == max(most, 37 * min(1024, tokens) * 32_000) + 4 * 2 * tokens * 512
        assert found > logits_bytes(spec, tokens, 2, 1024, frozen=False, on_gpu=True)
    parts = parts_of(estimate_memory(recipe(), spec, PLAIN, on_gpu=False, device_bytes=None))
    assert parts["process"] == 500_000_000 and "CUDA context" not in parts


@pytest.mark.parametrize("name", ["sft", "dpo"])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_only_what_samples_has_a_cache(name: str, on_gpu: bool) -> None:
    given = {"algorithm": {"name": name, "conversations": "rows.jsonl"}}
    estimates = {}
    for every in (0, 5):
        one = recipe(**given, evaluation={"every": every})
        estimates[every] = estimate_memory(one, TINY, PLAIN, on_gpu=on_gpu, device_bytes=2**33)
    assert estimates[0].kv_cache_tokens == 0 and "KV cache" not in parts_of(estimates[0])
    assert estimates[0].total_bytes == estimates[0].bytes_when("always") + estimates[0].bytes_when("training")
    assert (estimates[5].kv_cache_tokens or 0) > 0 and "KV cache" in parts_of(estimates[5])
