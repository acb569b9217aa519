"""On a Hopper GPU: head sizes that are padded, sliding windows, YaRN and biases, with equal bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from octetrl.kernels.attention import attention_packed as packed
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.records import Replay
from octetrl.shapes.blocks import KVMode
from octetrl.shapes.rope import YarnScaling
from octetrl.shapes.spec import ModelSpec
from tests.parity.shapes import TINY, layer
from tests.parity.sides import Pages, Sides, random_chunks, random_sequences, random_tokens
from tests.unit.kernels.attention_cases import PagedCache, cu_seqlens_of, random_qkv, replay_of

pytestmark = pytest.mark.gpu

LENGTHS = [2500, 1, 127, 1025]
WIDE = replace(
    TINY["llama"], hidden_size=576, intermediate_size=1536, num_heads=8, num_kv_heads=2, max_positions=4096,
    vocab_size=4096,
)  # fmt: skip
SPECS: dict[str, ModelSpec] = {
    "80, YaRN, biases": replace(WIDE, head_size=80, rope_scaling=YarnScaling(4.0, 1024), qkv_bias=True, o_bias=True),
    "96, a window": replace(WIDE, head_size=96, hidden_size=2880, intermediate_size=4000, blocks=(layer(1100),)),
    "192, windows by layer": replace(
        WIDE, family="qwen3", qk_norm=True, head_size=192, blocks=(layer(130), layer(None))
    ),
}


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
@pytest.mark.parametrize("shape", SPECS)
def test_training_is_prefill_is_decode(shape: str, precision: str) -> None:
    spec, draw = SPECS[shape], random.Random(1)
    sides = Sides(spec, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), spec, 1000)])
    sequences = random_sequences(draw, spec, LENGTHS)
    expected = sides.packed(sequences)
    chunks = list(random_chunks(draw, LENGTHS, (1, 16, 100, 777)))
    for ours, theirs in zip(Pages(sides, sequences, 64).filled(chunks), expected, strict=True):
        assert torch.equal(ours, theirs)
    pages = Pages(sides, sequences, 128)
    pages.filled([[(index, 0, length) for index, length in enumerate(LENGTHS)]])
    last = [(index, length - 1, length) for index, length in enumerate(LENGTHS)]
    for (index, at, _), ours in zip(last, pages.forward(last), strict=True):
        assert torch.equal(ours[0], expected[index][at])
    assert torch.equal(pages.forward(last[:1])[0][0], expected[0][-1]), "keys that are split"


@pytest.mark.parametrize("kv_mode", ["none", "calibrated"])
@pytest.mark.parametrize(
    ("head_size", "window"), [(80, None), (96, 700), (192, 1500), (128, 1), (128, 1024), (64, 2000)]
)
def test_attention_has_equal_bits_and_right_gradients(head_size: int, window: int | None, kv_mode: KVMode) -> None:
    q, k, v = random_qkv(LENGTHS, 2, 4, head_size, torch.bfloat16, device="cuda")
    cu_seqlens, scale = cu_seqlens_of(LENGTHS, "cuda"), head_size**-0.5
    out, _ = packed.attention_packed_forward(q, k, v, cu_seqlens, 2500, scale, replay_of(k, v, kv_mode), window)
    cache = PagedCache.filled(LENGTHS, k, v, kv_mode)
    contexts = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    pages = (cache.k, cache.v, cache.block_table)
    prefilled = attention_paged(q, *pages, cu_seqlens, contexts, scale, window=window)
    assert isinstance(prefilled, torch.Tensor) and torch.equal(prefilled, out)
    last = (cu_seqlens[1:] - 1).long()
    decoded = attention_paged(
        q[last], *pages, cu_seqlens_of([1] * 4, "cuda"), contexts, scale, max_query_len=1, window=window
    )
    assert isinstance(decoded, torch.Tensor) and torch.equal(decoded, out[last])
    short = cu_seqlens_of([300], "cuda")
    kv = packed.kv_replay(q[:300, :2], v[:300], Replay())
    saved_out, lse2 = packed.attention_packed_forward_triton(q[:300], kv, short, 300, scale, window)
    arguments = (torch.randn_like(saved_out), q[:300], kv, saved_out, lse2, short, 300, scale, window)
    on_cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments]
    on_cpu[2] = packed.ReplayedKV(kv.k_TKD.cpu(), kv.v_TKD.cpu(), None, None)
    exact = packed.attention_packed_backward_reference(*on_cpu)  # type: ignore[arg-type]
    noise = 1e-4 * arguments[0].float().norm().cpu()  # all there is in dQ and dK where a window holds one key
    for ours, theirs in zip(packed.attention_packed_backward(*arguments), exact, strict=True):
        assert (ours.cpu().float() - theirs.float()).norm() < 0.02 * (theirs.float().norm() + noise)
