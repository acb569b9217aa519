"""Adapters of experts: formula and gradients in float64, merged as unmerged, files, refusals, the kernels' path."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octetrl.config.load import recipe_from_mapping
from octetrl.config.lora import LoraPart, adapter_elements, targets_of
from octetrl.config.rules_shape import spec_problems
from octetrl.config.schema import Fp8Config, LoraConfig
from octetrl.kernels.gemm import grouped_bf16_gemm as grouped
from octetrl.layers import stacked_lora
from octetrl.layers.stacked_lora import StackedLoraAdapter
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.peft_adapters import load_adapter, merge_adapters, read_adapter_config
from octetrl.shapes.presets import preset_config
from tests.parity.shapes import MIXTURES
from tests.saved_adapter import save_adapter
from tests.unit.kernels.grouped_cases import first_rows
from tests.unit.kernels.interpreting import interpreted  # noqa: F401
from tests.unit.models.tiny_families import made, packed

LORA = LoraConfig(rank=8, alpha=12.0, experts=True)
PARTS = (LoraPart("gate_proj", 0, 40), LoraPart("up_proj", 40, 80))
LOAD = (3, 0, 7, 1)


def adapter(parts: tuple[LoraPart, ...], dtype: torch.dtype) -> StackedLoraAdapter:
    made = StackedLoraAdapter(24, parts, 8, 12.0, len(LOAD), dtype=dtype, device=None)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made


def rows(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((sum(LOAD), 80), (sum(LOAD), 24), (sum(LOAD), 80))
    y_MN, x_MK, upstream_MN = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return y_MN.requires_grad_(), x_MK.requires_grad_(), upstream_MN


@pytest.mark.parametrize("parts", [PARTS, PARTS[1:]], ids=["both", "up alone"])
def test_values_and_gradients_are_those_of_the_formula_in_float64(parts: tuple[LoraPart, ...]) -> None:
    made, first_X1 = adapter(parts, torch.float32), first_rows(LOAD)
    y_MN, x_MK, upstream_MN = rows(torch.float32)
    made.of_rows(y_MN, x_MK, first_X1).backward(upstream_MN)
    wide = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    wide_y_MN, wide_x_MK = (one.detach().double().requires_grad_() for one in (y_MN, x_MK))
    a_XPRK, b_XnR = wide["a"].view(len(LOAD), len(parts), 8, 24), wide["b"].view(len(LOAD), -1, 8)
    outs = []
    for expert, (start, stop) in enumerate(pairwise(first_X1.tolist())):
        out_MN = wide_y_MN[start:stop]
        for index, part in enumerate(parts):
            b_nR = b_XnR[expert, 40 * index : 40 * index + 40]
            u_Mn = 1.5 * wide_x_MK[start:stop] @ a_XPRK[expert, index].T @ b_nR.T
            out_MN = out_MN + torch.nn.functional.pad(u_Mn, (part.start, 80 - part.stop))
        outs.append(out_MN)
    found = made.of_rows(y_MN, x_MK, first_X1)
    torch.testing.assert_close(found.double(), torch.cat(outs), rtol=1e-5, atol=1e-5)
    torch.cat(outs).backward(upstream_MN.double())
    for one, want in ((y_MN, wide_y_MN), (x_MK, wide_x_MK), (made.a, wide["a"]), (made.b, wide["b"])):
        assert one.grad is not None and want.grad is not None
        torch.testing.assert_close(one.grad.double(), want.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("interpreted")
def test_the_kernels_take_a_rank_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward by the Triton kernels, whose tiles are wider than the rank, against the references."""
    found = []
    for triton in (False, True):
        if triton:
            monkeypatch.setattr(stacked_lora, "grouped_bf16_gemm", grouped.grouped_bf16_gemm_triton)
            monkeypatch.setattr(stacked_lora, "grouped_wgrad", grouped.grouped_wgrad_triton)
            monkeypatch.setattr(stacked_lora, "_working", lambda x: x.dtype)
        made = adapter(PARTS, torch.bfloat16)
        y_MN, x_MK, upstream_MN = rows(torch.bfloat16)
        out_MN = made.of_rows(y_MN, x_MK, first_rows(LOAD))
        out_MN.backward(upstream_MN)
        found.append([out_MN, x_MK.grad, made.a.grad, made.b.grad])
    for plain, compiled in zip(*found, strict=True):
        assert plain is not None and compiled is not None
        assert (plain - compiled).float().norm() <= 2e-2 * plain.float().norm(), "the interpreter truncates to BF16"


def model_of(name: str = "sigmoid", *, fp8: bool = False, dtype: torch.dtype = torch.float32) -> Decoder:
    return made(MIXTURES[name], Fp8Config(rollout=fp8, train=fp8), LORA, dtype=dtype)


def logits(model: Decoder) -> Tensor:
    return model(*packed([18, 12], model.spec.vocab_size)) @ model.lm_head_weight.t()


@pytest.mark.parametrize("name", MIXTURES)
@torch.no_grad()
def test_merged_logits_are_the_unmerged_ones(name: str) -> None:
    model = model_of(name)
    before = logits(model)
    for _, one in model.adapters():
        if isinstance(one, StackedLoraAdapter):
            one.b.mul_(-1)
    assert (logits(model) - before).abs().max() > 0.1, "the branches of experts add something"
    before = logits(model)
    merge_adapters(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    assert all(not one.b.any() for _, one in model.adapters())


def test_an_adapters_file_has_a_tensor_for_each_expert(tmp_path: Path) -> None:
    model = model_of(dtype=torch.bfloat16)
    save_adapter(model, tmp_path, "base")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.experts.7.up_proj"
    assert saved[f"{name}.lora_A.weight"].shape[0] == 8 and saved[f"{name}.lora_B.weight"].shape == (48, 8)
    assert sum(one.numel() for one in saved.values()) == adapter_elements(model.spec, LORA)
    found = read_adapter_config(tmp_path).lora
    assert found.experts and set(found.targets or ()) == set(targets_of(LORA, model.spec))
    other = model_of(dtype=torch.bfloat16)
    for _, one in other.adapters():
        torch.nn.init.zeros_(one.a)
    load_adapter(other, tmp_path)
    ours, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("preset", "lora", "said"),
    [
        ("tiny", {"experts": True}, "this model has no experts"),
        ("tiny-moe", {"experts": True, "rank": 12}, "need a multiple of 8; set it to 16"),
        ("tiny-moe", {"targets": ["gate_proj"]}, "exist only in experts; set model.lora.experts=true"),
        ("tiny-moe", {"targets": ["gate_proj"], "experts": True}, None),
    ],
)
def test_what_does_not_go_is_refused(preset: str, lora: dict[str, Any], said: str | None) -> None:
    recipe = recipe_from_mapping({"model": {"path": "m", "lora": lora}, "environment": {"dataset": "d"}})
    texts = [problem.text for problem in spec_problems(recipe, spec_from_config(preset_config(preset)))]
    found = [text for text in texts if "lora" in text]
    assert (said is None and not found) or (len(found) == 1 and said is not None and said in found[0]), found


def test_the_count_of_trained_parameters_is_the_models() -> None:
    model = model_of(fp8=True, dtype=torch.bfloat16)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (
        trained
        == adapter_elements(model.spec, LORA)
        > 8 * adapter_elements(model.spec, LORA.model_copy(update={"experts": False, "targets": ("gate_proj",)}))
    )
