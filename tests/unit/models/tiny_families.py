"""Small random models of each family, ours and transformers', for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import LoraConfig
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.shapes.spec import ModelSpec

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = ROPE | {"rope_type": "linear", "factor": 2.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = YARN | {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.707}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
QWEN2_MOE = EXPERTS | {"model_type": "qwen2_moe"}
QWEN3_MOE = EXPERTS | {"model_type": "qwen3_moe"}
DOTS = ROUTED | {"model_type": "dots1", "norm_topk_prob": True}
GLM = ROUTED | {"model_type": "glm4_moe", "norm_topk_prob": True, "routed_scaling_factor": 1.5}
LATENT = ROUTED | {
    "head_dim": None,
    "num_key_value_heads": 4,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
DEEPSEEK = LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": ROPE | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
}
FAMILIES = ("llama", "llama-tied", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied")
DENSE: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2", "head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen3": {"model_type": "qwen3"},
}
VARIANTS: dict[str, dict[str, Any]] = {  # a `head_dim` of None is left out
    "llama, biases, YaRN, heads of 80": {
        "model_type": "llama", "hidden_size": 144, "head_dim": 80, "attention_bias": True, "rope_parameters": YARN,
    },
    "mistral, a window, linear RoPE": {
        "model_type": "mistral", "hidden_size": 80, "head_dim": 16, "sliding_window": 9, "rope_parameters": LINEAR,
    },
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "phi3, a window, heads of 96": {
        "model_type": "phi3", "hidden_size": 384, "head_dim": None, "sliding_window": 11, "pad_token_id": None,
    },
    "qwen2, windows from a layer on": {
        "model_type": "qwen2", "head_dim": None, "use_sliding_window": True, "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3, windows by layer, biases, heads of 192": {
        "model_type": "qwen3", "head_dim": 192, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral, a window": {
        "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
        "intermediate_size": 48,
    },
    "qwen2_moe": QWEN2_MOE | {"shared_expert_intermediate_size": 96},
    "qwen2_moe renormalised, without biases": QWEN2_MOE
    | {"shared_expert_intermediate_size": 40, "norm_topk_prob": True, "qkv_bias": False},
    "qwen3_moe renormalised": QWEN3_MOE | {"norm_topk_prob": True},
    "qwen3_moe, all experts, a dense layer": QWEN3_MOE | {"mlp_only_layers": [0], "num_experts_per_tok": 8},
    "qwen3_moe, every second layer, a window, biases": QWEN3_MOE
    | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6, "attention_bias": True},
    "dots1, groups, a dense layer": DOTS | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "dots1, a scale": DOTS | {"routed_scaling_factor": 2.5, "n_shared_experts": 1},
    "glm4_moe": GLM | {"attention_bias": True},
    "glm4_moe with QK-norm, another share rotated": GLM
    | {"use_qk_norm": True, "partial_rotary_factor": 0.75, "first_k_dense_replace": 0},
    "deepseek_v3, Moonlight's": DEEPSEEK | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446},
    "deepseek_v3, latents of queries": DEEPSEEK | {"q_lora_rank": 40, "routed_scaling_factor": 2.5},
    "deepseek_v3, YaRN": DEEPSEEK | {"q_lora_rank": 40, "rope_parameters": DEEPSEEK_YARN},
    "deepseek_v3, halves, wide values": DEEPSEEK | {"rope_interleave": False, "v_head_dim": 40, "kv_lora_rank": 48},
    "gpt_oss": {
        "model_type": "gpt_oss", "num_hidden_layers": 3, "intermediate_size": 48, "num_local_experts": 6,
        "num_experts_per_tok": 2, "sliding_window": 16, "pad_token_id": None,
        "rope_parameters": YARN | {"factor": 32.0, "truncate": False, "rope_theta": 150_000.0},
    },
    "glm4_moe_lite": LATENT
    | {
        "model_type": "glm4_moe_lite", "rms_norm_eps": 1e-3, "q_lora_rank": 40, "v_head_dim": 32,
        "mlp_layer_types": ["sparse", "dense"],
    },
    "qwen3_5_text": DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": DELTA | EXPERTS | {
        "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 40, "linear_num_value_heads": 2,
    },
    "qwen3_next, a dense layer": DELTA | EXPERTS | {
        "model_type": "qwen3_next", "shared_expert_intermediate_size": 40, "mlp_only_layers": [0],
    },
}  # fmt: skip


def hf_model(name: str, **changes: Any) -> PreTrainedModel:
    """A float32 model of transformers: one of VARIANTS, or of DENSE, where `-tied` shares embedding and head. Norms,
    biases, routers and correction biases are random too, so that a forgotten one shows."""
    torch.manual_seed(0)
    given = VARIANTS[name] if name in VARIANTS else DENSE[name.removesuffix("-tied")]
    settings = {**SHAPE, "rope_parameters": ROPE, "tie_word_embeddings": name.endswith("-tied"), **given, **changes}
    settings["rope_parameters"] = dict(settings["rope_parameters"])
    kept = {key: value for key, value in settings.items() if value is not None or key != "head_dim"}
    config = CONFIG_MAPPING[kept.pop("model_type")](**kept)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.1)
            elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                tensor.normal_(std=0.3)
            elif name.endswith("_proj_bias"):
                tensor.normal_(std=4.0)  # some values are clamped
            elif name.endswith("A_log"):
                tensor.uniform_(-4.0, -1.0)
            elif isinstance(tensor, torch.nn.Parameter) and (tensor.dim() == 1 or "shared_expert_gate" in name):
                tensor.add_(0.3 * torch.randn(tensor.shape))
    return model.eval()


def decoder_of(folder: Path, fp8: Fp8Config | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our decoder with the weights of a Hugging Face folder."""
    spec = load_spec(folder)
    model = Decoder(spec, precision_policy(spec, fp8 or Fp8Config()), "train", dtype=dtype)
    load_weights(model, folder)
    return model


def made(
    spec: ModelSpec,
    fp8: Fp8Config | None = None,
    lora: LoraConfig | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    b_std: float = 0.3,
    **options: Any,
) -> Decoder:
    """Our decoder with random weights, and adapters that add something, frozen as the worker freezes them."""
    model = Decoder(spec, precision_policy(spec, fp8 or Fp8Config()), "train", dtype=dtype, lora=lora, **options)
    model.random_init(0)
    if lora is not None:
        model.draw_adapters(1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _, adapter in model.adapters():
                adapter.b.copy_(torch.randn(adapter.b.shape, generator=generator) * b_std)
        model.train_adapters_alone()
    return model


def packed(lengths: list[int], vocab_size: int = SHAPE["vocab_size"]) -> tuple[Tensor, Tensor, PackedContext]:
    """Random tokens, positions and context of sequences of these lengths, end to end."""
    token_ids_T = torch.randint(vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens_B1 = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return token_ids_T, positions_T, PackedContext(cu_seqlens_B1, max(lengths))


def hf_logits(model: PreTrainedModel, token_ids_T: Tensor, lengths: list[int]) -> Tensor:
    """transformers' logits of each sequence run by itself, end to end."""
    return torch.cat([model(input_ids=ids[None]).logits[0] for ids in token_ids_T.split(lengths)])


def assert_transformers_reads_it_as_we_do(folder: Path, ours: Decoder, scratch: Path) -> None:
    """`folder` is a block-FP8 export and `ours` what we read from it; `scratch` gets its weights in BF16."""
    save_weights(ours, scratch)
    fp8, bf16 = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (folder, scratch))
    wanted = bf16.state_dict()
    for name, value in fp8.state_dict().items():
        assert torch.equal(value, wanted[name]), name
