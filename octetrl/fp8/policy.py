"""The table of what is FP8 (docs/fp8.md §3), for both sides of the run.

Every linear of the layers' blocks (shapes/blocks.py) has a format for the rollout and a format for training. K and V
have a format in the cache. Embeddings, norms, the residual stream, RoPE, attention arithmetic and `lm_head` are BF16,
and log-softmax and loss are float32. These are fixed and therefore not in the table. Every completion carries a digest
of the table. The trainer refuses samples with another digest, so no layer can be BF16 on one side only without notice.

This file does not import torch, so `octetrl check` can print the table at once.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.memory import Precisions
from octetrl.shapes.blocks import KVMode
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

Format = Literal["bf16", "fp8"]
Side = Literal["rollout", "train"]
PUBLISHED_IN_MXFP4 = frozenset({"gpt_oss"})  # FP8 holds these weights exactly if its scales are powers of two
PAYS_FROM = 1 << 35  # tokens of a micro-batch x hidden size squared, on an H200: docs/fp8.md, "When FP8 training pays"


@dataclass(frozen=True, slots=True)
class LinearFormat:
    name: str  # "layers.3.mlp.down_proj"
    rollout: Format
    train: Format


class CachedFormat(NamedTuple):
    name: str  # of a cached tensor: "K"
    format: Format


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    linears: tuple[LinearFormat, ...]
    kv_mode: KVMode
    cache: tuple[
        CachedFormat, ...
    ]  # of what the layers cache; BF16 where the recipe or `CachedTensor.never_fp8` says so
    power_of_two: bool
    square_wgrad: bool  # wgrad's activations in blocks of 128 tokens x 128 channels, not 128 x 1
    mx: bool = False  # FP8 linears are MXFP8: blocks of 32 with scales that are powers of two
    modules_of: str | None = None  # the family whose layers transformers' modules compute; None: our blocks do

    def format_of(self, name: str, side: Side) -> Format:
        """Format of the linear `name`; KeyError for a name that is not in the model."""
        for linear in self.linears:
            if linear.name == name:
                return getattr(linear, side)
        raise KeyError(name)

    def kinds(self) -> dict[str, list[LinearFormat]]:
        """The linears by their names in a layer, such as `mlp.down_proj`."""
        found: dict[str, list[LinearFormat]] = {}
        for linear in self.linears:
            found.setdefault(linear.name.split(".", 2)[2], []).append(linear)
        return found

    @property
    def same_on_both_sides(self) -> bool:
        """Whether engine and trainer use the same formats. They do not under `fp8_rollout`."""
        return all(linear.rollout == linear.train for linear in self.linears)

    def uses_fp8(self, side: Side) -> bool:
        return any(getattr(linear, side) == "fp8" for linear in self.linears)

    def cached_as(self, name: str) -> Format:
        """Format of a cached tensor; KeyError for a name that is not in the model."""
        return dict(self.cache)[name]

    def precisions(self) -> Precisions:
        """The names of what is FP8, for the memory estimate."""
        return Precisions(
            fp8_rollout=[linear.name for linear in self.linears if linear.rollout == "fp8"],
            fp8_train=[linear.name for linear in self.linears if linear.train == "fp8"],
            fp8_cache=[name for name, stored in self.cache if stored == "fp8"],
            mx=self.mx,
        )

    @property
    def digest(self) -> str:
        """16 hex digits that identify the whole table."""
        table = [[linear.name, linear.rollout, linear.train] for linear in self.linears]
        text = json.dumps([table, self.kv_mode, *(x for _, x in self.cache), self.power_of_two, *["mxfp8"] * self.mx])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_IN_WORDS = {
    ("bf16", "bf16"): "{plain}",
    ("fp8", "fp8"): "{codes}",
    ("fp8", "bf16"): "{codes} in the rollout, {plain} in training",
    ("bf16", "fp8"): "{plain} in the rollout, {codes} in training",
}


def formats_by_layer(policy: PrecisionPolicy, plain: str = "BF16") -> list[tuple[str, str]]:
    """The linears' formats in words, one pair for neighbouring layers with the same ones: `("1 to 29", "FP8")`.

    plain: what the weights are that are not FP8."""
    by_layer: dict[int, dict[str, tuple[Format, Format]]] = {}
    for linear in policy.linears:
        _, layer, kind = linear.name.split(".", 2)
        by_layer.setdefault(int(layer), {})[kind] = (linear.rollout, linear.train)
    found, codes = [], "MXFP8" if policy.mx else "FP8"
    for formats, layers in groupby(sorted(by_layer), key=lambda layer: by_layer[layer]):
        same = list(layers)
        kinds: dict[tuple[Format, Format], list[str]] = {}
        for kind, form in formats.items():
            kinds.setdefault(form, []).append(kind)
        usual = max(kinds, key=lambda form: len(kinds[form]))
        others = (f"{', '.join(names)} {_IN_WORDS[form]}" for form, names in kinds.items() if form != usual)
        place = str(same[0]) if len(same) == 1 else f"{same[0]} to {same[-1]}"
        found.append((place, "; ".join([_IN_WORDS[usual], *others]).format(plain=plain, codes=codes)))
    return found


def tokens_that_pay(hidden_size: int) -> int:
    """Smallest micro-batch, in tokens, at which training in FP8 is faster than in BF16 for a model of this width."""
    return -(-PAYS_FROM // hidden_size**2)


def precision_policy(spec: ModelSpec, fp8: Fp8Config) -> PrecisionPolicy:
    """The table for this model and these settings.

    Raises UserError if an `ignore` pattern matches no linear, because a typing error would silently change the
    numerics.
    """
    names = [name for name, _ in spec.linears()]
    for pattern in fp8.ignore:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"fp8.ignore: '{pattern}' matches no linear of this model; names look like '{names[0]}'"
                f" and '*' stands for anything: correct the pattern or remove it"
            )
    if fp8.kv_cache == "int8" and not spec.calibrates:
        raise UserError(
            "fp8.kv_cache: 'int8' is not available for latent attention (MLA); use 'dynamic' (E4M3 with one scale per"
            " token) or 'none'"
        )
    _check_cache_tensors(spec, fp8)
    linears = []
    for name in names:
        high = _stays_bf16(name, spec, fp8)
        rollout: Format = "fp8" if fp8.rollout and not high else "bf16"
        train: Format = "fp8" if fp8.train and not high else "bf16"
        linears.append(LinearFormat(name, rollout, train))
    return PrecisionPolicy(
        linears=tuple(linears),
        kv_mode="dynamic" if fp8.kv_cache == "calibrated" and not spec.calibrates else fp8.kv_cache,
        cache=_cached_formats(spec, fp8),
        power_of_two=spec.family in PUBLISHED_IN_MXFP4 if fp8.power_of_two is None else fp8.power_of_two,
        square_wgrad=fp8.wgrad_blocks == "square",
        mx=fp8.format == "mxfp8",
        modules_of=None if spec.hf_config is None else spec.family,
    )


def scoring_policy(spec: ModelSpec, fp8: Fp8Config) -> PrecisionPolicy:
    """The table of a reward model that scores. It is FP8 if the rollout is, because scoring is part of the rollout.
    `fp8.ignore` and `fp8.kv_cache_tensors` do not apply, because they name linears and cached tensors of the policy."""
    own = {"train": fp8.rollout, "ignore": (), "kv_cache_tensors": "both"}
    return precision_policy(spec, fp8.model_copy(update=own))


def _check_cache_tensors(spec: ModelSpec, fp8: Fp8Config) -> None:
    """UserError: `fp8.kv_cache_tensors` names what this model does not cache, or what may not be FP8."""
    chosen = fp8.kv_cache_tensors
    if fp8.kv_cache == "none" or chosen == "both":
        return
    cached = {tensor.name: tensor for layer in range(spec.num_layers) for tensor in spec.cached(layer)}
    found = cached.get(chosen.upper())
    if found is None:
        raise UserError(
            f"fp8.kv_cache_tensors: '{chosen}' is not available for latent attention (MLA), which caches"
            f" {' and '.join(cached)} and no K and V; use 'both'"
        )
    if found.never_fp8 is not None:
        raise UserError(
            f"fp8.kv_cache_tensors: '{chosen}' would leave nothing in FP8, because {found.name} stays BF16 in this"
            f" model ({found.never_fp8}); use 'both', or fp8.kv_cache 'none'"
        )


def _cached_formats(spec: ModelSpec, fp8: Fp8Config) -> tuple[CachedFormat, ...]:
    found: dict[str, Format] = {}
    chosen = fp8.kv_cache_tensors
    for layer in range(spec.num_layers):
        for tensor in spec.cached(layer):
            left_out = chosen != "both" and tensor.name != chosen.upper()
            stored: Format = "bf16" if fp8.kv_cache == "none" or tensor.never_fp8 or left_out else "fp8"
            first = found.setdefault(tensor.name, stored)
            assert first == stored, f"layers cache '{tensor.name}' in two formats"
    return tuple(CachedFormat(name, stored) for name, stored in found.items())


def _stays_bf16(name: str, spec: ModelSpec, fp8: Fp8Config) -> bool:
    layer = int(name.split(".")[1])
    if layer < fp8.bf16_first_layers or layer >= spec.num_layers - fp8.bf16_last_layers:
        return True
    return any(fnmatch.fnmatch(name, pattern) for pattern in fp8.ignore)
