"""Attributes the mismatch to kinds of tensors, by giving each kind the engine's treatment instead of the trainer's.

    weights         of the linears: quantised or not, or other values
    activations     of the linears: quantised or not
    K, V            and other cached tensors: through the cache's quantiser or not, and with which scales
    lm_head         other values
    norms, embedding    other values

With g the engine's log-probs of N drawn tokens and p_S the trainer's with the kinds in S treated as the engine does,

    D(S) = mean |g - p_S|            and, the second measure,  mean exp(p_S - g) - (p_S - g) - 1

D(no kinds) is the mismatch. A kind's share is the decrease of D when the kind is moved to the engine's treatment,
averaged over all orders of moving the kinds (its Shapley value). Shares sum to the whole even though errors do not add.
D(all kinds) is the rest, which no treatment explains, such as an op that differs. Kinds that both sides treat equally
have no share. The k others cost 2^k forwards of the trainer's modules.

A linear with one operand of each side multiplies dequantised values in float32 (float64 on a CPU) and rounds once. The
block's own module treats the cached tensors (`Block.treat_as`).

T tokens, L layers, S scales of a layer's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.doctor.findings import Examined, forward_logprobs
from octetrl.doctor.taps import shadow
from octetrl.fp8.quantize import dequantize
from octetrl.layers.context import CacheTreatment, PackedContext
from octetrl.layers.embedding import Embedding
from octetrl.layers.linear import ACTIVATION_QUANTIZERS, Float8Linear, Projection
from octetrl.layers.norm import RMSNorm
from octetrl.layers.stacked import Float8StackedLinear, RowGroups, StackedLinear
from octetrl.layers.stacked_lora import StackedLoraAdapter
from octetrl.layers.unquantized_linear import Linear
from octetrl.models.blocks.block import Block
from octetrl.models.decoder import Decoder
from octetrl.shapes.blocks import KVMode
from octetrl.telemetry.mismatch import kl_terms
from octetrl.workers.worker import own_engine

WEIGHTS, ACTIVATIONS, LM_HEAD, OTHERS = "weights", "activations", "lm_head", "norms, embedding"  # and cached tensors
Kinds = frozenset[str]


class Mismatch(NamedTuple):
    mean_abs: float
    gen_kl: float


@dataclass(frozen=True, slots=True)
class KindShare:
    """One kind's shares of the two measures, and its treatment on both sides."""

    kind: str
    of_mean_abs: float
    of_gen_kl: float
    trainer: str
    engine: str


@dataclass(frozen=True, slots=True)
class Attribution:
    """`shares` and `rest` sum to 1, in each measure."""

    mismatch: Mismatch
    shares: tuple[KindShare, ...]
    rest: Mismatch  # as shares of the mismatch

    def lines(self) -> list[str]:
        if not self.mismatch.mean_abs:
            return ["nothing to attribute: every log-prob is equal"]
        first = f"mismatch: mean |engine - trainer| {self.mismatch.mean_abs:.3g}, gen_kl {self.mismatch.gen_kl:.3g}"
        rows = [
            f"  {share.kind:<18}{share.of_mean_abs:>8.1%} of it,{share.of_gen_kl:>8.1%} of gen_kl"
            f"   trainer: {share.trainer}, engine: {share.engine}"
            for share in self.shares
        ]
        rest = f"  {'the rest':<18}{self.rest.mean_abs:>8.1%} of it,{self.rest.gen_kl:>8.1%} of gen_kl   no tensor's"
        return [first, *rows, f"{rest} treatment: look at the first difference"]


