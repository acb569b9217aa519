"""A shape of each family: tiny ones for a CPU, and two layers of the published width for a GPU, so that the kernels and
the tuned GEMMs of that very shape run. What tells the families apart for parity: Qwen2.5 has a bias, whose rounding has
a place in the order, and K in BF16 beside a V in FP8; Qwen3 has QK-norm; Llama has neither, and scales its frequencies.
"""

from __future__ import annotations

from dataclasses import replace

from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from octetrl.shapes.rope import Llama3Scaling
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
