"""Mixtures in Hugging Face folders: transformers' logits, exports that load there, block-FP8, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Dots1Config,
    Dots1ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from octetrl.config.load import recipe_from_mapping
from octetrl.config.rules_shape import spec_problems
from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.layers.tensor_group import ONE_WORKER
from octetrl.models.build_blocks import LayerBuilder
from octetrl.models.families import hf_config, load_spec, spec_from_config
from octetrl.models.hf_weights import save_weights, save_weights_fp8
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from tests.unit.models.tiny_families import (
    ROPE,
    SHAPE,
    assert_transformers_reads_it_as_we_do,
    decoder_of,
    hf_logits,
    packed,
)

QWEN3: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
DOTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
GLM: dict[str, Any] = DOTS | {"attention_bias": True, "routed_scaling_factor": 1.5}
KINDS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "qwen2": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "dots1": (Dots1Config, Dots1ForCausalLM),
    "glm": (Glm4MoeConfig, Glm4MoeForCausalLM),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2": QWEN3 | {"shared_expert_intermediate_size": 96},
    "qwen2 renormalised, without biases": QWEN3
    | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True, "qkv_bias": False},
    "glm": GLM,
    "glm with QK-norm, another share rotated": GLM
    | {"use_qk_norm": True, "attention_bias": False, "partial_rotary_factor": 0.75, "first_k_dense_replace": 0},
    "renormalised": QWEN3 | {"norm_topk_prob": True},
    "not renormalised, a dense layer": QWEN3 | {"mlp_only_layers": [0], "num_experts_per_tok": 8},
    "every second layer": QWEN3 | {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "groups, a dense layer": DOTS | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "a scale": DOTS | {"routed_scaling_factor": 2.5, "n_shared_experts": 1},
}


def theirs(variant: str, **changes: Any) -> PreTrainedModel:
    """A float32 model of transformers with a decided router, and a correction bias that is not zero."""
    torch.manual_seed(0)
    settings = {**SHAPE, **VARIANTS[variant], "rope_parameters": dict(ROPE), "tie_word_embeddings": False, **changes}
    family = next((kind for kind in KINDS if variant.startswith(kind)), None)
    config, model_class = KINDS[family or ("dots1" if "n_routed_experts" in settings else "qwen3")]
    model: PreTrainedModel = model_class(config(**settings))
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("proj.bias", "q_norm.weight", "k_norm.weight", "shared_expert_gate.weight")):
            tensor.data.add_(torch.randn(tensor.shape), alpha=0.3)
        elif name.endswith("mlp.gate.weight"):
            tensor.data.normal_(std=0.3)
        elif name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers_and_exports_load_there(variant: str, tmp_path: Path) -> None:
    model = theirs(variant)
    model.save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs")
    token_ids_T, positions_T, context = packed([12, 30])
    with torch.no_grad():
        theirs_TV = hf_logits(model, token_ids_T, [12, 30])
        ours_TV = ours.logits(ours(token_ids_T, positions_T, context))
        torch.testing.assert_close(ours_TV, theirs_TV, rtol=1e-4, atol=5e-5)
        save_weights(ours, tmp_path / "export", max_shard_bytes=40_000)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
        assert torch.equal(hf_logits(again, token_ids_T, [12, 30]), theirs_TV)
    assert load_spec(tmp_path / "export") == ours.spec
    reread = decoder_of(tmp_path / "export").named_parameters()
    assert all(torch.equal(ours.get_parameter(name), parameter) for name, parameter in reread)


WHOLE = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "num_key_value_heads": 4}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", ["renormalised", "groups, a dense layer"])
def test_block_fp8_goes_out_and_comes_in_as_published(variant: str, tmp_path: Path) -> None:
    """Codes and scales by expert; the router stays as it is and is named as not converted."""
    theirs(variant, **WHOLE).save_pretrained(tmp_path / "theirs")
    ours = decoder_of(tmp_path / "theirs", dtype=torch.bfloat16)
    save_weights_fp8(ours, tmp_path / "fp8", max_shard_bytes=200_000)
    files = [load_file(file) for file in sorted((tmp_path / "fp8").glob("*.safetensors"))]
    stored = {name: tensor for file in files for name, tensor in file.items()}
    expert = "model.layers.1.mlp.experts.5.up_proj.weight"
    assert stored[expert].dtype == torch.float8_e4m3fn and stored[f"{expert}_scale_inv"].shape == (1, 1)
    assert stored["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    assert "model.layers.1.mlp.gate" in config["quantization_config"]["modules_to_not_convert"]
    again = decoder_of(tmp_path / "fp8", dtype=torch.bfloat16)
    for (name, mine), read in zip(ours.named_parameters(), again.parameters(), strict=True):
        assert (mine - read).float().norm() <= 0.04 * mine.float().norm(), name
        assert torch.equal(mine, read) == ("proj" not in name), name
    assert_transformers_reads_it_as_we_do(tmp_path / "fp8", again, tmp_path / "bf16")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        decoder_of(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts; correct the config"),
        ({"scoring_func": "sqrtsoftplus"}, r"routing function 'sqrtsoftplus' \(scoring_func\) is not supported"),
        ({"topk_method": "noaux_tc"}, r"'noaux_tc' \(topk_method\) is not supported for qwen3_moe, only greedy"),
        ({"num_experts": 0}, "'num_experts' is 0, a positive integer is needed"),
        ({"moe_intermediate_size": None}, "'moe_intermediate_size' is null, a positive integer is needed"),
        ({"mlp_only_layers": [0, 1]}, "none of the 2 layers of this qwen3_moe has experts"),
        ({"mlp_only_layers": "all"}, "'mlp_only_layers' is 'all', a list of integers is needed"),
        ({"architectures": ["OlmoeForCausalLM"]}, "unsupported architecture OlmoeForCausalLM; supported are"),
    ],
)
def test_configs_that_cannot_be_run_are_refused(changes: dict[str, Any], words: str) -> None:
    config = preset_config("tiny-moe") | {"num_hidden_layers": 2} | changes
    with pytest.raises(UserError, match=words):
        spec_from_config(config)


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok"])
def test_a_missing_key_is_called_missing(key: str) -> None:
    config = preset_config("tiny-moe")
    del config[key]
    with pytest.raises(UserError, match=f"'{key}' is missing, a positive integer is needed, at most"):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 3}, "8 experts do not divide into n_group 3; correct the config"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3 exceeds n_group 2; correct the config"),
        ({"n_group": 8, "topk_group": 4}, "n_group 8 of 8 experts leaves groups of one"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok 3 exceeds the 2 experts in the 1 kept groups"),
        ({"scoring_func": "softmax"}, "routing function 'softmax'"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "no sliding_window in use"),
    ],
)
def test_groups_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    config = {**SHAPE, **DOTS, "architectures": ["Dots1ForCausalLM"], "sliding_window": None, **changes}
    with pytest.raises(UserError, match=words):
        spec_from_config(config)


def test_experts_that_are_missing_or_doubled_and_other_scales_are_refused(tmp_path: Path) -> None:
    theirs("renormalised", **WHOLE).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expert = "model.layers.0.mlp.experts.7.down_proj.weight"

    def refused(**changes: Tensor | None) -> str:
        changed = {name: value for name, value in (tensors | changes).items() if value is not None}
        save_file(changed, tmp_path / "model.safetensors")
        return refusal(tmp_path)

    assert f"1 missing: {expert}" in refused(**{expert: None})
    doubled = expert.replace(".7.", ".8.")
    assert f"1 extra: {doubled}" in refused(**{doubled: tensors[expert].clone()})
    by_row = {expert: tensors[expert].to(torch.float8_e4m3fn), f"{expert}_scale_inv": torch.ones(128)}
    assert f"1 misshapen: {expert}_scale_inv [128] instead of [1, 1]" in refused(**by_row)
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(8, 256, 128)}
    assert "1 extra: model.layers.0.mlp.experts.gate_up_proj" in refused(**fused)


QWEN3_235B: dict[str, Any] = {
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}


@pytest.mark.parametrize(("changes", "parameters"), [({}, 30_532_122_624), (QWEN3_235B, 235_093_634_560)])
def test_the_published_shapes_are_their_configs_again(changes: dict[str, Any], parameters: int) -> None:
    spec = spec_from_config(preset_config("qwen3-30b-a3b") | changes)
    assert spec.num_parameters == parameters
    assert spec_from_config(hf_config(spec)) == spec


def test_float32_on_a_gpu_and_adapters_on_experts_alone_are_refused() -> None:
    spec = spec_from_config(preset_config("tiny-moe"))
    with pytest.raises(UserError, match=r"runs on a GPU in bfloat16, and its FP8 is not emulated"):
        LayerBuilder(
            spec,
            precision_policy(spec, Fp8Config()),
            "train",
            torch.float32,
            "cuda",
            "scaled_mm",
            None,
            ONE_WORKER,
            fp8_weights=True,
        )
    lora = {"targets": ["gate_proj", "down_proj"]}
    recipe = recipe_from_mapping({"model": {"path": "m", "lora": lora}, "environment": {"dataset": "d"}})
    problems = [problem.text for problem in spec_problems(recipe, spec) if "lora" in problem.text]
    assert len(problems) == 1 and "exist only in experts" in problems[0]
