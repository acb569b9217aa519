"""config.json to spec and back: both spellings of transformers, and refusal of what the decoder can't run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.moe.layout import MixtureLayout
from octetrl.models.families import hf_config, load_spec, spec_from_config
from octetrl.models.family import FAMILIES
from octetrl.models.weight_files import checked_headers
from octetrl.shapes.rope import Llama3Scaling, YarnScaling
from octetrl.shapes.spec import MOST_TOKENS, ModelSpec
from octetrl.system.errors import UserError

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
    "hidden_act": "silu",
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {
    **{key: QWEN3[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")},
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_SCALING,
    "eos_token_id": [128001, 128008, 128009],
}


def test_qwen3_as_published() -> None:
    spec = spec_from_config(QWEN3)
    assert (spec.family, spec.qk_norm, spec.qkv_bias, spec.tied_embeddings) == ("qwen3", True, False, True)
    assert (spec.head_size, spec.q_size, spec.kv_size, spec.eos_token_ids) == (128, 2048, 1024, (151645,))
    assert spec.num_parameters == 596_049_920  # as Qwen3-0.6B is published


def test_transformers_5_spelling_gives_the_same_spec() -> None:
    new = {key: value for key, value in LLAMA.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {**LLAMA3_SCALING, "rope_theta": 500000.0}
    spec = spec_from_config(LLAMA)
    assert spec_from_config(new) == spec
    assert (spec.rope_scaling, spec.head_size) == (Llama3Scaling(8.0, 1.0, 4.0, 8192), 64)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    old_type = {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "type": "llama3"}}
    del old_type["rope_scaling"]["rope_type"]
    assert spec_from_config(old_type) == spec_from_config(LLAMA)


def test_yarn_extends_the_context_and_round_trips() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = spec_from_config({**QWEN3, "rope_scaling": yarn})
    assert (spec.rope_scaling, spec.max_positions) == (YarnScaling(4.0, 32768), 131_072)
    assert spec_from_config(json.loads(json.dumps(hf_config(spec)))) == spec


def test_a_large_factor_ends_at_the_longest_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 1e4, "original_max_position_embeddings": 32768}
    assert spec_from_config({**QWEN3, "rope_scaling": yarn}).max_positions == MOST_TOKENS


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


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"architectures": ["GptOssForCausalLM"]}, "unsupported architecture GptOssForCausalLM.*why others are not$"),
        ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "RoPE type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "'factor' is 0.5, 1 or more"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": "1"}}, "'mscale' is '1'"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}}, "'beta_fast' is 1.0, at least"),
        ({"rope_scaling": {"rope_type": "yarn", "attention_factor": 0}}, "'attention_factor' is 0, a positive"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_slow": 5e-324}}, "'beta_slow' is 5e-324, a number from 0.001"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 1e300}}, r"'mscale' is 1e\+300, a number from 0.001"),
        ({"rope_scaling": {"rope_type": "yarn", "attention_factor": 1e6}}, "'attention_factor' is 1000000.0, a number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, r"'factor' is 1e\+300, at most 10000 is allowed"),
        (
            {"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1e300}},
            r"'high_freq_factor' is 1e\+300, a number from 0.001",
        ),
        ({"rms_norm_eps": 1e30}, r"'rms_norm_eps' is 1e\+30, a number from 1e-12 to 1 is needed"),
        ({"rope_theta": 1e-9}, "'rope_theta' is 1e-09, a number from 0.001 to"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1}, "'rope_theta' is 1, YaRN needs more"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}}, "'original_max_position"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "'low_freq_factor' is missing"),
        (
            {"rope_scaling": LLAMA3_SCALING | {"low_freq_factor": 4.0}},
            "'low_freq_factor' is 4.0, less than high_freq_f",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported for qwen3, only 1 is"),
        (
            GLM | {"partial_rotary_factor": 0.01},
            "'partial_rotary_factor' is 0.01, a share is needed that rotates an even",
        ),
        (GLM | {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' is 1.5, a share is needed"),
        (GLM | {"partial_rotary_factor": "half"}, "'partial_rotary_factor' is 'half'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "RoPE of its own for 'full_attention' is not"),
        ({"hidden_act": None}, "'hidden_act' is null"),
        ({"torch_dtype": "float99"}, "'torch_dtype' is 'float99'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias true is not supported for qwen3"),
        ({"architectures": ["Qwen2ForCausalLM"], "attention_bias": True}, "attention_bias true"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq'"),
        ({"vocab_size": None}, "'vocab_size' is null"),
        ({"hidden_size": "1024"}, "'hidden_size' is '1024'"),
        ({"num_key_value_heads": 7}, "not a multiple"),
        ({"head_dim": 112}, r"head size 112 .*only 16, 32, 64, 80, 96, 128, 192, 256 are"),
        ({"architectures": ["LlamaForCausalLM"], "head_dim": None, "hidden_size": 1920}, "head size 120"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_we_lack_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        spec_from_config({**QWEN3, **change})
    assert "\n" not in str(caught.value)


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
