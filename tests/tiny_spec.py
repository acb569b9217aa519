"""The shape of the smallest model of the tests: two layers as Qwen3 has them."""

from __future__ import annotations

from octetrl.models.families import DENSE
from octetrl.shapes.spec import ModelSpec

TINY_SPEC = ModelSpec(
    family="qwen3",
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    vocab_size=50,
    max_positions=160,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    qkv_bias=False,
    qk_norm=True,
    tied_embeddings=True,
    blocks=DENSE,
)
