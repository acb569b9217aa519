"""The recipes of published models take a step: their settings, the published shape in two layers, random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octetrl.cli.main import run_command

pytestmark = pytest.mark.gpu
RECIPES = {
    "grpo_math_llama-3.1-8b_1gpu_fp8-full": "llama-3.1-8b",
    "grpo_math_qwen3-8b-base_1gpu_fp8-full": "qwen3-8b",
    "grpo_math_qwen3-30b-a3b_1gpu_fp8-full": "qwen3-30b-a3b",
    "grpo_math_moonlight-16b-a3b_1gpu_fp8-full": "moonlight-16b-a3b",
    "grpo_math_llama-3.1-8b_8gpu_fp8-full": "llama-3.1-8b",
    "grpo_math_qwen3-8b-base_8gpu_fp8-full": "qwen3-8b",
    "grpo_math_qwen3-30b-a3b_8gpu_fp8-full": "qwen3-30b-a3b",
    "grpo_math_moonlight-16b-a3b_8gpu_fp8-full": "moonlight-16b-a3b",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_has_equal_log_probs(recipe: str, tmp_path: Path) -> None:
    words = ["bench", "step", recipe, "--model", RECIPES[recipe], "--layers", "2", "--workload", "32x100+40-60"]
    changes = ["engine.kv_cache_tokens=32768", "trainer.tokens_per_micro_batch=4096"]  # tests share the GPU
    changes += ["cluster.gpus=null"] if "8gpu" in recipe else []  # one worker, with the settings of eight
    assert run_command([*words, *changes, "--steps", "1", "--out", str(tmp_path), "--name", "test"]) == 0
    (written,) = tmp_path.glob("*.json")
    (row,) = json.loads(written.read_text())["rows"]
    assert row["mismatch/max_abs_diff"] == 0.0 and row["mismatch/tokens"] >= 32 * 40
