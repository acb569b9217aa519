"""Warnings about FP8 numerics, with their remedy."""

from __future__ import annotations

from collections.abc import Mapping

from octetrl.config.schema import Fp8Config

KV_SATURATION = "fp8/kv_saturation"


def kv_saturation_warning(metrics: Mapping[str, float], config: Fp8Config) -> str | None:
    """Return a warning if the share of K and V values clamped to ±448 exceeds `fp8.saturation_warn`, otherwise None.

    Without a measurement it returns None. Calibrated scales come from the previous step, so they may be too small for
    growing K and V."""
    share = metrics.get(KV_SATURATION)
    if share is None or share <= config.saturation_warn:
        return None
    remedy = "look for non-finite or huge activations, and use fp8.kv_cache=none to compare"
    if config.kv_cache == "calibrated":
        margin = config.calibration_margin
        exact = "" if config.calibration == "exact" else "fp8.calibration=exact (measured with the new weights) or "
        larger = f"fp8.calibration_margin={min(4.0, 1.5 * margin):.2f} (now {margin})"
        remedy = f"set {larger}, or use {exact}fp8.kv_cache=int8"
    return (
        f"{KV_SATURATION} is {share:.2%}, above fp8.saturation_warn={config.saturation_warn:.2%}: that share of K and V"
        f" was clamped in the cache; {remedy}"
    )
