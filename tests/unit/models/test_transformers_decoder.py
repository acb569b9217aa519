"""Transformers' modules in our decoder: their logits and gradients, their files, and what can't run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from octetrl.config.schema import Fp8Config, LoraConfig
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder_class import decoder_class
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights, save_weights_fp8
from octetrl.models.transformers_decoder import TransformersDecoder
from octetrl.models.transformers_norms import KINDS, _normed, kind_of
from octetrl.models.transformers_shape import build_modules
from octetrl.system.errors import UserError
from octetrl.trainer.activation_checkpoint import layer_runner
from tests.transformers_families import FAMILIES, config_of
from tests.unit.models.tiny_families import hf_logits, packed

LENGTHS = [12, 1, 40]  # longer than the windows


@torch.no_grad()
def their_model(family: str, **changes: Any) -> Any:
    """Everything is drawn, also what transformers begins with constants."""
    content = config_of(family, **changes)
    config = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        start = 1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0
        parameter.normal_(start, 0.2, generator=generator)
    return model


def ours_of(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> TransformersDecoder:
    spec = load_spec(folder, implementation="transformers")
    policy = precision_policy(spec, Fp8Config())
    model = decoder_class(spec)(spec, policy, "train", dtype=dtype, **options)
    load_weights(model, folder)
    assert isinstance(model, TransformersDecoder)
    return model


def relative_error(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None and theirs is not None
    return float(((ours - theirs).norm() / theirs.norm()).detach())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_gradients_and_files_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = their_model(family)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = ours_of(tmp_path / "theirs")
    token_ids_T, positions_T, context = packed(LENGTHS)
    hidden_TE = ours(token_ids_T, positions_T, context, layer_runner(ours, "layer", 1))
    want_TV = hf_logits(theirs, token_ids_T, LENGTHS)
    assert relative_error(ours.logits(hidden_TE), want_TV) < 1e-5

    targets_T = token_ids_T.roll(-1)
    ours.logprobs(hidden_TE, targets_T, chunk=50)[0].mean().backward()
    torch.log_softmax(want_TV, -1).gather(1, targets_T[:, None]).mean().backward()
    named = {"embedding.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    of_theirs = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = of_theirs[named.get(name, f"model.{name}")].grad
        assert relative_error(parameter.grad, wanted) < 1e-4, name

    save_weights(ours, tmp_path / "export", max_shard_bytes=40_000)
    assert ours_of(tmp_path / "export").spec.blocks == ours.spec.blocks
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    held = again.state_dict()
    assert all(torch.equal(held[key], tensor) for key, tensor in theirs.state_dict().items())


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_adapters_change_what_they_are_asked_to(targets: tuple[str, ...] | None, tmp_path: Path) -> None:
    their_model("olmo3").save_pretrained(tmp_path)
    lora = LoraConfig(rank=4, targets=targets)
    ours = ours_of(tmp_path, lora=lora)
    ours.train_adapters_alone()
    adapted = [name for name, _ in ours.adapters()]
    assert len(adapted) == 2 * (7 if targets is None else 2) and "layers.1.mlp.down_proj" in adapted
    token_ids_T, positions_T, context = packed(LENGTHS)
    before_TE = ours(token_ids_T, positions_T, context).detach()
    for _, adapter in ours.adapters():
        adapter.b.data.normal_(generator=torch.Generator().manual_seed(2))
    hidden_TE = ours(token_ids_T, positions_T, context)
    assert not torch.equal(hidden_TE, before_TE)
    hidden_TE.sum().backward()
    assert {name for name, one in ours.named_parameters() if one.grad is not None} == {
        name for name, _ in ours.trained_parameters()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_activation_does_not_depend_on_the_place_in_a_tensor(dtype: torch.dtype) -> None:
    """torch's GELU of -5.0625 in BF16, and its SiLU in float32, differ behind the last whole vector."""
    content = config_of("gemma", hidden_activation="gelu_pytorch_tanh" if dtype == torch.bfloat16 else "silu")
    spec = spec_from_config(content, implementation="transformers")
    model = decoder_class(spec)(spec, precision_policy(spec, Fp8Config()), "train", dtype=dtype)
    activation = model.get_submodule("layers.0.mlp.act_fn")
    x = torch.linspace(-6, 6, 3001).to(dtype)
    assert torch.equal(activation(x), torch.cat([activation(one) for one in x.split(1)]))


def test_an_fp8_export_has_codes_of_the_linears(tmp_path: Path) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 4}
    their_model("olmo3", **wide).save_pretrained(tmp_path / "theirs")
    ours = ours_of(tmp_path / "theirs", torch.bfloat16)
    save_weights_fp8(ours, tmp_path / "fp8")
    stored = load_file(tmp_path / "fp8/model.safetensors")
    codes = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(codes) == 2 * 7 and all(f"{name}_scale_inv" in stored for name in codes)


