"""The families of models that the decoder runs, one record each: what a config.json may have, and what it leaves out.

A family is a `model_type` of transformers. All families are one decoder with other settings:

    llama                   Llama 3.x, SmolLM2
    mistral, phi3           with sliding windows; Phi-3's files have fused q, k, v and fused gate and up
    qwen2, qwen3            Qwen2, Qwen2.5: biases of q, k and v. Qwen3: QK-norm
    qwen3_vl_text           Qwen3 in a model that also reads images
    mixtral, qwen2_moe, qwen3_moe       a mixture of experts by a softmax over all experts
    dots1, glm4_moe (GLM-4.5)           a mixture with DeepSeek-V3's routing
    qwen3_next, qwen3_5_text (Qwen3.5, 3.6, 3.8), qwen3_5_moe_text      linear attention by the gated delta rule
    deepseek_v3 (and Moonlight), glm4_moe_lite (GLM-4.7-Flash)       the same, and latent attention
    gpt_oss                 sinks, windows in every second layer, biases and another activation in the experts

No torch, so that `octetrl check` starts fast.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

from octetrl.models.blocks.moe.layout import (
    GatedMixtureLayout,
    GptOssMixtureLayout,
    MixtralLayout,
    MixtureLayout,
    StackedMixtureLayout,
)

CAUSAL, SCALAR = "ForCausalLM", "ForSequenceClassification"  # what an architecture's name ends with


class Flag(NamedTuple):
    """A key of config.json that is true or false, and its value if it is missing."""

    key: str
    default: bool


class Delta(NamedTuple):
    """Linear attention in some layers (delta_config.py)."""

    grouped: bool = False  # files have one projection for q, k, v and z, with rows grouped by key head, one for b and a


class Windows(NamedTuple):
    """Which layers have a sliding window (attention_config.py)."""

    full_layers: int | None = None  # default of `max_window_layers`, the full ones; None: every layer has the window
    needs_switch: bool = False  # windows are off without `use_sliding_window`
    default: int | None = 4_096  # default of `sliding_window`
    alternate: bool = False  # without `layer_types`, layers 0, 2, ... have the window

    @property
    def by_layer(self) -> bool:
        """Whether some layers may have it and others not."""
        return self.alternate or self.full_layers is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How the keys of a mixture are named, and their defaults (mixture_config.py)."""

    count_key: str = "num_experts"
    size_key: str = "moe_intermediate_size"
    layout: type[MixtureLayout] = MixtureLayout
    renormalises: bool = False  # default of `norm_topk_prob`
    everywhere: bool = False  # no layer is dense, and the weights always sum to 1; there are no such keys
    is_mixtral: bool = False  # always renormalises, has no noise, and no further keys; so has gpt-oss
    dense_by_step: bool = False  # dense layers are those of `mlp_only_layers` and `decoder_sparse_step`
    shared_size: int | None = None  # default of `shared_expert_intermediate_size`; None: there is no such key

    # DeepSeek-V3's routing: sigmoid, chosen from groups with a correction bias. Otherwise softmax over all experts.
    corrected: bool = False
    groups: tuple[int, int] = (1, 1)  # defaults of `n_group` and `topk_group`
    scale: float = 1.0  # default of `routed_scaling_factor`
    shared: int = 0  # default of `n_shared_experts`
    first_dense: int = 0  # default of `first_k_dense_replace`
    mxfp4: bool = False  # a checkpoint may hold the experts in MXFP4
    lists_layers: bool = False  # `mlp_layer_types` may say which layers are dense


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults are those of transformers for a key that is missing."""

    name: str  # `model_type` in config.json
    _: KW_ONLY
    max_positions: int
    kv_heads: int | None = None  # None: one for each head, which null also means
    head_size: int | None = None  # None: hidden_size / num_attention_heads
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope: tuple[tuple[str, object], ...] = ()  # parameters of RoPE, if a config.json has none
    scales_rope: bool = True
    rotated_share: float | None = 1.0  # default of `partial_rotary_factor`; 1: no other is allowed; None: not read
    qk_norm: bool | Flag = False
    qkv_bias: bool | Flag = False
    takes_bias: bool = False  # `attention_bias` may add a bias to q, k and v
    takes_o_bias: bool = True  # and then to o
    has_bias: bool = False  # default of `attention_bias`
    sinks: bool = False
    pad_token_id: int | None = None
    fused_files: bool = False
    windows: Windows | None = None
    query_latent: int | None = None  # default of `q_lora_rank`; None: no latent attention
    experts: Experts | None = None
    delta: Delta | None = None  # some layers have linear attention, the others a gate; norms have offsets
    class_name: str | None = None  # what its architectures begin with; None: `name` in capitals
    outer: str | None = None  # `model_type` of a config.json that has the model as `text_config` (text_part.py)

    @property
    def architecture(self) -> str:
        """With lm_head: qwen3_moe -> Qwen3MoeForCausalLM."""
        return (self.class_name or "".join(part.capitalize() for part in self.name.split("_"))) + CAUSAL

    @property
    def has_latents(self) -> bool:
        return self.query_latent is not None


_QWEN_EXPERTS = Experts(dense_by_step=True)
_DEEPSEEK_EXPERTS = Experts(
    count_key="n_routed_experts", corrected=True, renormalises=True, groups=(8, 4), scale=2.5, shared=1, first_dense=3
)
_GLM_EXPERTS = replace(_DEEPSEEK_EXPERTS, groups=(1, 1), scale=1.0, first_dense=1)

_QWEN3_NEXT = Family("qwen3_next", max_positions=32_768, kv_heads=2, head_size=256, rotated_share=0.25, qk_norm=True)

_FAMILIES = (
    Family("llama", max_positions=2_048, takes_bias=True),
    Family("mistral", max_positions=131_072, kv_heads=8, windows=Windows()),
    Family(
        "mixtral",
        max_positions=131_072,
        kv_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        windows=Windows(default=None),
        experts=Experts(
            count_key="num_local_experts", size_key="intermediate_size", layout=MixtralLayout, is_mixtral=True
        ),
    ),
    Family(
        "phi3",
        max_positions=4_096,
        rms_norm_eps=1e-5,
        scales_rope=False,
        pad_token_id=32_000,
        fused_files=True,
        windows=Windows(default=None),
    ),
    Family(
        "qwen2", max_positions=32_768, kv_heads=32, qkv_bias=True, windows=Windows(full_layers=28, needs_switch=True)
    ),
    Family(
        "qwen3",
        max_positions=32_768,
        kv_heads=32,
        head_size=128,
        qk_norm=True,
        takes_bias=True,
        windows=Windows(full_layers=28, needs_switch=True),
    ),
    Family(
        "qwen3_vl_text",
        max_positions=128_000,
        kv_heads=32,
        head_size=128,
        rope_theta=500_000.0,
        qk_norm=True,
        takes_bias=True,
        class_name="Qwen3VL",
        outer="qwen3_vl",
    ),
    Family(
        "qwen2_moe",
        max_positions=32_768,
        kv_heads=16,
        qkv_bias=Flag("qkv_bias", True),
        experts=replace(_QWEN_EXPERTS, layout=GatedMixtureLayout, shared_size=5_632),
    ),
    Family(
        "qwen3_moe",
        max_positions=32_768,
        kv_heads=4,
        qk_norm=True,
        takes_bias=True,
        windows=Windows(needs_switch=True),
        experts=_QWEN_EXPERTS,
    ),
    Family(
        "dots1",
        max_positions=2_048,
        kv_heads=32,
        qk_norm=True,
        takes_bias=True,
        windows=Windows(full_layers=62),
        experts=replace(_GLM_EXPERTS, renormalises=False, shared=0, first_dense=0),
    ),
    Family(
        "glm4_moe",
        max_positions=131_072,
        kv_heads=8,
        rms_norm_eps=1e-5,
        rotated_share=0.5,
        qk_norm=Flag("use_qk_norm", False),
        takes_bias=True,
        takes_o_bias=False,
        experts=_GLM_EXPERTS,
    ),
    Family(
        "gpt_oss",
        max_positions=131_072,
        kv_heads=8,
        head_size=64,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        rope=(
            ("rope_type", "yarn"),
            ("factor", 32.0),
            ("truncate", False),
            ("original_max_position_embeddings", 4_096),
        ),
        takes_bias=True,
        has_bias=True,
        sinks=True,
        windows=Windows(default=128, alternate=True),
        experts=Experts(
            count_key="num_local_experts",
            size_key="intermediate_size",
            layout=GptOssMixtureLayout,
            is_mixtral=True,
            mxfp4=True,
        ),
    ),
    Family("deepseek_v3", max_positions=4_096, rotated_share=None, query_latent=1_536, experts=_DEEPSEEK_EXPERTS),
    Family(
        "glm4_moe_lite",
        max_positions=202_752,
        rms_norm_eps=1e-5,
        query_latent=768,
        experts=replace(_GLM_EXPERTS, scale=1.8, lists_layers=True),
    ),
    replace(
        _QWEN3_NEXT,
        experts=replace(_QWEN_EXPERTS, layout=GatedMixtureLayout, shared_size=512, renormalises=True),
        delta=Delta(grouped=True),
    ),
    replace(_QWEN3_NEXT, name="qwen3_5_text", kv_heads=4, delta=Delta(), class_name="Qwen3_5", outer="qwen3_5"),
    replace(
        _QWEN3_NEXT,
        name="qwen3_5_moe_text",
        experts=Experts(layout=StackedMixtureLayout, shared_size=512, everywhere=True),
        delta=Delta(),
        class_name="Qwen3_5Moe",
        outer="qwen3_5_moe",
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}
