"""What is FP8, in one table (docs/fp8.md §3), for both sides of the run.

Every linear that the layers' blocks list (config/blocks.py) gets a format for the rollout and a format for training; K
and V get a format in the cache. Embeddings, norms, the residual stream, RoPE, attention arithmetic and `lm_head` are
BF16, log-softmax and loss float32: they are not in the table because nothing can change them. A digest of the table
travels with every completion; the trainer refuses samples whose digest is not its own, so a layer that is BF16 on one
side only cannot go unseen.

Torch-free, so that `octetrl check` can print it at once.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from octetrl.config.errors import UserError
from octetrl.config.schema import Fp8Config, Numerics
from octetrl.config.spec import ModelSpec

Format = Literal["bf16", "fp8"]
Side = Literal["rollout", "train"]
PAYS_FROM = 1 << 35  # tokens of a micro-batch x hidden size squared, on an H200: docs/fp8.md, "When FP8 training pays"


@dataclass(frozen=True, slots=True)
class LinearFormat:
    name: str  # "layers.3.mlp.down_proj"
    rollout: Format
    train: Format


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    linears: tuple[LinearFormat, ...]
    kv_mode: Literal["none", "calibrated", "dynamic"]
    k_cache: Format  # BF16 where FP8 would ruin K (ModelSpec.fp8_k_is_safe)
    v_cache: Format
    power_of_two: bool
    square_wgrad: bool  # wgrad's activations in blocks of 128 tokens x 128 channels, not 128 x 1
    numerics: Numerics = "parity"  # whether sums keep one order; which tensors are FP8, and so the digest, is the same

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
        """Whether engine and trainer multiply by the same formats: not so under `fp8_rollout`."""
        return all(linear.rollout == linear.train for linear in self.linears)

    def uses_fp8(self, side: Side) -> bool:
        return any(getattr(linear, side) == "fp8" for linear in self.linears)

    @property
    def digest(self) -> str:
        """16 hex digits that name the whole table."""
        table = [[linear.name, linear.rollout, linear.train] for linear in self.linears]
        text = json.dumps([table, self.kv_mode, self.k_cache, self.v_cache, self.power_of_two])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokens_that_pay(hidden_size: int) -> int:
    """Tokens of a micro-batch from which on training in FP8 is worth while beside BF16, for a model of this width."""
    return -(-PAYS_FROM // hidden_size**2)


def precision_policy(spec: ModelSpec, fp8: Fp8Config, numerics: Numerics = "parity") -> PrecisionPolicy:
    """The table for this model and these settings.

    Raises UserError when an `ignore` pattern matches no linear: a typo there would quietly change the numerics.
    """
    names = [name for name, _ in spec.linears()]
    for pattern in fp8.ignore:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"fp8.ignore: '{pattern}' matches no linear of this model; names look like '{names[0]}'"
                f" and '*' stands for anything: correct the pattern or remove it"
            )
    linears = []
    for name in names:
        high = _stays_bf16(name, spec, fp8)
        rollout: Format = "fp8" if fp8.rollout and not high else "bf16"
        train: Format = "fp8" if fp8.train and not high else "bf16"
        linears.append(LinearFormat(name, rollout, train))
    quantized_cache = fp8.kv_cache != "none"
    return PrecisionPolicy(
        linears=tuple(linears),
        kv_mode=fp8.kv_cache,
        k_cache="fp8" if quantized_cache and spec.fp8_k_is_safe else "bf16",
        v_cache="fp8" if quantized_cache else "bf16",
        power_of_two=fp8.power_of_two,
        square_wgrad=fp8.wgrad_blocks == "square",
        numerics=numerics,
    )


def scoring_policy(spec: ModelSpec, fp8: Fp8Config, numerics: Numerics = "parity") -> PrecisionPolicy:
    """The table of a reward model that scores: FP8 where the rollout is, of which scoring is a part. `fp8.ignore` is
    left out, since it names the policy's linears."""
    return precision_policy(spec, fp8.model_copy(update={"train": fp8.rollout, "ignore": ()}), numerics)


def _stays_bf16(name: str, spec: ModelSpec, fp8: Fp8Config) -> bool:
    layer = int(name.split(".")[1])
    if layer < fp8.bf16_first_layers or layer >= spec.num_layers - fp8.bf16_last_layers:
        return True
    return any(fnmatch.fnmatch(name, pattern) for pattern in fp8.ignore)
