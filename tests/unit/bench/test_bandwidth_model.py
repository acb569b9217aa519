"""The memory-bandwidth model counts what tensors hold."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octetrl.bench.rows import modelled_seconds, weight_bytes
from octetrl.bench.run import draw_on_device
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import PRECISIONS
from octetrl.engine.kv_cache import cache_format
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.layers.linear import Float8Linear
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec


def spec_of(model: str) -> ModelSpec:
    return spec_from_config(preset_config(model))


def policy_of(model: str, precision: str) -> PrecisionPolicy:
    return precision_policy(spec_of(model), Fp8Config(**PRECISIONS[precision]))


def model_of(name: str, precision: str) -> Decoder:
    model = Decoder(spec_of(name), policy_of(name, precision), "rollout")
    draw_on_device(model, 0)
    model.requantize()
    return model


def tensors_read(model: Decoder) -> Iterator[Tensor]:
    """Every matrix and bias that a step with many rows reads, as codes and scales if it is FP8."""
    codes = {name: linear for name, linear in model.float8_linears()}
    for name, parameter in model.named_parameters():
        of_linear = name.removesuffix(".weight")
        if of_linear in codes:
            yield from codes[of_linear].quantized
        elif name != "embedding.weight" and (parameter.dim() == 2 or name.endswith("proj.bias")):
            yield parameter
    if model.lm_head is None:
        yield model.embedding.weight


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-mla-moe"])
def test_bytes_are_those_of_the_tensors(name: str, precision: str) -> None:
    model = model_of(name, precision)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors_read(model))
    assert weight_bytes(model.spec, model.policy, rows=10_000) == pytest.approx(held, rel=1e-9)
    assert any(isinstance(module, Float8Linear) for module in model.modules()) == (precision != "bf16")


def test_experts_without_a_row_are_not_read() -> None:
    """128 experts of which a token takes 8: a row reads 8 of them, 64 rows 98.4%."""
    spec, policy = spec_of("qwen3-30b-a3b"), policy_of("qwen3-30b-a3b", "bf16")
    expert = 48 * 3 * 2 * 2048 * 768
    at = {rows: weight_bytes(spec, policy, rows) for rows in (1, 64, 10_000)}
    assert at[10_000] - at[1] == pytest.approx(120 * expert)
    assert (at[64] - at[1]) / expert == pytest.approx(128 * (1 - 0.9375**64) - 8)


def step_seconds(spec: ModelSpec, policy: PrecisionPolicy, rows: int, context: int) -> float:
    cached = rows * context * cache_format(spec, policy, torch.bfloat16, 16).bytes_per_page / 16
    return modelled_seconds(weight_bytes(spec, policy, rows), cached)


def test_modelled_speed_of_the_published_shapes() -> None:
    """Tokens per second on an H200 with FP8 weights and cache, as worked out by hand."""
    spec, policy = spec_of("qwen3-30b-a3b"), policy_of("qwen3-30b-a3b", "fp8_full")
    assert 128 / step_seconds(spec, policy, 128, 2560) == pytest.approx(11_900, rel=0.02)
    assert 256 / step_seconds(spec, policy, 256, 1024) == pytest.approx(25_000, rel=0.02)
    spec, policy = spec_of("moonlight-16b-a3b"), policy_of("moonlight-16b-a3b", "fp8_full")
    assert step_seconds(spec, policy, 128, 2560) == pytest.approx(5.1e-3, rel=0.02)