class Sides:
    """Both models and their treatments of the cache. `swapped` gives the trainer some treatments of the engine."""

    def __init__(self, examined: Examined) -> None:
        subject = examined.subject
        self.trainer: Decoder = subject.worker.trainer_model
        self.engine: Decoder = subject.worker.engine_model
        self.linears: list[tuple[Projection, Projection]] = []
        self.others: list[tuple[RMSNorm | Embedding, RMSNorm | Embedding]] = []
        counterparts = dict(self.engine.named_modules())
        for name, ours in self.trainer.named_modules():
            theirs = counterparts[name]
            if isinstance(ours, Projection) and isinstance(theirs, Projection):
                self.linears.append((ours, theirs))
            elif isinstance(ours, RMSNorm | Embedding) and isinstance(theirs, RMSNorm | Embedding):
                self.others.append((ours, theirs))
        kv, held = subject.kv, own_engine(subject.worker).kv_scales
        mine = _met_by(kv.kv_mode, kv.kv_scale_LS)
        its = _met_by(subject.policy.kv_mode, None if held is None else held.scale_LS)
        self.caches: list[tuple[Block, dict[str, tuple[CacheTreatment, CacheTreatment]]]] = []  # trainer's, engine's
        for block in self.trainer.modules():
            if isinstance(block, Block) and block.cached:
                names = (tensor.name for tensor in block.cached)
                pairs = zip(block.treatments(mine), block.treatments(its), strict=True)
                self.caches.append((block, dict(zip(names, pairs, strict=True))))

    def treatments(self) -> dict[str, tuple[str, str]]:
        """The kinds that the sides treat differently: the trainer's and the engine's treatment in words."""
        found: dict[str, tuple[str, str]] = {}
        if any(not same_weight(ours, theirs) for ours, theirs in self.linears):
            found[WEIGHTS] = _formats(self.linears, "not the trainer's")
        if any(isinstance(ours, Float8Linear) != isinstance(theirs, Float8Linear) for ours, theirs in self.linears):
            found[ACTIVATIONS] = _formats(self.linears, "quantised otherwise")
        for _, treatments in self.caches:
            for name, (mine, its) in treatments.items():
                if name not in found and not _same_treatment(mine, its):
                    words = _in_words(mine), _in_words(its)
                    found[name] = words if words[0] != words[1] else (words[0], f"{words[1]}, other scales")
        if not _same(self.trainer.lm_head_weight, self.engine.lm_head_weight):
            found[LM_HEAD] = "its own", "not the trainer's"
        if any(not _same(ours.weight, theirs.weight) for ours, theirs in self.others):
            found[OTHERS] = "their own", "not the trainer's"
        return found

    @contextmanager
    def swapped(self, kinds: Kinds) -> Iterator[None]:
        """The trainer's modules compute with the engine's treatment of `kinds`."""
        with ExitStack() as stack:
            for ours, theirs in self.linears:
                shadow(stack, ours, "forward", _product(ours, theirs, kinds))
            for block, treatments in self.caches:
                if kinds & treatments.keys():
                    shadow(stack, block, "treat_as", {name: pair[name in kinds] for name, pair in treatments.items()})
            if OTHERS in kinds:
                for mine, its in self.others:
                    shadow(stack, mine, "forward", its.forward)
            if LM_HEAD in kinds:
                for asked in ("logits", "logprobs"):
                    shadow(stack, self.trainer, asked, getattr(self.engine, asked))
            yield


def attribute(examined: Examined) -> Attribution:
    """The mismatch of the examined log-probs, by kind. It is zero if all log-probs are equal."""
    if examined.report.equal:
        return Attribution(Mismatch(0.0, 0.0), (), Mismatch(0.0, 0.0))
    sides = Sides(examined)
    treatments = sides.treatments()
    kinds = list(treatments)
    mismatches: dict[Kinds, Mismatch] = {}
    module_pass = examined.subject.module_pass(examined.sequences)
    for count in range(len(kinds) + 1):
        for subset in map(frozenset, combinations(kinds, count)):
            with sides.swapped(subset):
                logprobs_N = forward_logprobs(module_pass, examined.sequences)
            mismatches[subset] = mismatch_between(examined.engine_logprobs_N, logprobs_N)
    whole, left = mismatches[frozenset()], mismatches[frozenset(kinds)]
    measures = [
        shapley(kinds, {subset: found[which] / (whole[which] or 1.0) for subset, found in mismatches.items()})
        for which in range(2)
    ]
    return Attribution(
        mismatch=whole,
        shares=tuple(KindShare(kind, measures[0][kind], measures[1][kind], *treatments[kind]) for kind in kinds),
        rest=Mismatch(*(after / (before or 1.0) for after, before in zip(left, whole, strict=True))),
    )


def mismatch_between(generator_N: Tensor, trainer_N: Tensor) -> Mismatch:
    difference_N = trainer_N.double() - generator_N.double()
    return Mismatch(float(difference_N.abs().mean()), float(kl_terms(difference_N).mean()))


