"""What a forward computes on the way, seen from outside: a tap on the modules of `models/decoder.py`.

    embedding
    norm, qkv_proj, rotated q, rotated k, k as cached, v as cached, attention out, o_proj, residual,
    MLP norm, gate_up_proj, SiLU, down_proj, residual after MLP                                        each layer
    final norm, logits, log-prob

(The fused forwards have some of these as codes alone: fused.py taps them as "norm, quantised" and so on.)

Modules are hooked. What lies inside `Attention` is no module's output, so the two methods that attend are shadowed on
the instance while the tap is open; nothing in models/ or layers/ knows of it. "As cached" is code times scale: read
back from the pages in the engine, replayed by the trainer's own replay.

A whole model's activations need not fit anywhere: `Fingerprints` keeps 64 bits of each token's row at each site. A
row's bits are summed with odd factors modulo 2^64, so one changed element always shows, and several cancel once in
2^64. Where fingerprints differ, the pass runs again and `Rows` keeps the values of that one site.

R rows: tokens of all sequences laid end to end; T tokens of one forward; C elements of a token's row at a site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octetrl.config.spec import ModelSpec
from octetrl.fp8.format import E4M3, decode_e4m3
from octetrl.kernels.attention.kv_store import ReplayedKV, by_key, kv_replay
from octetrl.layers.context import Context, LayerCache, PackedContext, PagedContext
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.decoder import Decoder, DecoderLayer

IN_A_LAYER = (
    "norm",
    "norm, quantised",
    "qkv_proj",
    "rotated q",
    "rotated k",
    "k as cached",
    "v as cached",
    "attention out",
    "attention out, quantised",
    "o_proj",
    "residual",
    "MLP norm",
    "MLP norm, quantised",
    "gate_up_proj",
    "SiLU",
    "SiLU, quantised",
    "down_proj",
    "residual after MLP",
)
INSIDE_ATTENTION = IN_A_LAYER[3:8]
BEHIND = ("final norm", "logits", "log-prob")
_ELEMENTS = 1 << 24  # widened to 64 bits at a time


class Site(NamedTuple):
    """An op of the forward; `layer` is None before the first layer and behind the last."""

    layer: int | None
    op: str

    @property
    def place(self) -> tuple[float, int]:
        """Where in the forward it comes."""
        if self.layer is not None:
            return self.layer, IN_A_LAYER.index(self.op)
        return (math.inf, BEHIND.index(self.op)) if self.op in BEHIND else (-1, 0)

    def __str__(self) -> str:
        return self.op if self.layer is None else f"layer {self.layer}, {self.op}"


def sites_of(spec: ModelSpec) -> list[Site]:
    """Every site, in the order in which a forward passes them."""
    inner = [Site(layer, op) for layer in range(spec.num_layers) for op in IN_A_LAYER]
    return [Site(None, "embedding"), *inner, *(Site(None, op) for op in BEHIND)]


class Note(Protocol):
    """Takes down the values [T, ...] of the rows `rows_T` (int64) at a site."""

    def __call__(self, site: Site, rows_T: Tensor, values: Tensor, /) -> None: ...


class Fingerprints:
    """64 bits of every row at every site that was noted."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.num_rows, self.device = num_rows, device
        self.shapes: dict[Site, tuple[int, ...]] = {}  # of one row
        self.bits_R: dict[Site, Tensor] = {}
        self.seen_R: dict[Site, Tensor] = {}

    def __call__(self, site: Site, rows_T: Tensor, values: Tensor) -> None:
        if site not in self.bits_R:
            self.shapes[site] = tuple(values.shape[1:])
            self.bits_R[site] = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
            self.seen_R[site] = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        self.bits_R[site][rows_T] = fingerprint(values)
        self.seen_R[site][rows_T] = True

    def differing_rows(self, other: Fingerprints, site: Site) -> Tensor:
        """Rows whose bits differ at `site`, of those that both noted; int64."""
        if site not in self.bits_R or site not in other.bits_R:
            return torch.zeros(0, dtype=torch.int64)
        both_R = self.seen_R[site] & other.seen_R[site]
        return (both_R & (self.bits_R[site] != other.bits_R[site])).nonzero().flatten().cpu()

    def rows_seen_with(self, other: Fingerprints) -> Tensor:
        """bool [R]: rows that both noted at some site."""
        seen_R = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        for site in self.seen_R.keys() & other.seen_R.keys():
            seen_R |= self.seen_R[site] & other.seen_R[site]
        return seen_R


class Rows:
    """The values of some rows at one site: float32 [C] by row."""

    def __init__(self, site: Site, rows: Tensor) -> None:
        self.site = site
        self.values: dict[int, Tensor] = {}
        self._wanted = set(rows.tolist())

    def __call__(self, site: Site, rows_T: Tensor, values: Tensor) -> None:
        if site != self.site:
            return
        kept = [(place, row) for place, row in enumerate(rows_T.tolist()) if row in self._wanted]
        if kept:
            places = torch.tensor([place for place, _ in kept], device=values.device)
            chosen = values.detach()[places].flatten(1).float().cpu()
            self.values |= dict(zip((row for _, row in kept), chosen, strict=True))


