"""The memory-bandwidth model counts what tensors hold; skewed routers give their experts the loads asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octetrl.bench.bandwidth_model import modelled_seconds, weight_bytes
from octetrl.bench.expert_shares import check_skew, expert_shares
from octetrl.bench.model import draw_on_device, find_model
from octetrl.bench.router_skew import skew_routers
from octetrl.cli.main import run_command
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import Fp8Config
from octetrl.engine.kv_cache import cache_format
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.layers.linear import Float8Linear
from octetrl.models.blocks.moe.routing import Router
from octetrl.models.decoder import Decoder
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError


def policy_of(model: str, precision: str) -> PrecisionPolicy:
    return precision_policy(find_model(model).spec, Fp8Config(**PRECISIONS[precision]))


def model_of(name: str, precision: str) -> Decoder:
    model = Decoder(find_model(name).spec, policy_of(name, precision), "rollout")
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
    """128 experts of which a token takes 8: a row reads 8 of them, 64 rows 98.4%; a skewed router leaves more idle."""
    spec, policy = find_model("qwen3-30b-a3b").spec, policy_of("qwen3-30b-a3b", "bf16")
    expert = 48 * 3 * 2 * 2048 * 768
    at = {rows: weight_bytes(spec, policy, rows) for rows in (1, 64, 10_000)}
    assert at[10_000] - at[1] == pytest.approx(120 * expert)
    assert (at[64] - at[1]) / expert == pytest.approx(128 * (1 - 0.9375**64) - 8)
    assert weight_bytes(spec, policy, 64, skew=1.0) < at[64] - 5 * expert


def step_seconds(spec: ModelSpec, policy: PrecisionPolicy, rows: int, context: int) -> float:
    cached = rows * context * cache_format(spec, policy, torch.bfloat16, 16).bytes_per_page / 16
    return modelled_seconds(weight_bytes(spec, policy, rows), cached)


def test_modelled_speed_of_the_published_shapes() -> None:
    """Tokens per second on an H200 with FP8 weights and cache, as worked out by hand."""
    spec, policy = find_model("qwen3-30b-a3b").spec, policy_of("qwen3-30b-a3b", "fp8_full")
    assert 128 / step_seconds(spec, policy, 128, 2560) == pytest.approx(11_900, rel=0.02)
    assert 256 / step_seconds(spec, policy, 256, 1024) == pytest.approx(25_000, rel=0.02)
    spec, policy = find_model("moonlight-16b-a3b").spec, policy_of("moonlight-16b-a3b", "fp8_full")
    assert step_seconds(spec, policy, 128, 2560) == pytest.approx(5.1e-3, rel=0.02)


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 3.0])
def test_shares_follow_zipf_and_no_expert_has_more_rows_than_tokens(exponent: float) -> None:
    shares = expert_shares(64, 6, exponent)
    assert sum(shares) == pytest.approx(6) and max(shares) <= 1.0
    below = [(rank, share) for rank, share in enumerate(shares, 1) if share < 1.0]
    for rank, share in below:
        assert share / below[-1][1] == pytest.approx((rank / 64) ** -exponent)
    assert (len(below) == 64) == (exponent < 1.0)


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-mla-moe"])
def test_a_skewed_router_gives_its_experts_these_loads(name: str) -> None:
    """Of other tokens than those that found the biases, too."""
    model = model_of(name, "bf16")
    before = skew_routers(model, 0.0, seed=0)
    found = skew_routers(model, 1.0, seed=0)
    assert before is not None and found is not None
    wanted = expert_shares(8, 2, 1.0)[0] * 8 / 2
    assert found.load_max_over_mean == pytest.approx(wanted, rel=0.05) and before.load_max_over_mean < 0.75 * wanted
    other = skew_routers(model, 0.0, seed=1)  # leaves the biases, and counts other tokens
    assert other is not None and other.load_max_over_mean == pytest.approx(wanted, rel=0.2)
    biases = [module.e_score_correction_bias for module in model.modules() if isinstance(module, Router)]
    assert all(bias is not None and not bias.requires_grad for bias in biases)


def test_a_dense_model_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--router-skew: qwen3-8b is a dense model"):
        check_skew(1.0, "qwen3-8b", find_model("qwen3-8b").spec)
    check_skew(0.0, "qwen3-8b", find_model("qwen3-8b").spec)
    for verb in ("rollout", "train"):
        assert run_command(["bench", verb, "--model", "tiny", "--router-skew", "1", "--device", "cpu"]) == 2
        assert "tiny is a dense model" in capsys.readouterr().err


def test_both_benches_run_a_skewed_mixture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    skewed = ["--model", "tiny-moe", "--router-skew", "1.2", "--device", "cpu", "--precision", "bf16"]
    for verb, *more in (("rollout", "--requests", "4"), ("train", "--rounds", "1", "--steps", "1", "--layers", "1")):
        assert run_command(["bench", verb, *skewed, "--out", str(tmp_path), *more]) == 0
        assert ("expert load" in capsys.readouterr().out) == (verb == "rollout")