def shapley(kinds: Sequence[str], left: Mapping[Kinds, float]) -> dict[str, float]:
    """The decrease of `left` by each kind, averaged over all orders. The sum is left(none) - left(all)."""
    total = len(kinds)
    shares = {}
    for kind in kinds:
        others = [other for other in kinds if other != kind]
        share = 0.0
        for count in range(total):
            weight = math.factorial(count) * math.factorial(total - count - 1) / math.factorial(total)
            before = map(frozenset, combinations(others, count))
            share += weight * sum(left[moved] - left[moved | {kind}] for moved in before)
        shares[kind] = share
    return shares


# ---------------------------------------------------------------- the cache


def _met_by(mode: KVMode, scale_LS: Tensor | None) -> PackedContext:
    """A context without tokens, which only holds a side's treatment of the cache."""
    return PackedContext(torch.zeros(1, dtype=torch.int32), 0, mode, scale_LS)


def _same_treatment(mine: CacheTreatment, its: CacheTreatment) -> bool:
    return mine.mode == its.mode and (mine.mode != "calibrated" or _same(mine.scale, its.scale))


def _in_words(treatment: CacheTreatment) -> str:
    return "not quantised" if treatment.mode == "none" else f"FP8, {treatment.mode}"


# ---------------------------------------------------------------- the linears


def _product(ours: Projection, theirs: Projection, kinds: Kinds) -> Callable[..., Tensor]:
    weights = theirs if WEIGHTS in kinds else ours
    inputs = theirs if ACTIVATIONS in kinds else ours
    if isinstance(weights, Float8Linear) == isinstance(inputs, Float8Linear):
        return weights.forward

    def product(x_TI: Tensor, groups: RowGroups | None = None) -> Tensor:
        wide = torch.float64 if x_TI.device.type == "cpu" else torch.float32
        if isinstance(inputs, Float8Linear):
            codes = ACTIVATION_QUANTIZERS[inputs.backend](x_TI, inputs.power_of_two)
            operand = dequantize(codes, (1, inputs.block[1]))
        else:
            operand = x_TI
        if groups is not None:
            y_TO = torch.empty(x_TI.shape[0], weights.out_features, device=x_TI.device)
            for expert, (start, stop) in enumerate(pairwise(groups.first_X1.tolist())):
                rows = slice(start, stop)
                y_TO[rows] = (operand[rows].to(wide) @ _values(weights, expert).to(wide).t()).float()
            y_PO = y_TO.to(x_TI.dtype)
            adapter = weights.lora
            assert adapter is None or isinstance(adapter, StackedLoraAdapter)
            return y_PO if adapter is None else adapter.of_rows(y_PO, x_TI, groups.first_X1)
        y_TO = (operand.to(wide) @ _values(weights).to(wide).t()).float()
        y_TO = (y_TO if weights.bias is None else y_TO + weights.bias).to(x_TI.dtype)
        return y_TO if weights.lora is None else weights.lora(y_TO, x_TI)

    return product


def _values(weights: Projection, expert: int | None = None) -> Tensor:
    """The values of a linear's weight, codes times scales. For a stacked linear: those of one expert."""
    if isinstance(weights, Float8StackedLinear) and expert is not None:
        return dequantize(weights.of_expert(weights.quantized, expert), weights.block)
    if isinstance(weights, Float8Linear):
        return dequantize(weights.quantized, weights.block)
    if isinstance(weights, StackedLinear) and expert is not None:
        return weights.weight.detach().chunk(weights.count)[expert]
    return weights.weight.detach()


def same_weight(ours: Projection, theirs: Projection) -> bool:
    """Whether both multiply by the same values."""
    if isinstance(ours, Float8Linear) and isinstance(theirs, Float8Linear):
        equal = [_same(*pair) for pair in zip(ours.quantized, theirs.quantized, strict=True)]
        return all(equal) and _same(ours.bias, theirs.bias)
    if isinstance(ours, Linear) and isinstance(theirs, Linear):
        return _same(ours.weight, theirs.weight) and _same(ours.bias, theirs.bias)
    return False


def _formats(linears: Sequence[tuple[Projection, Projection]], otherwise: str) -> tuple[str, str]:
    """In words, how many of each side's linears are FP8."""
    words = []
    for side in range(2):
        count = sum(isinstance(pair[side], Float8Linear) for pair in linears)
        words.append("not quantised" if not count else "FP8" if count == len(linears) else f"{count} linears FP8")
    return (words[0], words[1]) if words[0] != words[1] else (words[0], f"{words[1]}, {otherwise}")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.data_ptr() == b.data_ptr():
        return True
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))
