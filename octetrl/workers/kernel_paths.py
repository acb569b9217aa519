"""Which kernels a run on a GPU takes: metrics of every step, and a line when one of them gives way.

    rollout/fused           1 where the rollout's forward is the fused one, 0 where it is the modules' (slower)
    train/fused             the same of training
    rollout/captured        of workers that share a model: 1 where decode steps are CUDA graphs, else 0 (slower)
    fp8/gluon_fallbacks     Gluon kernels (FP8 GEMMs, attention) that do not compile here; plain Triton runs,
                            slower, with the same bits

On a CPU there is one path, and no metric of it. `octetrl check` and the run's first lines say what is known before
(fp8/slow_paths.py); these say what happened.
"""

from __future__ import annotations

from collections.abc import Mapping

from octetrl.engine.forward_graphs import can_capture
from octetrl.kernels import gluon
from octetrl.models.decoder import Decoder
from octetrl.models.rollout_forward import can_fuse
from octetrl.models.training_forward import fused_layer_runner


def path_metrics(*, trained: Decoder, generating: Decoder | None) -> dict[str, float]:
    """`generating`: the engine's model; None where nothing is drawn."""
    if not trained.lm_head_weight.is_cuda:
        return {}
    fused = fused_layer_runner(trained, "layer") is not None
    metrics = {"train/fused": float(fused), "fp8/gluon_fallbacks": float(len(gluon.fallbacks))}
    if generating is not None:
        metrics["rollout/fused"] = float(can_fuse(generating))
        if generating.group.size > 1:
            metrics["rollout/captured"] = float(can_capture(generating))
    return metrics


class FallbackWatch:
    """Reports once each Gluon kernel that does not compile, and decode steps that are not captured."""

    def __init__(self) -> None:
        self._reported = 0
        self._told_of_captures = False

    def warning(self, metrics: Mapping[str, float]) -> str | None:
        """One line about the fallbacks since the last call, or None. `metrics`: of the step."""
        if metrics.get("rollout/captured") == 0.0 and not self._told_of_captures:
            self._told_of_captures = True
            return (
                "decode steps are launched kernel by kernel, which is slow: the workers that share the model do not"
                " reach each other's GPU memory (rollout/captured: 0); logs/worker_0.log says why"
            )
        new = list(gluon.fallbacks.values())[self._reported :]
        self._reported += len(new)
        if not new:
            return None
        return (
            f"{len(new)} Gluon kernels do not compile here and run as plain Triton, slower and with the same bits"
            f" (fp8/gluon_fallbacks); the first: {new[0]}"
        )
