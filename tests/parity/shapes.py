"""A shape of each family: tiny ones for a CPU, and two layers of the published width for a GPU, so that the kernels and
the tuned GEMMs of that very shape run. What tells the families apart for parity: Qwen2.5 has a bias, whose rounding has
a place in the order, and K in BF16 beside a V in FP8; Qwen3 has QK-norm; Llama has neither, and scales its frequencies.

Mixtures: `softmax` is Qwen3-MoE's routing. `sigmoid` is DeepSeek-V3's, with a correction bias, groups, a scale, a
shared expert and a dense first layer. `gated` is Qwen2-MoE's, whose shared expert has a gate, in a model that rotates
half of each head, as GLM-4.5 does. Experts' sizes are no multiples of 128, so FP8 blocks are ragged. So are those of
`gpt-oss`, which has sinks, biases of router and experts, and a window in every second layer.

Latent attention: `direct` has queries of one projection, as Moonlight; `low_rank` has latents of queries too, YaRN, and
a latent size that is no power of two. `fp8_full` means scales of tokens here: nothing of a latent is calibrated.

Linear attention: `delta` is Qwen3.5's, `grouped delta` Qwen3-Next's, with a mixture; each with a layer of attention.
"""

from __future__ import annotations

from dataclasses import replace

from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.gated_attention.layout import GatedAttentionLayout
from octetrl.models.blocks.gated_delta.layout import GatedDeltaLayout
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import GatedMixtureLayout, GptOssMixtureLayout, MixtureLayout, Routing
from octetrl.models.families import DENSE, spec_from_config
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.delta_rule import DeltaShape
from octetrl.shapes.presets import preset_config
from octetrl.shapes.rope import LinearScaling, Llama3Scaling, YarnScaling
from octetrl.shapes.spec import ModelSpec
from tests.tiny_spec import TINY_SPEC

CONTEXT = 8192
_LLAMA_ROPE = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)
_TINY = replace(TINY_SPEC, vocab_size=90, max_positions=320)
TINY = {
    "llama": replace(_TINY, family="llama", qk_norm=False, tied_embeddings=False, rope_scaling=_LLAMA_ROPE),
    "qwen2.5": replace(_TINY, family="qwen2", qk_norm=False, qkv_bias=True, num_kv_heads=1),
    "qwen3": _TINY,
}

SIGMOID = Routing(8, 3, "sigmoid", True, corrected=True, num_groups=4, kept_groups=2, scale=2.5)
MIXTURE = MixtureLayout(SIGMOID, 48, 96)
MIXTURES: dict[str, ModelSpec] = {
    name: replace(_TINY, blocks=blocks)
    for name, blocks in {
        "softmax": (LayerBlocks(AttentionLayout(), MixtureLayout(Routing(6, 2, "softmax", True), 48)),),
        "sigmoid": (*DENSE, LayerBlocks(AttentionLayout(), MIXTURE)),
        "gated": (
            LayerBlocks(AttentionLayout(rotated=8), GatedMixtureLayout(Routing(6, 2, "softmax", False), 48, 80)),
        ),
    }.items()
}
WIDE = replace(_TINY, qk_norm=False, num_kv_heads=4, head_size=32)
DIRECT, LOW_RANK = LatentAttentionLayout(32, 0, 24, 8, 16), LatentAttentionLayout(48, 40, 16, 16, 24)
LATENT: dict[str, ModelSpec] = {
    "direct": replace(WIDE, blocks=(LayerBlocks(DIRECT, MLPLayout()), LayerBlocks(DIRECT, MIXTURE))),
    "low_rank": replace(
        WIDE,
        blocks=(LayerBlocks(LOW_RANK, MIXTURE),),
        rope_scaling=YarnScaling(4.0, 32, beta_fast=4.0, mscale=1.0, mscale_all_dim=0.707),
    ),
}


DELTA_SHAPE = DeltaShape(2, 4, 16, 16)
DELTA: dict[str, ModelSpec] = {
    name: replace(
        _TINY,
        num_layers=2,
        offset_norms=True,
        blocks=(
            LayerBlocks(GatedDeltaLayout(DELTA_SHAPE, grouped), mlp),
            LayerBlocks(GatedAttentionLayout(rotated=8), mlp),
        ),
    )
    for name, grouped, mlp in (
        ("delta", False, MLPLayout()),
        ("grouped delta", True, GatedMixtureLayout(Routing(6, 2, "softmax", True), 48, 80)),
    )
}


def layer(window: int | None) -> LayerBlocks:
    return LayerBlocks(AttentionLayout(window), MLPLayout())


_ODD = replace(TINY["llama"], hidden_size=144, intermediate_size=176, num_kv_heads=2)
SINKS = tuple(
    LayerBlocks(AttentionLayout(window, sinks=True), GptOssMixtureLayout(Routing(6, 2, "softmax", True), 48))
    for window in (40, None)
)
UNUSUAL: dict[str, ModelSpec] = {
    "gpt-oss": replace(TINY["qwen2.5"], family="gpt_oss", num_kv_heads=2, o_bias=True, blocks=SINKS),
    "heads of 80, YaRN, biases": replace(
        _ODD, head_size=80, rope_scaling=YarnScaling(4.0, 80, mscale=1.0), qkv_bias=True, o_bias=True
    ),
    "heads of 96, a window": replace(_ODD, head_size=96, blocks=(layer(40),), rope_scaling=LinearScaling(2.0)),
    "heads of 192, windows by layer": replace(_TINY, head_size=192, blocks=(layer(130), layer(None))),
}
MODELS = TINY | MIXTURES | LATENT | DELTA | UNUSUAL


def _full(config: dict[str, object]) -> ModelSpec:
    changes = {"num_hidden_layers": 2, "tie_word_embeddings": True, "eos_token_id": None}
    return replace(spec_from_config(config | changes), max_positions=CONTEXT)


FULL = {
    "llama": _full(preset_config("llama-3.1-8b")),
    "qwen2.5": _full(  # Qwen/Qwen2.5-7B
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000,
        }
    ),
    "qwen3": _full(preset_config("qwen3-8b")),
}
