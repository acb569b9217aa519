"""Workers that share a model by rows draw and learn with the log-probs of one worker that has it whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from octetrl.config.schema import LoraConfig
from octetrl.engine.model_runner import ModelRunner
from octetrl.layers.context import PagedContext
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.rollout_forward import rollout_forward
from octetrl.shapes.blocks import LayerBlocks
from octetrl.trainer.peers import ALONE, Peers
from tests.grid import run_grid, smallest_shape
from tests.parity.short_run import ShortRun, assert_equal_in_every_step, assert_learned, short_run

WINDOW = LayerBlocks(AttentionLayout(8), MLPLayout())  # keys
OPTIONS: dict[str, Any] = {"answers": 3, "tokens_per_micro_batch": 128}


@pytest.mark.parametrize(
    ("family", "precision", "size", "lora"),
    [
        ("llama", "bf16", 2, None),
        ("llama", "fp8", 2, None),
        ("qwen3", "fp8_full", 2, None),
        ("qwen2.5", "fp8_full", 2, None),
        ("qwen3", "fp8_dynamic", 4, None),
        ("qwen3", "fp8_full", 2, LoraConfig(rank=4)),
        ("mistral", "fp8_full", 2, None),
    ],
)
def test_log_probs_are_those_of_one_worker(family: str, precision: str, size: int, lora: LoraConfig | None) -> None:
    """In the second step the weights have been updated, with gradients whose sums have another order."""
    spec = smallest_shape("llama" if family == "mistral" else family, size)
    if family == "mistral":  # a window, and what attention_bias adds in other families: o_proj's bias is cut too
        spec = replace(spec, blocks=(WINDOW,), qkv_bias=True, o_bias=True)

    def run(peers: Peers) -> ShortRun:
        steps = 1 if peers is ALONE or size == 4 else 2
        return short_run(spec, precision, "cpu", steps, peers=peers, lora=lora, **OPTIONS)

    alone = run(ALONE)
    runs = run_grid(1, size, run, deadline_seconds=120.0)
    assert_equal_in_every_step(alone)
    for one in runs:
        assert_equal_in_every_step(one)
        assert one.tokens == runs[0].tokens and one.logprobs == runs[0].logprobs
        assert one.tokens[: len(alone.tokens)] == alone.tokens
        assert one.logprobs[: len(alone.logprobs)] == alone.logprobs
        assert one.metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], rel=1e-6)
        assert one.metrics[0]["entropy"] == pytest.approx(alone.metrics[0]["entropy"], rel=1e-6)
        assert_learned(one)


@pytest.mark.parametrize(("precision", "lora"), [("bf16", None), ("fp8_full", None), ("fp8_full", LoraConfig(rank=4))])
def test_the_fused_rollout_of_parts_is_the_trainers(
    precision: str, lora: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the trainer runs the modules."""

    def fused(
        runner: ModelRunner, token_T: Tensor, position_T: Tensor, context: PagedContext, *, counts: bool = True
    ) -> Tensor:
        return rollout_forward(runner.model, token_T, position_T, context)

    monkeypatch.setattr(ModelRunner, "_forward", fused)
    spec = smallest_shape("qwen3", 2)

    def run(peers: Peers) -> ShortRun:
        return short_run(spec, precision, "cpu", 1, peers=peers, lora=lora, **OPTIONS)

    for one in run_grid(1, 2, run, deadline_seconds=120.0):
        assert_equal_in_every_step(one)
