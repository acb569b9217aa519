"""config.json to spec and back: both spellings of transformers, and refusal of what the decoder can't run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from lab import families_page
from octetrl.config.load import recipe_from_mapping
from octetrl.config.memory import kv_bytes_per_token
from octetrl.config.rules_shape import spec_problems
from octetrl.fp8.parity import PROVEN
from octetrl.fp8.policy import precision_policy
from octetrl.layers.tensor_group import ONE_WORKER
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.moe.layout import MixtureLayout
from octetrl.models.build_blocks import LayerBuilder
from octetrl.models.families import hf_config, load_spec, prediction_layers, spec_from_config
from octetrl.models.family import FAMILIES
from octetrl.models.weight_files import checked_headers
from octetrl.shapes.presets import preset_config
from octetrl.shapes.rope import Llama3Scaling, YarnScaling
from octetrl.shapes.spec import MOST_TOKENS, ModelSpec
from octetrl.system.errors import UserError
from tests.parity.sides import PRECISIONS
from tests.unit.models.tiny_families import ROUTED, SHAPE

QWEN3: dict[str, Any] = {
    **{key: value for key, value in preset_config("qwen3-0.6b").items() if key not in ("model_type", "attention_bias")},
    "sliding_window": None,
    "max_window_layers": 28,
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


def scaled(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": rope_type, **fields}}


LLAMA = preset_config("llama-3.1-8b") | {"eos_token_id": [128001, 128008, 128009]}
LLAMA3: dict[str, Any] = LLAMA["rope_scaling"]
MIXTURE = preset_config("tiny-moe") | {"num_hidden_layers": 2}
LATENT = preset_config("tiny-mla-moe")
MISTRAL = {**SHAPE, "architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}
WINDOWS = {**SHAPE, "architectures": ["Qwen3ForCausalLM"], "sliding_window": 8}
MIXTRAL = {**SHAPE, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
DOTS1 = {**SHAPE, **ROUTED, "architectures": ["Dots1ForCausalLM"], "sliding_window": None}
FLASH = LATENT | {"architectures": ["Glm4MoeLiteForCausalLM"]}
BY_LAYER = {"layer_types": ["full_attention", "sliding_attention"]}


def test_qwen3_as_published() -> None:
    spec = spec_from_config(QWEN3)
    assert (spec.family, spec.qk_norm, spec.qkv_bias, spec.tied_embeddings) == ("qwen3", True, False, True)
    assert (spec.head_size, spec.q_size, spec.kv_size, spec.eos_token_ids) == (128, 2048, 1024, (151645,))
    assert spec.num_parameters == 596_049_920  # as Qwen3-0.6B is published


def test_transformers_5_spelling_gives_the_same_spec() -> None:
    new = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**LLAMA["rope_scaling"], "rope_theta": 500000.0}
    spec = spec_from_config(LLAMA)
    assert spec_from_config(new) == spec
    assert (spec.rope_scaling, spec.head_size) == (Llama3Scaling(8.0, 1.0, 4.0, 8192), 128)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    old = {key: value for key, value in LLAMA["rope_scaling"].items() if key != "rope_type"}
    assert spec_from_config({**LLAMA, "rope_scaling": {**old, "type": "llama3"}}) == spec


def test_yarn_extends_the_context_and_round_trips() -> None:
    spec, most = (
        spec_from_config(QWEN3 | scaled("yarn", factor=factor, original_max_position_embeddings=32768))
        for factor in (4.0, 1e4)
    )
    assert (spec.rope_scaling, spec.max_positions) == (YarnScaling(4.0, 32768), 131_072)
    assert spec_from_config(json.loads(json.dumps(hf_config(spec)))) == spec
    assert most.max_positions == MOST_TOKENS, "a large factor ends at the longest context"


def test_qwen2_has_a_bias_and_its_unused_window_is_fine() -> None:
    config = {**QWEN3, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 32768, "head_dim": None}
    spec = spec_from_config(config)
    assert (spec.qkv_bias, spec.qk_norm, spec.head_size, spec.fp8_k_is_safe) == (True, False, 64, False)
    assert spec_from_config({**config, "use_sliding_window": True, "max_window_layers": 28}) == spec


def latent(spec: ModelSpec) -> bool:
    return isinstance(spec.blocks_of(0).attention, LatentAttentionLayout)


DOTS = {"n_routed_experts": 16, "num_experts_per_tok": 2}  # which have no defaults


@pytest.mark.parametrize("family", [family.name for family in FAMILIES.values() if not family.has_latents])
def test_key_heads_that_are_left_out_are_as_many_as_in_transformers(family: str) -> None:
    theirs = CONFIG_MAPPING[family](**(DOTS if family == "dots1" else {}))
    given = {key: value for key, value in theirs.to_dict().items() if value is not None}
    given |= {"architectures": None, "head_dim": 128}
    del given["num_key_value_heads"]
    assert spec_from_config(given).num_kv_heads == theirs.num_key_value_heads
    without = spec_from_config(given | {"num_key_value_heads": None})
    assert without.num_kv_heads == theirs.num_attention_heads, "null means one for each head"


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe", "glm4_moe_lite"])
def test_keys_that_are_left_out_have_the_values_of_transformers(family: str) -> None:
    theirs = CONFIG_MAPPING[family]()
    given = {key: value for key, value in theirs.to_dict().items() if isinstance(value, int | str) or value is None}
    given |= {"model_type": family, "architectures": None} | ({"head_dim": 128} if family == "glm4_moe" else {})
    left_out = ("rms_norm_eps", "routed_scaling_factor", "n_shared_experts", "shared_expert_intermediate_size")
    for key in (*left_out, "rope_theta", "rope_parameters", "first_k_dense_replace", "qkv_bias"):
        given.pop(key, None)
    spec = spec_from_config(given)
    assert spec.rms_norm_eps == theirs.rms_norm_eps
    assert spec.rope_theta == theirs.rope_parameters["rope_theta"]
    mixture = spec.blocks_of(spec.num_layers - 1).mlp
    assert isinstance(mixture, MixtureLayout)
    assert mixture.routing.scale == getattr(theirs, "routed_scaling_factor", 1.0)
    shared = getattr(theirs, "n_shared_experts", 0) * mixture.expert_size
    assert mixture.shared_size == getattr(theirs, "shared_expert_intermediate_size", shared)
    if hasattr(theirs, "first_k_dense_replace"):
        assert isinstance(spec.blocks_of(0).mlp, MixtureLayout) != (theirs.first_k_dense_replace > 0)
    assert spec.qkv_bias == getattr(theirs, "qkv_bias", False)
    assert spec.rotary_size == spec.head_size * theirs.rope_parameters.get("partial_rotary_factor", 1) or latent(spec)


@pytest.mark.parametrize("config", [QWEN3, LLAMA, {**QWEN3, "architectures": ["Qwen2ForCausalLM"]}])
def test_hf_config_round_trips(config: dict[str, Any]) -> None:
    spec = spec_from_config(config)
    assert spec_from_config(json.loads(json.dumps(hf_config(spec)))) == spec


QWEN3_235B = {"num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "moe_intermediate_size": 1536}


@pytest.mark.parametrize(
    ("preset", "changes", "parameters", "in_experts", "cached_bytes"),
    [
        ("qwen3-30b-a3b", {}, 30_532_122_624, 28_991_029_248, None),
        ("qwen3-30b-a3b", QWEN3_235B, 235_093_634_560, None, None),
        ("moonlight-16b-a3b", {}, 15_960_110_208, 14_844_690_432, [27 * 1_152, 27 * 644]),
        ("tiny-mla-moe", {}, None, None, None),
    ],
)
def test_published_shapes_have_their_parameters_and_are_their_configs_again(
    preset: str, changes: dict[str, Any], parameters: int | None, in_experts: int | None, cached_bytes: list[int] | None
) -> None:
    """`cached_bytes`: of a token, in BF16 and in FP8."""
    spec = spec_from_config(preset_config(preset) | changes)
    assert spec_from_config(hf_config(spec)) == spec
    assert parameters in (None, spec.num_parameters)
    experts = sum(linear.num_weights for name, linear in spec.linears() if "experts." in name)
    assert in_experts in (None, experts)
    if cached_bytes is not None:
        recipe = recipe_from_mapping({"model": {"path": "m"}, "environment": {"dataset": "d"}})
        policies = [precision_policy(spec, PRECISIONS[name]).precisions() for name in ("bf16", "fp8_full")]
        assert [kv_bytes_per_token(recipe, spec, precisions) for precisions in policies] == cached_bytes


def windows_of(config: dict[str, Any]) -> list[int | None]:
    spec = spec_from_config(config)
    return [spec.blocks_of(layer).attention.window for layer in range(spec.num_layers)]  # type: ignore[attr-defined]


def test_windows_that_a_config_leaves_out_are_transformers_default() -> None:
    assert windows_of(MISTRAL) == [4096, 4096] and spec_from_config(MISTRAL).num_kv_heads == 2
    assert windows_of(MISTRAL | {"sliding_window": None}) == [None, None]
    assert windows_of(MISTRAL | {"sliding_window": 8192}) == [None, None], "as long as the context"
    assert windows_of(WINDOWS) == [None, None]
    assert windows_of(WINDOWS | {"use_sliding_window": True}) == [None, None], "max_window_layers is 28"
    assert windows_of(WINDOWS | {"use_sliding_window": True, "max_window_layers": 0}) == [8, 8]
    mistral = {key: value for key, value in MISTRAL.items() if key != "num_key_value_heads"}
    assert spec_from_config(mistral | {"num_attention_heads": 16, "head_dim": 16}).num_kv_heads == 8


def test_a_share_of_rotated_values_is_read_where_transformers_reads_it() -> None:
    """For GLM-4.7-Flash, where only 1 is supported, and not for DeepSeek-V3."""
    config = LATENT | {"partial_rotary_factor": 0.5}
    assert spec_from_config(config) == spec_from_config(LATENT)
    with pytest.raises(UserError, match=r"partial_rotary_factor 0\.5 is not supported for glm4_moe_lite"):
        spec_from_config(config | {"architectures": ["Glm4MoeLiteForCausalLM"]})


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        (QWEN3, {"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
        (QWEN3, scaled("dynamic", factor=4.0), "RoPE type 'dynamic'"),
        (QWEN3, scaled("linear"), "'factor' is missing"),
        (QWEN3, scaled("linear", factor=0.5), "'factor' is 0.5"),
        (QWEN3, scaled("yarn", factor=4.0, mscale="1"), "'mscale' is '1'"),
        (QWEN3, scaled("yarn", beta_fast=1.0, beta_slow=2.0), "'beta_fast' is 1.0"),
        (QWEN3, scaled("yarn", attention_factor=0), "'attention_factor' is 0"),
        (QWEN3, scaled("yarn", beta_slow=5e-324), "'beta_slow' is 5e-324"),
        (QWEN3, scaled("yarn", mscale=1e300), "'mscale' is 1e+300"),
        (QWEN3, scaled("yarn", attention_factor=1e6), "'attention_factor' is 1000000.0"),
        (QWEN3, scaled("yarn", factor=1e300), "'factor' is 1e+300"),
        (QWEN3, scaled("yarn", original_max_position_embeddings=0), "'original_max_position"),
        (QWEN3, scaled("yarn") | {"rope_theta": 1}, "'rope_theta' is 1"),
        (QWEN3, scaled("llama3", factor=4.0), "'low_freq_factor' is missing"),
        (QWEN3, scaled(**LLAMA3 | {"high_freq_factor": 1e300}), "'high_freq_factor' is 1e+300"),
        (QWEN3, scaled(**LLAMA3 | {"low_freq_factor": 4.0}), "'low_freq_factor' is 4.0"),
        (QWEN3, {"rms_norm_eps": 1e30}, "'rms_norm_eps' is 1e+30"),
        (QWEN3, {"rope_theta": 1e-9}, "'rope_theta' is 1e-09"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for qwen3"),
        (QWEN3, GLM | {"partial_rotary_factor": 0.01}, "'partial_rotary_factor' is 0.01"),
        (QWEN3, GLM | {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5"),
        (QWEN3, GLM | {"partial_rotary_factor": "half"}, "'partial_rotary_factor' is 'half'"),
        (QWEN3, {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "'full_attention'"),
        (QWEN3, {"hidden_act": None}, "'hidden_act' is null"),
        (QWEN3, {"torch_dtype": "float99"}, "'torch_dtype' is 'float99'"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (QWEN3, {"mlp_bias": True}, "mlp_bias true is not supported for qwen3"),
        (QWEN3, {"architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, "attention_bias true"),
        (QWEN3, {"quantization_config": {"quant_method": "awq"}}, "quantization 'awq'"),
        (QWEN3, {"vocab_size": None}, "'vocab_size' is null"),
        (QWEN3, {"hidden_size": "1024"}, "'hidden_size' is '1024'"),
        (QWEN3, {"num_key_value_heads": 7}, "not a multiple"),
        (QWEN3, {"head_dim": 112}, "head size 112"),
        (QWEN3, {"architectures": ["LlamaForCausalLM"], "head_dim": None, "hidden_size": 1920}, "head size 120"),
        (QWEN3, {"eos_token_id": "</s>"}, "eos_token_id"),
        (WINDOWS, {"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'"),
        (WINDOWS, {"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        (WINDOWS, BY_LAYER, "no sliding_window in use"),
        (WINDOWS, {"use_sliding_window": True, "sliding_window": 0}, "'sliding_window' is 0"),
        (MISTRAL, BY_LAYER, "not supported for mistral"),
        (MISTRAL, {"attention_bias": True}, "attention_bias true is not supported for mistral"),
        (MISTRAL, {"architectures": ["LlamaForCausalLM"], "use_sliding_window": True}, "not supported for llama"),
        (MISTRAL, {"architectures": ["Phi3ForCausalLM"]} | scaled("yarn", factor=4.0), "RoPE scaling"),
        (MISTRAL, {"architectures": ["OlmoeForCausalLM"]}, "unsupported architecture Olmoe"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds the 4 experts"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "'router_jitter_noise' is 0.1"),
        (MIXTRAL, {"scoring_func": "sigmoid"}, "routing function 'sigmoid'"),
        (MIXTURE, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
        (MIXTURE, {"scoring_func": "sqrtsoftplus"}, "routing function 'sqrtsoftplus'"),
        (MIXTURE, {"topk_method": "noaux_tc"}, "'noaux_tc' (topk_method) is not supported"),
        (MIXTURE, {"num_experts": 0}, "'num_experts' is 0"),
        (MIXTURE, {"num_experts": ...}, "'num_experts' is missing"),
        (MIXTURE, {"num_experts_per_tok": ...}, "'num_experts_per_tok' is missing"),
        (MIXTURE, {"moe_intermediate_size": None}, "'moe_intermediate_size' is null"),
        (MIXTURE, {"mlp_only_layers": [0, 1]}, "none of the 2 layers"),
        (MIXTURE, {"mlp_only_layers": "all"}, "'mlp_only_layers' is 'all'"),
        (DOTS1, {"n_group": 3}, "n_group 3"),
        (DOTS1, {"n_group": 2, "topk_group": 3}, "topk_group 3 exceeds n_group 2"),
        (DOTS1, {"n_group": 8, "topk_group": 4}, "n_group 8 of 8 experts leaves groups of one"),
        (DOTS1, {"n_group": 4, "topk_group": 1}, "num_experts_per_tok 3 exceeds the 2 experts"),
        (DOTS1, {"scoring_func": "softmax"}, "routing function 'softmax'"),
        (DOTS1, BY_LAYER, "no sliding_window in use"),
        (LATENT, {"kv_lora_rank": None}, "'kv_lora_rank' is null"),
        (LATENT, {"kv_lora_rank": ...}, "'kv_lora_rank' is missing"),
        (LATENT, {"q_lora_rank": 0}, "'q_lora_rank' is 0"),
        (LATENT, {"qk_rope_head_dim": 15}, "'qk_rope_head_dim' is 15"),
        (LATENT, {"num_key_value_heads": 2}, "num_key_value_heads 2 differs"),
        (LATENT, {"moe_layer_freq": 2}, "'moe_layer_freq' is 2"),
        (LATENT, {"routed_scaling_factor": 1e30}, "'routed_scaling_factor' is 1e+30"),
        (LATENT, {"scoring_func": "softmax"}, "routing function 'softmax'"),
        (FLASH, {"mlp_layer_types": ["dense"]}, "for each of the 4 layers"),
        (FLASH, {"mlp_layer_types": ["dense", "sparse", "sparse", "linear"]}, "for each of the 4 layers"),
    ],
)
def test_what_we_lack_is_refused_by_name(config: dict[str, Any], change: dict[str, Any], told: str) -> None:
    """`...`: the key is left out."""
    given = {key: value for key, value in {**config, **change}.items() if value is not ...}
    with pytest.raises(UserError, match=re.escape(told)) as caught:
        spec_from_config(given)
    assert "\n" not in str(caught.value)


def test_a_negative_number_of_further_layers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_nextn_predict_layers": -1}))
    with pytest.raises(UserError, match="'num_nextn_predict_layers' is -1"):
        prediction_layers(tmp_path)


@pytest.mark.parametrize(
    ("config", "dtype", "told"),
    [
        (MIXTURE, torch.float32, "runs on a GPU in bfloat16"),
        (LATENT | {"qk_nope_head_dim": 32}, torch.bfloat16, "qk_nope_head_dim 32"),
    ],
)
def test_what_a_gpu_cannot_run_is_refused_there(config: dict[str, Any], dtype: torch.dtype, told: str) -> None:
    spec = spec_from_config(config)
    policy = precision_policy(spec, PRECISIONS["bf16"])
    with pytest.raises(UserError, match=told):
        LayerBuilder(spec, policy, "train", dtype, "cuda", "scaled_mm", None, ONE_WORKER, fp8_weights=True)
    assert spec_from_config(LATENT).refused_on_gpu() is None


def test_fp8_takes_any_width_of_sixteens_and_refuses_others() -> None:
    given = {"model": {"path": "m"}, "environment": {"dataset": "d"}, "precision": "fp8_full"}
    recipe = recipe_from_mapping(given)
    for hidden, inner, told in ((576, 1536, ()), (2880, 4000, ()), (72, 100, ("hidden size is 72", "size is 100"))):
        spec = spec_from_config(MISTRAL | {"hidden_size": hidden, "intermediate_size": inner})
        problems = [problem.text for problem in spec_problems(recipe, spec) if "fp8" in problem.text]
        assert all(text in problem for text, problem in zip(told, problems, strict=True))


def test_a_link_to_a_file_of_the_model_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    spec = load_spec(tmp_path)
    for name, read in (
        ("generation_config.json", lambda: load_spec(tmp_path)),
        ("model.safetensors", lambda: checked_headers(tmp_path, spec)),
        ("model.safetensors.index.json", lambda: checked_headers(tmp_path, spec)),
    ):
        (tmp_path / name).symlink_to(tmp_path / "gone")
        with pytest.raises(UserError, match=f"{name}' is a link to '{tmp_path / 'gone'}'"):
            read()
        (tmp_path / name).unlink()


def test_folders_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"demo/sft/export' does not exist; run `octetrl demo` first$"):
        load_spec("runs/demo/sft/export")
    with pytest.raises(UserError, match=r"first, then, in a checkout, `python -m examples.upcycle \S+ runs/demo/moe`$"):
        load_spec("runs/demo/moe")
    with pytest.raises(UserError, match=r"`hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B` fetches one$"):
        load_spec("models/Qwen3-8B")
    with pytest.raises(UserError, match=r"does not exist; give a Hugging Face folder with config\.json$"):
        load_spec(tmp_path / "absent")
    with pytest.raises(UserError, match=r"has no config\.json"):
        load_spec(tmp_path)
    config = tmp_path / "config.json"
    for content, told in (
        ("{", "not JSON"),
        ("[]", "it contains a list"),
        ("{}", r"config\.json: unsupported architecture"),
    ):
        config.write_text(content)
        with pytest.raises(UserError, match=told) as caught:
            load_spec(tmp_path)
        assert "\n" not in str(caught.value)


def test_end_of_text_comes_from_the_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    assert load_spec(tmp_path).eos_token_ids == (151645, 151643)


def test_reading_a_spec_needs_no_torch() -> None:
    code = "import sys, octetrl.models.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_of_models_has_every_family_as_it_is() -> None:
    page = families_page.PAGE.read_text(encoding="utf-8")
    assert families_page.with_table(page) == page
    assert families_page.KNOWN.keys() == {*FAMILIES, *PROVEN}
