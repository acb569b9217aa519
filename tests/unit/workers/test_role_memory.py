"""What a worker that only generates holds, beside the estimate of `octetrl check`."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from octetrl.config.load import load_recipe
from octetrl.config.memory import estimate_memory
from octetrl.config.worker_memory import of_engine
from octetrl.fp8.policy import precision_policy
from octetrl.run.tiny_model import save_tokenizer
from octetrl.workers.build import build_worker
from octetrl.workers.model_shape import model_spec
from tests.allocated import Allocated

RECIPE = """
model: {preset: tiny, init: random, tokenizer: TOKENIZER, context_length: 1024}
rollout: {max_prompt_tokens: 16, max_new_tokens: 16, prompts_per_step: 2, group_size: 2}
environment: {kind: jsonl, dataset: tasks.jsonl}
cluster: {trainer_cpus: 1, engine_cpus: 1}
"""
TABLES = 200_000  # bytes: RoPE's tables, and the rows of the engine's batch


@pytest.mark.parametrize("lora", [(), ("model.lora={}",)], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["fp8_full", "fp8_rollout", "bf16"])
def test_the_weights_of_a_worker_that_generates(tmp_path: Path, precision: str, lora: tuple[str, ...]) -> None:
    save_tokenizer(["a b"], tmp_path / "tokenizer")
    (tmp_path / "r.yaml").write_text(RECIPE.replace("TOKENIZER", str(tmp_path / "tokenizer")))
    recipe = load_recipe(tmp_path / "r.yaml", [f"precision={precision}", *lora])
    with Allocated() as allocated:
        worker = build_worker(recipe, torch.device("cpu"), role="generates")
        gc.collect()
        held = allocated.now()
    assert worker.worker is not None
    spec = model_spec(recipe)
    precisions = precision_policy(spec, recipe.fp8).precisions()
    both = estimate_memory(recipe, spec, precisions, on_gpu=False, device_bytes=None)
    estimate = of_engine(recipe, spec, precisions, both, on_gpu=False, available=None)
    (weights,) = [part.num_bytes for part in estimate.parts if part.name == "weights"]
    assert 0 <= held - weights < TABLES < weights / 5
