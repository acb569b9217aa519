"""Taps: record the values at the sites of a forward that the decoder and its blocks declare.

    embedding
    norm, qkv_proj, rotated q, rotated k, k as cached, v as cached, attention out, o_proj, residual,
    MLP norm, gate_up_proj, SiLU, down_proj, residual after MLP                                        each layer
    final norm, logits, log-prob

(The layout of a block lists its sites; these are attention's and the gated MLP's.)

An open tap is the `probe` of the model, its layers and their blocks (models/blocks/block.py), in any form: modules,
`rollout_forward` or `training_forward`. The ops are those of a run. The host records values in between, so a tap cannot
be captured in a graph.

If the next linear is FP8, the fused kernels compute codes and no BF16 tensor. The recorded value is then code times
scale, at a site named "norm, quantised" and so on. Both fused forwards have these sites; the modules do not.

`Fingerprints` keeps 64 bits of each token's row at each site, so the activations of a whole model need not fit into
memory. A row's bits are summed with odd factors modulo 2^64. One changed element always shows; several cancel with a
chance of 2^-64. If fingerprints differ, the pass runs again and `RowValues` keeps the values of that site.

R rows: tokens of all sequences end to end; T tokens of one forward; C elements of a token's row at a site.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octetrl.fp8.quantize import Quantized, dequantize_activation
from octetrl.layers.context import Context, PagedContext
from octetrl.models.blocks.block import Block
from octetrl.models.decoder import EMBEDDING_SITE, FINAL_NORM_SITE, Decoder, DecoderLayer, RunLayer
from octetrl.models.rollout_forward import can_fuse, rollout_forward
from octetrl.models.training_forward import Keep, fused_layer_runner
from octetrl.shapes.blocks import PLACES, LayerBlocks
from octetrl.shapes.spec import ModelSpec

BEHIND = (FINAL_NORM_SITE, "logits", "log-prob")
QUANTISED = ", quantised"  # ends the name of a site whose values are codes
_ELEMENTS = 1 << 24  # widened to 64 bits at a time


class Site(NamedTuple):
    """An op of the forward; `layer` is None before the first layer and behind the last."""

    layer: int | None
    op: str

    def __str__(self) -> str:
        return self.op if self.layer is None else f"layer {self.layer}, {self.op}"


def sites_of(spec: ModelSpec) -> list[Site]:
    """Every site, in the order of the forward."""
    inner = [Site(layer, op) for layer in range(spec.num_layers) for op in _in_a_layer(spec.blocks_of(layer))]
    return [Site(None, EMBEDDING_SITE), *inner, *(Site(None, op) for op in BEHIND)]


def _in_a_layer(blocks: LayerBlocks) -> Iterator[str]:
    for place, block in zip(PLACES, blocks, strict=True):
        for op in (place.norm_site, *block.sites):
            yield op
            yield op + QUANTISED
        yield place.residual_site


class Note(Protocol):
    """Records the values [T, ...] of the rows `rows_T` (int64) at a site."""

    def __call__(self, site: Site, rows_T: Tensor, values: Tensor, /) -> None: ...


class Fingerprints:
    """64 bits of every recorded row at every site."""

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
        """Rows that both recorded at `site` and whose bits differ; int64."""
        if site not in self.bits_R or site not in other.bits_R:
            return torch.zeros(0, dtype=torch.int64)
        both_R = self.seen_R[site] & other.seen_R[site]
        return (both_R & (self.bits_R[site] != other.bits_R[site])).nonzero().flatten().cpu()

    def rows_seen_with(self, other: Fingerprints) -> Tensor:
        """bool [R]: rows that both recorded at some site."""
        seen_R = torch.zeros(self.num_rows, dtype=torch.bool, device=self.device)
        for site in self.seen_R.keys() & other.seen_R.keys():
            seen_R |= self.seen_R[site] & other.seen_R[site]
        return seen_R


class RowValues:
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
    """Passes the values of `model`'s modules to `note` while open. `rows_T`: the rows of the next forward."""

    is_fused = False  # whether `forward` runs the fused forms
    with_graph = False  # whether the forward builds an autograd graph

    def __init__(self, model: Decoder, note: Note) -> None:
        self.model, self.note = model, note
        self.rows_T = torch.zeros(0, dtype=torch.int64)
        self._sites = set(sites_of(model.spec))

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: Context) -> Tensor:
        """Hidden states [T, E] after the final norm."""
        hidden_TE: Tensor = self.model(token_ids_T, positions_T, context)
        return hidden_TE

    @contextmanager
    def open(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.model.modules():
                if isinstance(module, Decoder | DecoderLayer | Block):
                    shadow(stack, module, "probe", self._note_site)
            yield

    def _note_site(self, layer: int | None, op: str, values: Tensor | Quantized) -> None:
        site = Site(layer, op + QUANTISED if isinstance(values, Quantized) else op)
        assert site in self._sites, f"the layout of this block declares no site '{op}'"
        self.note(site, self.rows_T, dequantize_activation(values) if isinstance(values, Quantized) else values)


class RolloutTap(Tap):
    """A tap on `rollout_forward`."""

    is_fused = True

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: Context) -> Tensor:
        assert isinstance(context, PagedContext)
        return rollout_forward(self.model, token_ids_T, positions_T, context)


class TrainingTap(Tap):
    """A tap on the layers of `training_forward`. `run_layer` is the trainer's (activation_checkpoint.py).

    It builds an unused autograd graph, because the values saved for a backward decide which kernels run.
    """

    is_fused = True
    with_graph = True

    def __init__(self, model: Decoder, note: Note, run_layer: RunLayer) -> None:
        super().__init__(model, note)
        self._run_layer = run_layer

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, context: Context) -> Tensor:
        hidden_TE: Tensor = self.model(token_ids_T, positions_T, context, self._run_layer)
        return hidden_TE


def engine_tap(model: Decoder, note: Note) -> Tap:
    """A tap on the engine's forward: fused if device and model allow it."""
    return RolloutTap(model, note) if model.lm_head_weight.is_cuda and can_fuse(model) else Tap(model, note)


def trainer_tap(model: Decoder, keep: Keep, note: Note) -> Tap:
    """A tap on the trainer's forward: fused if device and model allow it."""
    run_layer = fused_layer_runner(model, keep)
    return Tap(model, note) if run_layer is None else TrainingTap(model, note, run_layer)


def shadow(stack: ExitStack, module: nn.Module, name: str, value: Any) -> None:
    """Sets `module.name` to `value` until the stack unwinds, and then restores it."""
    was = module.__dict__.get(name)
    module.__dict__[name] = value
    if was is None:
        stack.callback(module.__dict__.pop, name)
    else:
        stack.callback(module.__dict__.__setitem__, name, was)
