"""Which tensors bring the mismatch: each kind is moved from the trainer's treatment to the engine's, in every order.

    weights         of the linears: quantised or not, or simply other ones
    activations     of the linears: quantised or not
    K, V            as attention meets them: through the cache's quantiser or not, and with which scales
    lm_head         other weights
    norms, embedding    other weights

With g the engine's log-probs of N drawn tokens and p_S the trainer's with the kinds in S treated as the engine does,

    D(S) = mean |g - p_S|            and, the second measure,  mean exp(p_S - g) - (p_S - g) - 1

D of nothing is the mismatch. A kind's share is what moving it takes off D, averaged over all orders in which the kinds
can be moved (its Shapley value): errors add up like neither numbers nor squares, and this way shares sum to the whole
whatever they do. D of everything is the rest: what no tensor's treatment explains, such as an op that differs. Kinds
that both sides treat alike have no share and cost nothing; k others cost 2^k forwards of the trainer's modules.

Where a linear takes one operand of each side it is multiplied in float32 (float64 on a CPU) from dequantised values and
rounded once. K through the quantiser beside a plain V is rounded to the model's dtype, since the kernels know no such
pair; that adds a tenth of a code's rounding.

T tokens, L layers, K KV heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.doctor.findings import Examined, forward_logprobs
from octetrl.doctor.taps import shadow
from octetrl.fp8.quantize import dequantize_activation, dequantize_weight
from octetrl.kernels.attention.attention_packed import attention_packed
from octetrl.kernels.attention.kv_store import kv_replay
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.layers.context import KVMode, PackedContext
from octetrl.layers.embedding import Embedding
from octetrl.layers.linear import Float8Linear, Linear, Projection
from octetrl.layers.norm import RMSNorm
from octetrl.models.blocks.attention.as_cached import values_of
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.decoder import Decoder

WEIGHTS, ACTIVATIONS, K, V, LM_HEAD, OTHERS = KINDS = (
    "weights",
    "activations",
    "K",
    "V",
    "lm_head",
    "norms, embedding",
)
Kinds = frozenset[str]


class Mismatch(NamedTuple):
    mean_abs: float
    gen_kl: float


@dataclass(frozen=True, slots=True)
class Share:
    """What one kind brings: shares of the two measures, and how both sides treat it."""

    kind: str
    of_mean_abs: float
    of_gen_kl: float
    trainer: str
    engine: str


@dataclass(frozen=True, slots=True)
class Attribution:
    """`shares` and `rest` sum to 1, in each measure."""

    mismatch: Mismatch
    shares: tuple[Share, ...]
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


class CacheTreatment(NamedTuple):
    """How K or V is met in attention."""

    mode: KVMode
    scale_LK: Tensor | None

    def __str__(self) -> str:
        return "not quantised" if self.mode == "none" else f"FP8, {self.mode}"

    def same(self, other: CacheTreatment) -> bool:
        if self.mode != other.mode or self.mode != "calibrated":
            return self.mode == other.mode
        assert self.scale_LK is not None and other.scale_LK is not None
        return _same(self.scale_LK, other.scale_LK)


class Sides:
    """Both models and both views of the cache, and the trainer's forward with some kinds treated as the engine does."""

    def __init__(self, examined: Examined) -> None:
        patient = examined.patient
        self.trainer: Decoder = patient.worker.trainer_model
        self.engine: Decoder = patient.worker.engine_model
        self.linears: list[tuple[Projection, Projection]] = []
        self.others: list[tuple[RMSNorm | Embedding, RMSNorm | Embedding]] = []
        counterparts = dict(self.engine.named_modules())
        for name, ours in self.trainer.named_modules():
            theirs = counterparts[name]
            if isinstance(ours, Projection) and isinstance(theirs, Projection):
                self.linears.append((ours, theirs))
            elif isinstance(ours, RMSNorm | Embedding) and isinstance(theirs, RMSNorm | Embedding):
                self.others.append((ours, theirs))
        policy, kv, held = patient.policy, patient.kv, patient.worker.engine.kv_scales
        cached: KVMode = policy.kv_mode
        self.cache: dict[str, tuple[CacheTreatment, CacheTreatment]] = {}  # trainer's, engine's
        for kind, stored in ((K, policy.k_cache), (V, policy.v_cache)):
            field = "k_scale_LK" if kind == K else "v_scale_LK"
            mine = CacheTreatment(kv.kv_mode if stored == "fp8" else "none", getattr(kv, field))
            its = CacheTreatment(cached if stored == "fp8" else "none", getattr(held, field, None))
            self.cache[kind] = mine, its

    def treatments(self) -> dict[str, tuple[str, str]]:
        """The kinds that the sides treat otherwise: in words, the trainer's and the engine's."""
        found: dict[str, tuple[str, str]] = {}
        if any(not same_weight(ours, theirs) for ours, theirs in self.linears):
            found[WEIGHTS] = _formats(self.linears, "not the trainer's")
        if any(isinstance(ours, Float8Linear) != isinstance(theirs, Float8Linear) for ours, theirs in self.linears):
            found[ACTIVATIONS] = _formats(self.linears, "quantised otherwise")
        for kind, (mine, its) in self.cache.items():
            if not mine.same(its):
                found[kind] = str(mine), str(its) if str(its) != str(mine) else f"{its}, other scales"
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
            if kinds & {K, V}:
                for module in self.trainer.modules():
                    if isinstance(module, Attention):
                        shadow(stack, module, "_attend_packed", self._attend(module, kinds))
            if OTHERS in kinds:
                for mine, its in self.others:
                    shadow(stack, mine, "forward", its.forward)
            if LM_HEAD in kinds:
                for asked in ("logits", "logprobs"):
                    shadow(stack, self.trainer, asked, getattr(self.engine, asked))
            yield

    def _attend(self, attention: Attention, kinds: Kinds) -> Callable[..., Tensor]:
        k, v = (self.cache[kind][kind in kinds] for kind in (K, V))

        def attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: PackedContext) -> Tensor:
            k_scale_K, v_scale_K = (None if one.scale_LK is None else one.scale_LK[attention.layer] for one in (k, v))
            if v.mode == "none" and k.mode != "none":
                quantised = kv_replay(k_TKD, k_TKD, k.mode, k_scale_K, k_scale_K)
                k_TKD = values_of(quantised)[0].to(k_TKD.dtype)
            return attention_packed(
                q_THD,
                k_TKD,
                v_TKD,
                context.cu_seqlens_B1,
                context.max_seqlen,
                attention.softmax_scale,
                k_scale_K=k_scale_K,
                v_scale_K=v_scale_K,
                kv_mode=v.mode,
                quantize_k=k.mode != "none",
            )

        return attend


