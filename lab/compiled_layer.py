"""Compares our BF16 training layer with the same layer in plain torch, eager and compiled: is the baseline fair?

    python -m lab.compiled_layer [--model qwen3-8b] [--tokens 16384] [--length 4096] [--out FOLDER]

All layers are checkpointed, and plain torch uses its fastest attention (cuDNN's). The time is that of forward and
backward of one layer with the gradients of its weights: the median of alternating rounds. The first call's time is the
cost of compiling. Plain torch gets an advantage that packing does not have: sequences of one length.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lab.record import RESULTS, need_hopper, write_result
from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.layers.rotary import Rotary
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.training_forward import fused_layer_runner
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec

ROUNDS, REPEATS = 5, 4


class PlainLayer(nn.Module):
    """One decoder layer as it is commonly written. [B, S, E]; BF16."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        options: dict[str, Any] = {"bias": False, "dtype": torch.bfloat16, "device": "cuda"}
        self.qkv = nn.Linear(spec.hidden_size, spec.q_size + 2 * spec.kv_size, **options)
        self.o = nn.Linear(spec.q_size, spec.hidden_size, **options)
        self.gate_up = nn.Linear(spec.hidden_size, 2 * spec.intermediate_size, **options)
        self.down = nn.Linear(spec.intermediate_size, spec.hidden_size, **options)
        norms: dict[str, Any] = {"eps": spec.rms_norm_eps, "dtype": torch.bfloat16, "device": "cuda"}
        self.norms = nn.ModuleList(nn.RMSNorm(spec.hidden_size, **norms) for _ in range(2))
        self.head_norms = nn.ModuleList(nn.RMSNorm(spec.head_size, **norms) for _ in range(2)) if spec.qk_norm else None

    def forward(self, h_BSE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        h_BSE = h_BSE + self.attend(self.norms[0](h_BSE), cos_SR, sin_SR)
        gate, up = self.gate_up(self.norms[1](h_BSE)).chunk(2, dim=-1)
        out_BSE: Tensor = h_BSE + self.down(F.silu(gate) * up)
        return out_BSE

    def attend(self, x_BSE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        spec, shape = self.spec, x_BSE.shape[:2]
        parts = self.qkv(x_BSE).split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        q, k, v = (part.view(*shape, -1, spec.head_size) for part in parts)
        if self.head_norms is not None:
            q, k = self.head_norms[0](q), self.head_norms[1](k)
        q, k = (_turned(x, cos_SR, sin_SR) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out_BSE: Tensor = self.o(out.transpose(1, 2).reshape(*shape, spec.q_size))
        return out_BSE


def _turned(x_BSHD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    first, second = x_BSHD.float().chunk(2, dim=-1)
    cos, sin = cos_SR[:, None], sin_SR[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSHD.dtype)


def plain_arm(spec: ModelSpec, rotary: Rotary, tokens: int, length: int, *, compiled: bool) -> Callable[[], object]:
    layer = PlainLayer(spec)
    sequences = (tokens // length, length, spec.hidden_size)
    cos_SR, sin_SR = (table[:length] for table in rotary)

    def run(h_BSE: Tensor) -> Tensor:
        out_BSE: Tensor = checkpoint(layer, h_BSE, cos_SR, sin_SR, use_reentrant=False)
        return out_BSE

    return _step(torch.compile(run) if compiled else run, layer, sequences, cudnn=True)


def own_arm(spec: ModelSpec, fp8: Fp8Config, tokens: int, length: int) -> Callable[[], object]:
    model = Decoder(spec, precision_policy(spec, fp8), "train", device="cuda", backend="scaled_mm")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    model.requantize()
    layer, runner = next(model.decoder_layers()), fused_layer_runner(model, "layer")
    assert runner is not None
    bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    rotary = model.rotary(torch.arange(tokens, device="cuda") % length)

    def run(h_TE: Tensor) -> Tensor:
        return runner(layer, h_TE, rotary, PackedContext(bounds, length))

    return _step(run, layer, (tokens, spec.hidden_size), cudnn=False)


def _step(
    run: Callable[[Tensor], Tensor], layer: nn.Module, shape: tuple[int, ...], *, cudnn: bool
) -> Callable[[], None]:
    hidden = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(hidden)

    def step() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if cudnn else SDPBackend.MATH):
            run(hidden).backward(upstream)
        hidden.grad = None
        layer.zero_grad()

    return step


def milliseconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(REPEATS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / REPEATS * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    need_hopper("compiled_layer")
    spec = replace(spec_from_config(preset_config(asked.model)), num_layers=1, vocab_size=1024)
    sizes = asked.tokens, asked.length
    rotary = Decoder(spec, precision_policy(spec, Fp8Config()), "train").rotary(torch.arange(asked.length))
    rotary = Rotary(*(table.cuda() for table in rotary))
    arms = {
        "plain torch": plain_arm(spec, rotary, *sizes, compiled=False),
        "torch.compile": plain_arm(spec, rotary, *sizes, compiled=True),
        "ours, BF16": own_arm(spec, Fp8Config(), *sizes),
        "ours, FP8": own_arm(spec, Fp8Config(rollout=True, train=True), *sizes),
    }
    first = {}
    for name, step in arms.items():
        started = time.perf_counter()
        step()
        torch.cuda.synchronize()
        first[name] = time.perf_counter() - started
        step()
    rounds = [{name: milliseconds(step) for name, step in arms.items()} for _ in range(ROUNDS)]
    median = {name: statistics.median(row[name] for row in rounds) for name in arms}
    table = Table("layer", "ms", "beside torch.compile", "first call, s", title=f"{asked.model}, {sizes[0]:,} tokens")
    for name in arms:
        table.add_row(
            name, f"{median[name]:.2f}", f"{median['torch.compile'] / median[name]:.2f}x", f"{first[name]:.1f}"
        )
    Console().print(table)
    pack = f"{sizes[0] // sizes[1]}x{sizes[1]}"
    rows: list[dict[str, object]] = [
        {
            "precision": "fp8" if "FP8" in name else "bf16",
            "workload": f"{pack}, {name}",
            "ms": median[name],
            "first_call_seconds": first[name],
        }
        for name in arms
    ]
    write_result("compiled_layer", asked.model, rows, asked.out)


if __name__ == "__main__":
    main()
