"""Reads and writes RoPE in a config.json: theta, the kind of scaling and its numbers. No torch.

Both spellings are read: transformers 4 (`rope_theta` and `rope_scaling` at the top) and 5 (both in
`rope_parameters`). Keys and defaults are those of transformers' `modeling_rope_utils.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octetrl.models.family import Family
from octetrl.shapes.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from octetrl.shapes.spec import MOST_TOKENS
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject, shown

KINDS = ("default", "linear", "llama3", "yarn")
LEAST, MOST = 1e-3, 1e6  # bounds of YaRN's and Llama 3's numbers; beyond them, angles overflow
MOST_FACTOR = 1e4  # by which a context is longer; published ones are below 100
MOST_GROWTH = 1e2  # largest factor on cos and sin, and so twice on the scores; published ones are below 2
SHARE = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"


def rope_parameters(config: JsonObject, default: Iterable[tuple[str, object]] = ()) -> JsonObject:
    """Theta, scaling and the rotated share in one mapping, from either spelling. `default`: if there is neither."""
    merged = {**config.object("rope_scaling"), **config.object("rope_parameters")} or dict(default)
    if per_layer := [key for key, value in merged.items() if isinstance(value, dict)]:
        raise UserError(
            f"RoPE of its own for '{per_layer[0]}' is not supported, only one for all layers; use another model"
        )
    if "rope_theta" not in merged and config.get("rope_theta") is not None:
        merged["rope_theta"] = config["rope_theta"]
    if SHARE not in merged and config.get(SHARE) is not None:
        merged[SHARE] = config[SHARE]
    return JsonObject(merged, config.where)


def rotated_size(rope: JsonObject, family: Family, head_size: int) -> int | None:
    """How many values of a head RoPE rotates, the first ones; None: all. `rope`: the result of `rope_parameters`."""
    if family.rotated_share is None:
        return None
    if family.rotated_share == 1:
        share = rope.get(SHARE)
        if share is not None and share != 1:
            raise UserError(f"{SHARE} {shown(share)} is not supported for {family.name}, only 1 is; use another model")
        return None
    share = rope.number(SHARE, family.rotated_share)
    size = int(head_size * share) if share <= 1 else 0
    if size % 2 or not size:
        raise rope.wrong(SHARE, f"a share is needed that rotates an even number of the {head_size} values of a head")
    return None if size == head_size else size


def rope_scaling(rope: JsonObject, config: JsonObject, max_positions: int) -> RopeScaling | None:
    """The scaling in `rope`, the result of `rope_parameters`. UserError: an unknown kind, or numbers that don't fit."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in KINDS:
        known = ", ".join(f"'{name}'" for name in KINDS)
        raise UserError(f"RoPE type '{kind}' is not supported, only {known} are; use another model")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_factor(rope))
    if kind == "llama3":
        return _llama3(rope)
    outside = config.get(ORIGINAL) is not None  # at the top of config.json it has priority, as in transformers
    original = (config if outside else rope).integer(ORIGINAL, max_positions, most=MOST_TOKENS)
    return _yarn(rope, original, max_positions)


def scaled_positions(scaling: RopeScaling | None, max_positions: int) -> int:
    """The longest context. Recipes of YaRN often leave `max_position_embeddings` at the original length."""
    if not isinstance(scaling, YarnScaling):
        return max_positions
    return max(max_positions, int(min(scaling.factor * scaling.original_max_positions, MOST_TOKENS)))


def scaling_field(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` in the config.json of an export."""
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            ORIGINAL: scaling.original_max_positions,
        }
    optional = {
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
        "attention_factor": scaling.explicit_factor,
    }
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        ORIGINAL: scaling.original_max_positions,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
        **{key: value for key, value in optional.items() if value is not None},
    }


def _factor(rope: JsonObject, default: float | None = None) -> float:
    factor = rope.number("factor", default)
    if factor < 1:
        raise rope.wrong("factor", "1 or more is needed")
    if factor > MOST_FACTOR:
        raise rope.wrong("factor", f"at most {MOST_FACTOR:g} is allowed")
    return factor


def _llama3(rope: JsonObject) -> Llama3Scaling:
    low, high = (rope.number(f"{name}_freq_factor", least=LEAST, most=MOST) for name in ("low", "high"))
    if low >= high:
        raise rope.wrong("low_freq_factor", f"less than high_freq_factor {high:g} is needed")
    return Llama3Scaling(
        factor=_factor(rope),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=rope.integer(ORIGINAL, most=MOST_TOKENS),
    )


def _yarn(rope: JsonObject, original: int, max_positions: int) -> YarnScaling:
    def optional(key: str) -> float | None:
        if rope.get(key) in (None, 0):
            return None
        return rope.number(key, least=LEAST, most=MOST if key.startswith("beta") else MOST_GROWTH)

    fast, slow = optional("beta_fast") or 32.0, optional("beta_slow") or 1.0
    if fast < slow:
        raise rope.wrong("beta_fast", f"at least beta_slow {slow:g} is needed")
    rope.number("attention_factor", 1.0)  # 0 is an error; the other numbers have their defaults then
    if rope.number("rope_theta", 2.0) <= 1:
        raise rope.wrong("rope_theta", "YaRN needs more than 1")
    return YarnScaling(
        factor=_factor(rope, max(1.0, max_positions / original)),
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        explicit_factor=optional("attention_factor"),
        truncate=rope.flag("truncate", True),
    )