def fingerprint(values: Tensor) -> Tensor:
    """int64 [T] of values [T, ...], by their bits in float32, which holds BF16 and every code exactly."""
    flat_TC = values.detach().flatten(1)
    index_C = torch.arange(1, flat_TC.shape[1] + 1, device=values.device)
    factor_C = (index_C * -0x61C8864680B583EB) | 1
    step = max(1, _ELEMENTS // flat_TC.shape[1])
    parts = [part_TC.float().contiguous().view(torch.int32).long() for part_TC in flat_TC.split(step)]
    return torch.cat([(part_TC * factor_C).sum(1) for part_TC in parts])


class Tap:
    """Tells `note` what `model` computes while `open`. `rows_T` says which rows the next forward computes."""

    with_graph = False  # whether a trainer's forward is run as if a backward were to follow

    def __init__(self, model: Decoder, note: Note) -> None:
        self.model, self.note = model, note
        self.rows_T = torch.zeros(0, dtype=torch.int64)

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: Context) -> Tensor:
        """Hidden states [T, E] after the final norm."""
        hidden_TE: Tensor = self.model(token_ids_T, positions_T, context)
        return hidden_TE

    @contextmanager
    def open(self) -> Iterator[None]:
        with ExitStack() as stack:
            self.after(stack, self.model.embedding, Site(None, "embedding"))
            for index, layer in enumerate(self.model.decoder_layers()):
                self._on_layer(stack, index, layer)
            self.after(stack, self.model.norm, Site(None, "final norm"))
            yield

    def _on_layer(self, stack: ExitStack, index: int, layer: DecoderLayer) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.after(stack, layer.attention_norm, Site(index, "norm"))
        self.after(stack, attention.qkv_proj, Site(index, "qkv_proj"))
        self._around(stack, attention)
        self.after(stack, attention.o_proj, Site(index, "o_proj"))
        self._before(stack, layer.mlp_norm, Site(index, "residual"))
        self.after(stack, layer.mlp_norm, Site(index, "MLP norm"))
        self.after(stack, mlp.gate_up_proj, Site(index, "gate_up_proj"))
        self._before(stack, mlp.down_proj, Site(index, "SiLU"))
        self.after(stack, mlp.down_proj, Site(index, "down_proj"))
        self.after(stack, layer, Site(index, "residual after MLP"))

    def after(self, stack: ExitStack, module: nn.Module, site: Site) -> None:
        def seen(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self.note(site, self.rows_T, output)

        stack.callback(module.register_forward_hook(seen).remove)

    def _before(self, stack: ExitStack, module: nn.Module, site: Site) -> None:
        def seen(_module: nn.Module, inputs: Any) -> None:
            self.note(site, self.rows_T, inputs[0])

        stack.callback(module.register_forward_pre_hook(seen).remove)

    def _around(self, stack: ExitStack, attention: Attention) -> None:
        attend_packed, attend_paged = attention._attend_packed, attention._attend_paged

        def packed(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: PackedContext) -> Tensor:
            out_THD = attend_packed(q_THD, k_TKD, v_TKD, context)
            self.attended(attention, q_THD, k_TKD, replayed(attention, k_TKD, v_TKD, context), out_THD)
            return out_THD

        def paged(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: PagedContext) -> Tensor:
            out_THD = attend_paged(q_THD, k_TKD, v_TKD, context)
            cached = read_back(context.layers[attention.layer], context.slot_mapping_T)
            self.attended(attention, q_THD, k_TKD, cached, out_THD)
            return out_THD

        shadow(stack, attention, "_attend_packed", packed)
        shadow(stack, attention, "_attend_paged", paged)

    def attended(
        self, attention: Attention, q_THD: Tensor, k_TKD: Tensor, cached: tuple[Tensor, Tensor], out_THD: Tensor
    ) -> None:
        seen = (q_THD, k_TKD, *cached, out_THD)
        for op, values in zip(INSIDE_ATTENTION, seen, strict=True):
            self.note(Site(attention.layer, op), self.rows_T, values)


def shadow(stack: ExitStack, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """`module.name` is `function` until the stack unwinds; what it was before, shadowed or not, comes back."""
    was = module.__dict__.get(name)
    module.__dict__[name] = function
    if was is None:
        stack.callback(module.__dict__.pop, name)
    else:
        stack.callback(module.__dict__.__setitem__, name, was)


def replayed(attention: Attention, k_TKD: Tensor, v_TKD: Tensor, context: PackedContext) -> tuple[Tensor, Tensor]:
    """K and V as the packed forward multiplies them: float32 [T, K, D], codes times scales."""
    k_scale_K, v_scale_K = (
        None if scale_LK is None else scale_LK[attention.layer] for scale_LK in (context.k_scale_LK, context.v_scale_LK)
    )
    return values_of(kv_replay(k_TKD, v_TKD, context.kv_mode, k_scale_K, v_scale_K, attention.quantize_k))


def values_of(kv: ReplayedKV) -> tuple[Tensor, Tensor]:
    """What replayed codes stand for, float32."""
    return _scaled(kv.k_TKD, kv.k_scale), _scaled(kv.v_TKD, kv.v_scale)


def read_back(cache: LayerCache, slot_mapping_T: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of these slots, out of their pages: float32 [T, K, D], codes times scales."""
    page_size = cache.k.shape[2]
    page_T, offset_T = slot_mapping_T // page_size, slot_mapping_T % page_size

    def values(pages: Tensor, scale_K: Tensor | None, token_scale: Tensor | None) -> Tensor:
        if pages.dtype != E4M3:
            return pages[page_T, :, offset_T].float()
        codes_TKD = pages.view(torch.uint8)[page_T, :, offset_T].view(E4M3)
        scale = token_scale[page_T, :, offset_T] if token_scale is not None else scale_K
        return _scaled(decode_e4m3(codes_TKD), scale)

    return (
        values(cache.k, cache.k_scale_K, cache.k_token_scale),
        values(by_key(cache.v), cache.v_scale_K, cache.v_token_scale),
    )


def _scaled(codes_TKD: Tensor, scale: Tensor | None) -> Tensor:
    """`scale`: [K] of heads or [T, K] of tokens and heads; None: the values themselves."""
    return codes_TKD.float() if scale is None else codes_TKD.float() * scale[..., None]