def attribute(examined: Examined) -> Attribution:
    """The mismatch of the examination's log-probs, by kind. None where all is equal, whatever the modules would say."""
    if examined.report.equal:
        return Attribution(Mismatch(0.0, 0.0), (), Mismatch(0.0, 0.0))
    sides = Sides(examined)
    treatments = sides.treatments()
    kinds = [kind for kind in KINDS if kind in treatments]
    mismatches: dict[Kinds, Mismatch] = {}
    module_pass = examined.patient.module_pass(examined.sequences)
    for count in range(len(kinds) + 1):
        for subset in map(frozenset, combinations(kinds, count)):
            with sides.swapped(subset):
                logprobs_N = forward_logprobs(module_pass, examined.sequences)
            mismatches[subset] = mismatch_of(examined.engine_logprobs_N, logprobs_N)
    whole, left = mismatches[frozenset()], mismatches[frozenset(kinds)]
    measures = [
        shapley(kinds, {subset: found[which] / (whole[which] or 1.0) for subset, found in mismatches.items()})
        for which in range(2)
    ]
    return Attribution(
        mismatch=whole,
        shares=tuple(Share(kind, measures[0][kind], measures[1][kind], *treatments[kind]) for kind in kinds),
        rest=Mismatch(*(after / (before or 1.0) for after, before in zip(left, whole, strict=True))),
    )


def mismatch_of(generator_N: Tensor, trainer_N: Tensor) -> Mismatch:
    difference_N = trainer_N.double() - generator_N.double()
    return Mismatch(float(difference_N.abs().mean()), float((difference_N.expm1() - difference_N).mean()))


def shapley(kinds: Sequence[str], left: Mapping[Kinds, float]) -> dict[str, float]:
    """What each kind takes off `left`, averaged over the orders of moving them; sums to left of none - left of all."""
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


# ---------------------------------------------------------------- the linears


def _product(ours: Projection, theirs: Projection, kinds: Kinds) -> Callable[[Tensor], Tensor]:
    weights = theirs if WEIGHTS in kinds else ours
    inputs = theirs if ACTIVATIONS in kinds else ours
    if isinstance(weights, Float8Linear) == isinstance(inputs, Float8Linear):
        return weights.forward

    def product(x_TI: Tensor) -> Tensor:
        wide = torch.float64 if x_TI.device.type == "cpu" else torch.float32
        if isinstance(inputs, Float8Linear):
            operand = dequantize_activation(quantize_activation(x_TI, inputs.power_of_two))
        else:
            operand = x_TI
        weight = dequantize_weight(weights.quantized) if isinstance(weights, Float8Linear) else weights.weight
        y_TO = (operand.to(wide) @ weight.detach().to(wide).t()).float()
        y_TO = (y_TO if weights.bias is None else y_TO + weights.bias).to(x_TI.dtype)
        return y_TO if weights.lora is None else weights.lora(y_TO, x_TI)

    return product


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