def test_keys_with_a_bias_and_no_norm_stay_out_of_an_fp8_cache() -> None:
    specs = {family: spec_from_config(config_of(family), implementation="transformers") for family in FAMILIES}
    kept = {family: [tensor.name for tensor in spec.cached(0) if tensor.never_fp8] for family, spec in specs.items()}
    assert {family: names for family, names in kept.items() if names} == {"glm4": ["K"], "seed_oss": ["K"]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (config_of("olmo2", model_type="gpt_oss", num_local_experts=4), "s_aux|without weights|experts"),
    (config_of("olmo2", model_type="gemma2"), "softcap"),
    (config_of("olmo3", model_type="mamba2"), "modules are|can't build"),
    (config_of("olmo2", model_type="qwen3_5_text", num_hidden_layers=4), "convolutions"),
    (config_of("granite", logits_scaling=6.0), "powers of two"),
    (config_of("olmo2", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
    (config_of("olmo2", head_dim=24, hidden_size=96), "head size is 24"),
    (config_of("olmo2", model_type="starcoder2"), "last norm"),
    (config_of("olmo2", model_type="apertus", rope_parameters=None), "is no parameter"),
    (config_of("olmo2", quantization_config={"quant_method": "gptq"}), "quantised"),
    (config_of("olmo2", model_type="diffllama"), "layer 0 has no attention"),
    (config_of("olmo2", model_type="mixtral", num_local_experts=2), "experts"),
    (config_of("gemma3_text", final_logit_softcapping=30.0), "softcap"),
    (config_of("olmo2", model_type="vaultgemma", attn_logit_softcapping=None), "softcap"),
    (config_of("olmo2", is_causal=False), "is_causal"),
    (config_of("olmo2", model_type="moshi"), "98 rows"),
    (config_of("olmo2", model_type="zamba2"), "can't build"),
    ({"architectures": ["MyForCausalLM"], "model_type": "mine"}, "model_type 'mine'"),
]


@pytest.mark.parametrize(("content", "told"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_run_is_refused_in_one_line(content: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as refusal:
        spec_from_config(content, implementation="transformers")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "changes", "scale"),
    [
        ("cohere", {"logit_scale": None}, 0.0625),  # its default
        ("olmo2", {"model_type": "hyperclovax", "logits_scaling": 4.0}, 4.0),  # Granite divides by the key of this name
        ("granite", {"logit_scale": 0.25}, 0.125),  # a key that Granite does not read
    ],
)
def test_the_factor_on_logits_is_the_one_that_the_head_computes(
    family: str, changes: dict[str, Any], scale: float
) -> None:
    content = {key: value for key, value in config_of(family, **changes).items() if value is not None}
    assert spec_from_config(content, implementation="transformers").logit_scale == scale


def test_families_with_blocks_keep_them_unless_asked(tmp_path: Path) -> None:
    content = config_of("olmo2", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    assert spec_from_config(content).hf_config is None
    assert spec_from_config(content, implementation="transformers").hf_config is not None
    with pytest.raises(UserError, match="Olmo2ForCausalLM"):
        spec_from_config(config_of("olmo2", architectures=["Olmo2ForCausalLM"]), implementation="octetrl")
    (tmp_path / "config.json").write_text(json.dumps(config_of("olmo2")))
    assert load_spec(tmp_path).hf_config is not None


def test_the_number_of_layers_is_checked_before_they_are_built() -> None:
    with pytest.raises(UserError, match="num_hidden_layers"):
        spec_from_config(config_of("olmo2", num_hidden_layers=10**12))


def test_a_norm_is_recognised_by_what_it_computes() -> None:
    kinds = {}
    for family in ("arcee", "olmo2", "gemma", "cohere2"):
        base = build_modules(config_of(family)).base_model
        kinds[family] = kind_of(base.norm, getattr(base.norm, "variance_epsilon", None) or base.norm.eps)
    assert kinds == {"arcee": "weight_after", "olmo2": "weight_before", "gemma": "offset", "cohere2": "centred"}
    unknown = torch.nn.LayerNorm(64, bias=False)
    assert kind_of(unknown, 1e-5) == "centred"
    unknown.forward = lambda x: x  # type: ignore[method-assign]
    assert kind_of(unknown, 1e-5) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_norm_on_a_gpu_has_the_gradient_of_its_formula(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 64, generator=generator, requires_grad=True)
    weight = torch.randn(64, generator=generator, requires_grad=True)
    _normed(x, weight, kind, 1e-6).square().sum().backward()
    exact, exact_weight = (one.detach().double().requires_grad_() for one in (x, weight))
    rows = exact - exact.mean(-1, keepdim=True) if kind == "centred" else exact
    xhat = rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    ((exact_weight + (kind == "offset")) * xhat).square().sum().backward()
    assert relative_error(x.grad, exact.grad) < 1e-5
    assert relative_error(weight.grad, exact_weight.grad) < 1e-5
