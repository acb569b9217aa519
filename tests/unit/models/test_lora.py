"""Adapters: their formula and gradients against a dense float64 model, what is frozen, and PEFT's form."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.lora import LoraPart, adapter_elements, projections, targets_of
from octetrl.config.rules_shape import spec_problems
from octetrl.config.schema import LoraConfig
from octetrl.kernels.gemm import grouped_bf16_gemm as grouped
from octetrl.layers import stacked_lora
from octetrl.layers.context import PackedContext
from octetrl.layers.linear import Float8Linear
from octetrl.layers.stacked_lora import StackedLoraAdapter
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.models.peft_adapters import load_adapter, merge_adapters, read_adapter_config
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from tests.parity.shapes import MIXTURES
from tests.saved_adapter import save_adapter
from tests.unit.kernels.grouped_cases import first_rows
from tests.unit.kernels.interpreting import interpreted  # noqa: F401
from tests.unit.models.tiny_families import DELTA, SHAPE, made, packed
from tests.unit.trainer.tiny_trainer import SPEC

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3])
BOUNDS = torch.tensor([0, 9, 16], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(9), torch.arange(7)])
FP8 = Fp8Config(rollout=True, train=True)
ALL = LoraConfig(rank=4, alpha=6.0)
SOME = LoraConfig(rank=3, alpha=2.0, targets=("q_proj", "v_proj", "up_proj"))
SPECS = {
    "qwen3": SPEC,
    "qwen2": replace(SPEC, family="qwen2", qk_norm=False, qkv_bias=True, tied_embeddings=False),
    "qwen3_5_text": spec_from_config(SHAPE | DELTA | {"model_type": "qwen3_5_text"}),
}


def make(lora: LoraConfig | None = ALL, *, spec: Any = SPEC, fp8: Fp8Config | None = None, **options: Any) -> Decoder:
    return made(spec, fp8, lora, **options)


def hidden(model: Decoder) -> Tensor:
    states: Tensor = model(TOKENS, POSITIONS, PackedContext(BOUNDS, 9))
    return states


# --- the formula ----------------------------------------------------------------------------------------------


def dense_hidden(model: Decoder, weights: dict[str, Tensor], adapters: dict[str, Tensor]) -> Tensor:
    """The decoder with its branches in float64, written out from the formulas, sequence by sequence.

    `adapters`: A and B of every projection by Hugging Face name, "0.q_proj.a"."""
    spec, lora = model.spec, model.lora
    assert lora is not None

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    def project(x: Tensor, layer: int, fused: str, name: str, start: int, rows: int) -> Tensor:
        y = x @ weights[f"layers.{layer}.{fused}.weight"][start : start + rows].T
        if f"layers.{layer}.{fused}.bias" in weights:
            y = y + weights[f"layers.{layer}.{fused}.bias"][start : start + rows]
        if f"{layer}.{name}.a" in adapters:
            a, b = adapters[f"{layer}.{name}.a"], adapters[f"{layer}.{name}.b"]
            y = y + (lora.alpha / lora.rank) * (x @ a.T) @ b.T
        return y

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        half = spec.head_size // 2
        frequency = spec.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = positions.double()[:, None, None] * frequency
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)

    def sequence(tokens: Tensor, positions: Tensor) -> Tensor:
        h = weights["embedding.weight"][tokens]
        q_size, kv_size, inner = spec.q_size, spec.kv_size, spec.intermediate_size
        for layer in range(spec.num_layers):
            x = norm(h, f"layers.{layer}.attention_norm")
            q = project(x, layer, "attention.qkv_proj", "q_proj", 0, q_size)
            k = project(x, layer, "attention.qkv_proj", "k_proj", q_size, kv_size)
            v = project(x, layer, "attention.qkv_proj", "v_proj", q_size + kv_size, kv_size)
            q, k, v = (z.view(len(tokens), -1, spec.head_size) for z in (q, k, v))
            if spec.qk_norm:
                q, k = norm(q, f"layers.{layer}.attention.q_norm"), norm(k, f"layers.{layer}.attention.k_norm")
            q, k = rotate(q, positions), rotate(k, positions)
            shared = spec.num_heads // spec.num_kv_heads
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) * spec.head_size**-0.5
            seen = torch.ones(len(tokens), len(tokens)).tril().bool()
            out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
            h = h + project(out.flatten(1), layer, "attention.o_proj", "o_proj", 0, spec.hidden_size)
            x = norm(h, f"layers.{layer}.mlp_norm")
            gate = project(x, layer, "mlp.gate_up_proj", "gate_proj", 0, inner)
            up = project(x, layer, "mlp.gate_up_proj", "up_proj", inner, inner)
            y = torch.nn.functional.silu(gate) * up
            h = h + project(y, layer, "mlp.down_proj", "down_proj", 0, spec.hidden_size)
        return norm(h, "norm")

    parts = [slice(int(start), int(end)) for start, end in pairwise(BOUNDS)]
    return torch.cat([sequence(TOKENS[rows], POSITIONS[rows]) for rows in parts])


@pytest.mark.parametrize(("name", "lora"), [("qwen3", ALL), ("qwen2", SOME)])
def test_values_and_gradients_are_those_of_a_dense_float64_model(name: str, lora: LoraConfig) -> None:
    spec = SPECS[name]
    model = make(lora, spec=spec, dtype=torch.float32)
    weights = {name: p.detach().double() for name, p in model.named_parameters() if ".lora." not in name}
    adapters: dict[str, Tensor] = {}
    places = []
    for name, adapter in model.adapters():
        for part in adapter.parts:
            for which, view in zip("ab", adapter.part_tensors(part), strict=True):
                key = f"{name.split('.')[1]}.{part.name}.{which}"
                adapters[key] = view.detach().double().clone().requires_grad_()
                places.append((key, name, part, which))
    assert len(adapters) == 2 * len(targets_of(lora, spec)) * spec.num_layers
    upstream = torch.randn(len(TOKENS), spec.hidden_size, generator=torch.Generator().manual_seed(3))
    expected = dense_hidden(model, weights, adapters)
    ours = hidden(model)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
    ours.backward(upstream)
    expected.backward(upstream.double())
    by_name = dict(model.adapters())
    for key, name, part, which in places:
        adapter = by_name[name]
        index, rank = adapter.parts.index(part), adapter.rank
        first = sum(other.stop - other.start for other in adapter.parts[:index])
        gradient = getattr(adapter, which).grad
        rows = slice(index * rank, (index + 1) * rank)
        if which == "b":
            rows = slice(first, first + part.stop - part.start)
        wanted = adapters[key].grad
        assert wanted is not None and gradient is not None
        assert (gradient[rows].double() - wanted).norm() < 1e-4 * wanted.norm(), key
    assert adapter_elements(spec, lora) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("fp8", [Fp8Config(), FP8], ids=["bf16", "fp8"])
def test_a_branch_of_zero_leaves_the_bases_bits(fp8: Fp8Config) -> None:
    plain = make(None, fp8=fp8)
    adapted = make(fp8=fp8, b_std=0.0)
    assert torch.equal(hidden(adapted), hidden(plain))
    assert not torch.equal(hidden(make(fp8=fp8)), hidden(plain))


def test_frozen_fp8_weights_are_codes_alone_and_stay_as_they_are() -> None:
    model = make(fp8=FP8)
    linears = [module for _, module in model.float8_linears()]
    assert len(linears) == 4 * SPEC.num_layers and all(linear.weight is None for linear in linears)
    before = [(linear.codes.clone(), linear.codes._version) for linear in linears]
    model.requantize()
    for linear, (codes, version) in zip(linears, before, strict=True):
        assert linear.codes._version == version
        assert torch.equal(linear.codes.view(torch.uint8), codes.view(torch.uint8))


def test_requantize_is_skipped_only_when_nothing_can_change_them() -> None:
    linear = Float8Linear(32, 16)
    linear.requantize()
    assert not linear.skips_requantize, "an optimizer may step the weight"
    assert linear.weight is not None
    linear.weight.requires_grad_(False)
    assert linear.skips_requantize
    linear.weight.mul_(2.0)
    assert not linear.skips_requantize


# --- PEFT's form ----------------------------------------------------------------------------------------------


def test_saved_and_loaded_it_is_the_same_to_the_bit(tmp_path: Path) -> None:
    model, other = make(SOME), make(SOME, b_std=0.1)
    save_adapter(model, tmp_path, base="models/base")
    load_adapter(other, tmp_path)
    for (name, mine), (_, theirs) in zip(model.adapters(), other.adapters(), strict=True):
        assert torch.equal(mine.a, theirs.a) and torch.equal(mine.b, theirs.b), name
    lora, base, _ = read_adapter_config(tmp_path)
    assert base == "models/base" and lora == SOME.model_copy(update={"path": str(tmp_path)})


def test_names_and_shapes_are_pefts(tmp_path: Path) -> None:
    model = make(ALL)
    save_adapter(model, tmp_path, base=None)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    modules = {"q_proj": "self_attn", "k_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn"}
    wanted = {
        f"base_model.model.model.layers.{layer}.{modules.get(target, 'mlp')}.{target}.lora_{which}.weight"
        for layer in range(SPEC.num_layers)
        for target in projections(SPEC)
        for which in "AB"
    }
    assert tensors.keys() == wanted
    first = "base_model.model.model.layers.1.self_attn.v_proj.lora_"
    assert tensors[f"{first}A.weight"].shape == (4, SPEC.hidden_size)
    assert tensors[f"{first}B.weight"].shape == (SPEC.kv_size, 4)
    adapter = dict(model.adapters())["layers.1.attention.qkv_proj"]
    assert torch.equal(tensors[f"{first}A.weight"], adapter.a[8:12])
    assert torch.equal(tensors[f"{first}B.weight"], adapter.b[-SPEC.kv_size :])


@pytest.mark.parametrize(("name", "lora"), [("qwen3", SOME), ("qwen2", ALL), ("qwen3_5_text", ALL)])
def test_peft_loads_it_and_has_our_logits(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = make(lora, spec=SPECS[name], dtype=torch.float32)
    save_weights(model, tmp_path / "base")
    save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = torch.cat([theirs(TOKENS[None, rows]).logits[0] for rows in (slice(9), slice(9, 16))])
    torch.testing.assert_close(model.logits(hidden(model)), logits, rtol=1e-4, atol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    other = make(lora, spec=SPECS[name], dtype=torch.float32, b_std=0.0)
    load_adapter(other, tmp_path / "theirs")
    assert torch.equal(hidden(other), hidden(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_it_is_the_adapter_to_rounding(dtype: torch.dtype) -> None:
    model = make(dtype=dtype)
    apart = hidden(model).detach().double()
    base = hidden(make(dtype=dtype, b_std=0.0)).detach().double()
    merge_adapters(model)
    assert all(not adapter.b.any() for _, adapter in model.adapters())
    distance = (hidden(model).detach().double() - apart).norm() / apart.norm()
    moved = (base - apart).norm() / apart.norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.02) < 0.2 < moved


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"r": 5}, "model.lora.rank"),
        ({"lora_alpha": 8}, "model.lora.alpha"),
        ({"target_modules": ["q_proj"]}, "model.lora.targets"),
        ({"target_modules": "all-linear"}, "'target_modules' is 'all-linear'"),
        ({"target_modules": ["lm_head"]}, "target_modules: 'lm_head'"),
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"use_rslora": True}, "use_rslora True"),
        ({"bias": "all"}, "bias all"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        *(
            ({"init_lora_weights": init}, "init_lora_weights")
            for init in ("pissa", "pissa_niter_4", "olora", ["pissa"])
        ),
        ({"init_lora_weights": "corda", "corda_config": {}}, "init_lora_weights"),
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "init_lora_weights"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [0]}, "trainable_token_indices"),
        ({"of_a_later_peft": 0.5}, "of_a_later_peft"),
        ({"modules_to_save": ["score", "embed_tokens"]}, "modules_to_save"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"task_type": "SEQ_CLS"}, "task_type SEQ_CLS"),
    ],
)
def test_another_adapter_is_refused(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    model = make(ALL)
    save_adapter(model, tmp_path, base=None)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=field):
        load_adapter(model, tmp_path)


@pytest.mark.parametrize(
    ("init", "plain"),
    [(True, True), (False, True), ("gaussian", True), ("orthogonal", True), ("pissa", False), ("olora", False)],
)
def test_an_adapter_of_peft_is_read_if_it_is_plain_lora_of_the_base(
    init: bool | str, plain: bool, tmp_path: Path
) -> None:
    """`plain`: PEFT's own layer computes W x + s B A x with the base's W. The config has every field of PEFT."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=init)
    theirs = peft.get_peft_model(deepcopy(layer), config)
    theirs.base_model.model[0].lora_B["default"].weight.data.add_(0.5)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.0.lora_{name}.weight"] for name in "AB")
    x = torch.randn(3, 8)
    difference = (theirs(x) - x @ (layer[0].weight + 2 * b @ a).T).abs().max()
    assert bool(difference < 1e-5) == plain
    with nullcontext() if plain else pytest.raises(UserError, match="init_lora_weights"):
        assert read_adapter_config(tmp_path).lora.rank == 4


def test_tensors_of_another_model_are_refused_and_nothing_changes(tmp_path: Path) -> None:
    model = make(ALL)
    save_adapter(model, tmp_path, base=None)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for broken, what in (
        ({key: t for key, t in tensors.items() if key != name}, f"'{name}' is missing"),
        (tensors | {"more": torch.ones(1)}, "'more' is extra"),
        (tensors | {name: tensors[name][:, 1:].contiguous()}, r"is \[4, 31\] instead of \[4, 32\]"),
        (tensors | {name: torch.full_like(tensors[name], torch.nan)}, "is not finite everywhere"),
    ):
        save_file({key: tensor + 1 for key, tensor in broken.items()}, file)
        with pytest.raises(UserError, match=what):
            load_adapter(model, tmp_path)
        assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())
    file.unlink()
    with pytest.raises(UserError, match="can't be read as safetensors"):
        load_adapter(model, tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="fetch the adapter again"):
        load_adapter(model, tmp_path)


# ---------------------------------------------------------------- adapters of experts


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
