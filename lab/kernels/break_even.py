"""From which micro-batch size on is FP8 training faster? One layer's forward and backward, in BF16 and FP8.

A GEMM's gain grows with its size; the cost of quantising grows with its surface. With few tokens FP8 is slower, and the
narrower the model, the more tokens it needs. The figures are medians of alternating rounds, with checkpointing and
sequences of at most 2,048 tokens. Host time is included, as in training: with few tokens a layer waits for launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from lab.kernels.clock import Row
from octetrl.config.fp8_settings import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.training_forward import fused_layer_runner
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec

MODELS = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b")
TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
LONGEST, ROUNDS, REPEATS = 2048, 5, 4
FP8 = Fp8Config(rollout=True, train=True)


def measure(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for model in MODELS:
        spec = replace(spec_from_config(preset_config(model)), num_layers=1, vocab_size=1024)
        for tokens in TOKENS:
            bf16, fp8 = _milliseconds_of_both(spec, tokens)
            shape = {"workload": f"{tokens} tokens, {model}", "hidden_size": spec.hidden_size, "tokens": tokens}
            rows.append({"precision": "bf16"} | shape | {"ms": bf16, "speedup": 1.0})
            rows.append({"precision": "fp8"} | shape | {"ms": fp8, "speedup": bf16 / fp8})
    return rows


def _milliseconds_of_both(spec: ModelSpec, tokens: int) -> tuple[float, float]:
    """Milliseconds of a layer's forward and backward: BF16, FP8."""
    arms = [_step(spec, fp8, tokens, min(tokens, LONGEST)) for fp8 in (Fp8Config(), FP8)]
    for step in arms:
        _milliseconds(step)
    rounds = [[_milliseconds(step) for step in arms] for _ in range(ROUNDS)]
    bf16, fp8 = (statistics.median(times) for times in zip(*rounds, strict=True))
    return bf16, fp8


def _step(spec: ModelSpec, fp8: Fp8Config, tokens: int, length: int) -> Callable[[], object]:
    model = Decoder(spec, precision_policy(spec, fp8), "train", device="cuda", backend="scaled_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.requantize()
    layer, runner = next(model.decoder_layers()), fused_layer_runner(model, "layer")
    assert runner is not None
    context = PackedContext(torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda"), length)
    rotary = model.rotary(torch.arange(tokens, device="cuda") % length)
    hidden_TE = torch.randn(tokens, spec.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream_TE = torch.randn_like(hidden_TE)

    def step() -> None:
        runner(layer, hidden_TE, rotary, context).backward(upstream_TE)
        hidden_TE.grad = None
        layer.zero_grad()

    return step


def _milliseconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPEATS * 1e3
