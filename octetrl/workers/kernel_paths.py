"""Which kernels a run on a GPU takes: metrics of every step, and a line when one of them gives way.

    rollout/fused           1 where the rollout's forward is the fused one, 0 where it is the modules' (slower)
    train/fused             the same of training
    fp8/gluon_fallbacks     Gluon kernels (FP8 GEMMs, attention) that do not compile here; plain Triton runs,
                            slower, with the same bits

On a CPU there is one path, and no metric of it. `octetrl check` and the run's first lines say what is known before
(fp8/parity.py: `slow_paths`); these say what happened.
"""

from __future__ import annotations

from octetrl.kernels import gluon
from octetrl.models.decoder import Decoder
from octetrl.models.rollout_forward import can_fuse


def path_metrics(*, trained: Decoder, generating: Decoder | None) -> dict[str, float]:
    """`generating`: the engine's model; None where nothing is drawn."""
    if not trained.lm_head_weight.is_cuda:
        return {}
    metrics = {"train/fused": float(can_fuse(trained)), "fp8/gluon_fallbacks": float(len(gluon.fallbacks))}
    if generating is not None:
        metrics["rollout/fused"] = float(can_fuse(generating))
    return metrics


class FallbackWatch:
    """Reports each Gluon kernel that does not compile once."""

    def __init__(self) -> None:
        self._reported = 0

    def warning(self) -> str | None:
        """One line about the fallbacks since the last call, or None."""
        new = list(gluon.fallbacks.values())[self._reported :]
        self._reported += len(new)
        if not new:
            return None
        return (
            f"{len(new)} Gluon kernels do not compile here and run as plain Triton, slower and with the same bits"
            f" (fp8/gluon_fallbacks); the first: {new[0]}"
        )
