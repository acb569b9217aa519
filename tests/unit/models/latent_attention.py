"""A kind of block for tests: attention whose cache is one latent a token, as in MLA. This file is all there is of it.

    latent, rotary key = x Wkv;  the rotary key is rotated
    score = q_latent . latent + q_rotary . rotary key;  out = (softmax(score) latent) Wo

All heads share the latent, which is key and value. Queries are computed one by one in float64, so a row's bits do not
depend on the batch. Only the module exists: no GPU runs this kind.

T tokens, E hidden size, H query heads, C latent size, R rotary size, N keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3, decode_e4m3
from octetrl.fp8.quantize import quantize_kv_per_head, quantize_kv_per_token
from octetrl.kernels.rows.rope import rope
from octetrl.layers.context import Context, LayerCache, PackedContext, PagedContext
from octetrl.layers.linear import Projection
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.block import Block, BlockBuilder
from octetrl.models.build_blocks import KINDS
from octetrl.shapes.blocks import (
    BlockLayout,
    BlockMemory,
    CachedTensor,
    LinearLayout,
    Part,
    TrainedAs,
)
from octetrl.shapes.sizes import ModelSizes

LATENT, ROTARY = 48, 8


@dataclass(frozen=True)
class LatentLayout(BlockLayout):
    sites = ("q_proj", "latent as cached", "o_proj")

    def tensors(self, spec: ModelSizes) -> tuple[LinearLayout, ...]:
        heads, hidden = spec.num_heads, spec.hidden_size
        return (
            LinearLayout("q_proj", hidden, (Part("q_proj", heads * (LATENT + ROTARY)),)),
            LinearLayout("kv_a_proj", hidden, (Part("kv_a_proj_with_mqa", LATENT + ROTARY),)),
            LinearLayout("o_proj", heads * LATENT, (Part("o_proj", hidden),)),
        )

    def cached(self, spec: ModelSizes) -> tuple[CachedTensor, ...]:
        return (
            CachedTensor("latent", (LATENT,), (1,), scale_of="scale"),
            CachedTensor("rotary", (ROTARY,), never_fp8="it is small"),
        )

    def rotary_size(self, spec: ModelSizes) -> int:
        return ROTARY

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        return BlockMemory(saved=how.value_bytes * (LATENT + ROTARY))

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        return {"latent size": LATENT}


class LatentAttention(Block):
    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__(builder)
        self.num_heads = builder.spec.num_heads
        self.quantizes = builder.policy.cached_as("latent") == "fp8"
        self.q_proj, self.kv_a_proj, self.o_proj = map(builder.linear, ("q_proj", "kv_a_proj", "o_proj"))

    @property
    def reader(self) -> Projection | None:
        return None

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        q_THX = self.q_proj(x_TE).view(x_TE.shape[0], self.num_heads, LATENT + ROTARY)
        latent_TC, key_TR = self.kv_a_proj(x_TE).split((LATENT, ROTARY), 1)
        key_TR = rope(key_TR.unsqueeze(1), *rotary).squeeze(1)
        q_THX = torch.cat((q_THX[..., :LATENT], rope(q_THX[..., LATENT:].contiguous(), *rotary)), 2)
        if isinstance(context, PackedContext):
            latent_TC = self._replayed(latent_TC, context)
            keys = _packed_keys(latent_TC, key_TR, context)
        else:
            keys = _paged_keys(latent_TC, key_TR, context.layers[self.layer], context)
        out_THC = torch.stack([_attend(q_HX, *seen) for q_HX, seen in zip(q_THX, keys, strict=True)])
        out_TE: Tensor = self.o_proj(out_THC.to(x_TE.dtype).flatten(1))
        return out_TE

    def _replayed(self, latent_TC: Tensor, context: PackedContext) -> Tensor:
        if context.kv_amax_LS is not None:
            (amax_1, _) = self.scales_of(context.kv_amax_LS)
            assert amax_1 is not None
            amax_1.copy_(torch.maximum(amax_1, latent_TC.detach().abs().amax().float()))
        if not self.quantizes or context.kv_mode == "none":
            return latent_TC.double()
        scale_1, _ = self.scales_of(context.kv_scale_LS)
        return latent_TC.double() + (_values(*_codes(latent_TC.detach(), scale_1)) - latent_TC.double()).detach()

    def rollout(self, x: Any, inputs: Any) -> Tensor:
        raise NotImplementedError

    begin = finish = backward = rollout


KINDS[LatentLayout] = lambda builder, layout: LatentAttention(builder)


def _attend(q_HX: Tensor, latent_NC: Tensor, key_NR: Tensor) -> Tensor:
    """[H, C] in float64."""
    score_HN = (q_HX.double() @ torch.cat((latent_NC.double(), key_NR.double()), 1).t()) * q_HX.shape[1] ** -0.5
    out_HC: Tensor = score_HN.softmax(1) @ latent_NC.double()
    return out_HC


def _codes(latent_TC: Tensor, scale_1: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes [T, C] and their scales, [1] given ones or [T, 1] of the tokens."""
    x_T1C = latent_TC.unsqueeze(1)
    found = quantize_kv_per_token(x_T1C) if scale_1 is None else quantize_kv_per_head(x_T1C, scale_1)
    return found.codes.squeeze(1), found.scale


def _values(codes_TC: Tensor, scale: Tensor) -> Tensor:
    return decode_e4m3(codes_TC).double() * scale


def _packed_keys(latent_TC: Tensor, key_TR: Tensor, context: PackedContext) -> Iterator[tuple[Tensor, Tensor]]:
    """What each token sees, itself included."""
    for start, stop in pairwise(context.cu_seqlens_B1.tolist()):
        for at in range(start, stop):
            yield latent_TC[start : at + 1], key_TR[start : at + 1]


def _paged_keys(
    latent_TC: Tensor, key_TR: Tensor, cache: LayerCache, context: PagedContext
) -> Iterator[tuple[Tensor, Tensor]]:
    """Writes the tokens to their pages; what each token sees, read back from there."""
    latent, key = cache.tensors
    size = key.pages.shape[1]
    kept_T = context.slot_mapping_T >= 0
    page_T, offset_T = context.slot_mapping_T[kept_T] // size, context.slot_mapping_T[kept_T] % size
    key.pages[page_T, offset_T] = key_TR[kept_T]
    if latent.pages.dtype == E4M3:
        codes_TC, scale = _codes(latent_TC[kept_T], latent.scale)
        latent.pages.view(torch.uint8)[page_T, offset_T] = codes_TC.view(torch.uint8)
        if latent.token_scale is not None:
            latent.token_scale[page_T, :, offset_T] = scale
    else:
        latent.pages[page_T, offset_T] = latent_TC[kept_T]
    for b, (start, stop) in enumerate(pairwise(context.cu_seqlens_q_B1.tolist())):
        for row in range(start, stop):
            at_N = torch.arange(max(1, int(context.context_lens_B[b]) - (stop - 1 - row)))
            page_N, offset_N = context.block_table_BP[b][at_N // size].clamp_min(0).long(), at_N % size
            if latent.pages.dtype == E4M3:
                codes_NC = latent.pages.view(torch.uint8)[page_N, offset_N].view(E4M3)
                scale = latent.scale if latent.token_scale is None else latent.token_scale[page_N, :, offset_N]
                assert scale is not None
                yield _values(codes_NC, scale), key.pages[page_N, offset_N]
            else:
                yield latent.pages[page_N, offset_N], key.pages[page_N, offset_N]
