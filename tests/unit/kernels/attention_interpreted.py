"""Runs the attention kernels in Triton's interpreter, on CPU tensors, and prints their distance from the references,
and what differs between draft rows that share a program and the same rows alone (drafts_interpreted.py).

Started by test_attention_triton.py in a process of its own, because constants of these kernels are changed for good.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from octetrl.fp8.quantize import quantize_activation_reference
from octetrl.kernels.attention import (
    attention_decode,
    attention_packed,
    attention_packed_backward,
    attention_paged,
    attention_reference,
    attention_rows,
    decode_layout,
    kv_store,
)
from octetrl.kernels.attention.attention_packed_backward import BackwardTiles, Tile, padded_backward_triton
from octetrl.kernels.attention.records import Replay
from octetrl.shapes.blocks import KVMode, KVTensors
from tests.unit.kernels.attention_cases import PagedCache, cu_seqlens_of, random_qkv, replay_of, scales_of
from tests.unit.kernels.drafts_interpreted import compare_all, distance
from tests.unit.kernels.interpreting import mend_interpreter

LENGTHS = [3, 130]
STORED = 30  # tokens that the Triton store and replay are given: the interpreter takes its time over each
SCALE = 0.2


def compare(
    kv_mode: KVMode,
    quantized: KVTensors,
    head_size: int,
    page_size: int,
    group: int,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> dict[str, float]:
    q, k, v = random_qkv(LENGTHS, 2, group, head_size, torch.bfloat16)
    cu_seqlens = cu_seqlens_of(LENGTHS)
    longest = max(LENGTHS)
    contexts = torch.tensor(LENGTHS, dtype=torch.int32)
    head_scales = scales_of(k, v, kv_mode)
    cache = (LENGTHS, 2, head_size, page_size, kv_mode, torch.bfloat16, *head_scales)
    want, got = (PagedCache(*cache, quantized=quantized) for _ in range(2))
    counts, counts_triton = (torch.zeros(2, 2, dtype=torch.int64) for _ in range(2))
    slots = want.slots(LENGTHS)
    slots[[1, -2]] = -1
    head, tail = slice(None, -STORED), slice(-STORED, None)
    for cache, count in ((want, counts), (got, counts_triton)):
        kv_store.kv_store_reference(k[head], v[head], cache.k, cache.v, slots[head], count)
    kv_store.kv_store_reference(k[tail], v[tail], want.k, want.v, slots[tail], counts)
    kv_store.kv_store_triton(k[tail], v[tail], got.k, got.v, slots[tail], counts_triton)
    by_token = torch.zeros(STORED, 2, 2, dtype=torch.int64)
    kv_store.kv_store_triton(k[tail], v[tail], got.k, got.v, slots[tail], by_token)
    in_tail = torch.zeros(2, 2, dtype=torch.int64)
    kv_store.kv_store_reference(k[tail], v[tail], want.k, want.v, slots[tail], in_tail)
    errors = {
        "store": max(distance(got.k.pages, want.k.pages), distance(got.v.pages, want.v.pages)),
        "saturated": float((counts - counts_triton).abs().sum() + (in_tail - by_token.sum(0)).abs().sum()),
    }
    for ours, theirs in ((got.k, want.k), (got.v, want.v)):
        if ours.token_scale is not None and theirs.token_scale is not None:
            errors["token_scale"] = max(errors.get("token_scale", 0.0), distance(ours.token_scale, theirs.token_scale))

    paged = (want.k, want.v, want.block_table)
    how: dict[str, Any] = {"window": window, "sinks_H": sinks_H}
    out = attention_paged.attention_paged_reference(q, *paged, cu_seqlens, contexts, SCALE, **how)
    rows = attention_paged.attention_paged_triton(q, *paged, cu_seqlens, contexts, SCALE, **how)
    errors["prefill"] = distance(rows, out)
    last = (cu_seqlens[1:] - 1).long()
    each = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    decoded = attention_paged.attention_paged_triton(q[last], *paged, each, contexts, SCALE, 1, **how)
    errors["decode"] = distance(decoded, out[last])

    replay = Replay(kv_mode, *head_scales, quantized)
    kv = kv_store.kv_replay(k, v, replay)
    if kv_mode != "none":
        replayed = kv_store.kv_replay_triton(k[tail], v[tail], replay)
        errors["replay"] = max(distance(replayed.k_TKD, kv.k_TKD[tail]), distance(replayed.v_TKD, kv.v_TKD[tail]))
    shape = (longest, SCALE, window)
    out, lse2 = attention_packed.attention_packed_forward_reference(q, kv, cu_seqlens, *shape, sinks_H)
    out_triton, lse2_triton = attention_packed.attention_packed_forward_triton(q, kv, cu_seqlens, *shape, sinks_H)
    errors["packed"] = distance(out_triton, out)
    errors["lse2"] = float((lse2_triton - lse2).abs().max())
    if kv_mode not in ("none", "int8") and head_size != 80 and quantized != "k":  # a backward for each kind of scales
        return errors
    return errors | backward_errors(q, kv, out, lse2, cu_seqlens, *shape)


def backward_errors(q: Tensor, kv: kv_store.ReplayedKV, out: Tensor, *saved: Any) -> dict[str, float]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    gradients = attention_packed.attention_packed_backward_reference(dout, q, kv, out, *saved)
    gradients_triton = padded_backward_triton(dout, q, kv, out, *saved)
    names = ("dq", "dk", "dv")
    return {name: distance(g, w) for name, g, w in zip(names, gradients_triton, gradients, strict=True)}


def compare_decode(
    kv_mode: str,
    quantized: KVTensors,
    head_size: int,
    page_size: int,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> dict[str, float]:
    """Decode of ragged contexts, one of them a padding sequence, and its quantised output."""
    lengths, contexts = [300, 7, 128], torch.tensor([300, 7, 128, 0], dtype=torch.int32)
    q, k, v = random_qkv(lengths, 2, 3, head_size, torch.bfloat16)
    cache = PagedCache.filled(lengths, k, v, kv_mode, quantized, page_size)
    table = torch.cat([cache.block_table, torch.full_like(cache.block_table[:1], -1)])
    arguments = (q[[299, 306, 434, 0]], cache.k, cache.v, table, torch.arange(5, dtype=torch.int32), contexts, SCALE)
    how: dict[str, Any] = {"window": window, "sinks_H": sinks_H}
    out = attention_paged.attention_paged_triton(*arguments, 1, **how)
    want = attention_paged.attention_paged_reference(*arguments, **how)
    tables = (arguments[0], cache.k, cache.v, table, contexts, SCALE)
    whole = attention_decode.attention_decode_triton(*tables, split=None, **how)
    errors = {"decode": distance(out, want), "padding": float(out[3].abs().max()), "split": distance(out, whole)}
    if head_size == 128:
        for power_of_two in (False, True):
            got = attention_paged.attention_paged_triton(*arguments, 1, True, power_of_two)
            codes, scale = quantize_activation_reference(out.flatten(1), power_of_two)
            errors["out_scale"] = max(errors.get("out_scale", 0.0), distance(got.scale, scale))
            errors["out_codes"] = max(errors.get("out_codes", 0.0), distance(got.codes, codes))
    return errors


def compare_packs(
    lengths: list[int],
    rest: int,
    kv_mode: KVMode,
    quantized: KVTensors,
    head_size: int,
    dq: tuple[int, int],
    dkdv: tuple[int, int],
) -> dict[str, float]:
    """The backward of a pack with `rest` rows past its last sequence; `dq`, `dkdv`: queries and keys of their tiles.

    Whatever the rows past the last sequence hold must stay there, so they are NaN here.
    """
    heads = 1 if len(lengths) > 20 else 2  # of keys, and queries to each
    q, k, v = random_qkv([*lengths, rest], heads, heads, head_size, torch.bfloat16)
    kv = kv_store.kv_replay(k, v, replay_of(k, v, kv_mode, quantized))
    shape = (cu_seqlens_of(lengths), max(lengths), SCALE)
    out, lse2 = attention_packed.attention_packed_forward_reference(q, kv, *shape)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    in_float32 = {"kv_dtype": torch.float32}  # as workers that share a head need dK and dV
    wants = attention_packed.attention_packed_backward_reference(dout, q, kv, out, lse2, *shape, **in_float32)
    used = sum(lengths)
    q, k, v, dout = (x.clone() for x in (q, kv.k_TKD, kv.v_TKD, dout))
    for x in (q, k, v, dout, out, lse2):
        x[used:] = float("nan")
    tiles = BackwardTiles(Tile(*dq, 4, 1), Tile(*dkdv, 4, 1))
    kv = kv._replace(k_TKD=k, v_TKD=v)
    backward = attention_packed_backward.attention_packed_backward_triton
    got = backward(dout, q, kv, out, lse2, *shape, tiles=tiles, **in_float32)
    assert [one.dtype for one in got] == [torch.bfloat16, torch.float32, torch.float32]
    errors = {name: distance(g[:used], w[:used]) for name, g, w in zip(("dq", "dk", "dv"), got, wants, strict=True)}
    return errors | {"past": float(sum(g[used:].count_nonzero() for g in got))}


CASES: dict[str, tuple[Any, ...]] = {
    "none": ("none", "both", 64, 16, 2),
    "calibrated": ("calibrated", "both", 32, 128, 2),
    "dynamic": ("dynamic", "both", 32, 32, 1),
    "calibrated-v": ("calibrated", "v", 32, 32, 1),
    "dynamic-v": ("dynamic", "v", 16, 128, 1),
    "int8": ("int8", "both", 64, 128, 1),
    "int8-v": ("int8", "v", 16, 128, 1),
    "calibrated-k": ("calibrated", "k", 32, 128, 1),
    "dynamic-k": ("dynamic", "k", 32, 32, 2),
    "int8-k": ("int8", "k", 16, 128, 1),
    "head-80": ("calibrated", "both", 80, 32, 1),
    "head-96-window-2": ("none", "both", 96, 128, 1, 2),
    "sinks": ("none", "both", 64, 128, 2, None, torch.tensor([-3.0, 0.5, 1.0, 9.0])),
    "sinks-window-100": ("calibrated", "v", 32, 32, 1, 100, torch.tensor([0.5, 2.0]).bfloat16()),
}
DECODES: dict[str, tuple[Any, ...]] = {
    "decode-none": ("none", "both", 64, 128),
    "decode-calibrated": ("calibrated", "both", 128, 128),
    "decode-dynamic": ("dynamic", "both", 64, 128),
    "decode-calibrated-v": ("calibrated", "v", 64, 128),
    "decode-dynamic-v": ("dynamic", "v", 64, 128),
    "decode-int8": ("int8", "both", 64, 128),
    "decode-int8-v": ("int8", "v", 128, 32),
    "decode-calibrated-k": ("calibrated", "k", 64, 128),
    "decode-dynamic-k": ("dynamic", "k", 64, 128),
    "decode-int8-k": ("int8", "k", 64, 32),
    "decode-small-pages": ("calibrated", "both", 64, 32),
    "decode-192": ("dynamic", "both", 192, 128),
    "decode-80-window-100": ("calibrated", "both", 80, 32, 100),
    "decode-sinks": ("none", "both", 64, 128, None, torch.tensor([-3.0, 0.5, 1.0, 9.0, 0.0, 1.0]).bfloat16()),
    "decode-sinks-window-100": ("calibrated", "v", 64, 128, 100, torch.tensor([0.5, 2.0, -1.0, 3.0, 5.0, 0.0])),
}
PACKS: dict[str, tuple[Any, ...]] = {
    "packs-of-whole-tiles": ([1, 75, 32, 131], 9, "none", "both", 16, (32, 16), (16, 32)),
    "packs-calibrated": ([1, 75, 32, 131], 0, "calibrated", "both", 32, (16, 32), (32, 32)),
    "packs-dynamic-with-an-empty-sequence": ([1, 75, 0, 32, 131], 9, "dynamic", "both", 16, (32, 16), (16, 32)),
    "packs-dynamic-k": ([1, 75, 32], 9, "dynamic", "k", 16, (32, 16), (16, 32)),
    "packs-of-more-than-one-search": ([3] * 22 + [40], 5, "calibrated", "v", 16, (32, 16), (16, 32)),
}


if __name__ == "__main__":
    mend_interpreter()
    for module in (attention_decode, attention_reference, attention_rows, decode_layout):
        module.KV_CHUNK = 128  # one tile, so that short sequences have several chunks
    errors = {name: compare(*case) for name, case in CASES.items()}
    errors |= {name: compare_decode(*case) for name, case in DECODES.items()}
    attention_packed_backward.SEARCH = tl.constexpr(16)
    errors |= {name: compare_packs(*case) for name, case in PACKS.items()}
    print(json.dumps({"errors": errors, "drafts": compare_all()}))
