"""The reference policy of a KL term: its weights, when they change, and the scale of the KL coefficient.

    every `reference_every` updates   the reference becomes the current policy
    after each `train`                the KL coefficient's scale adapts to the measured KL (algorithms/kl_control.py)

A fixed reference has the weights with which the run began, and a checkpoint does not contain it. With LoRA only the
adapters of the reference change; the base weights are the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octetrl.algorithms.table import Algorithm
from octetrl.models.decoder import Decoder
from octetrl.trainer.optimizer import copy_all

KL_SCALE = "kl_scale"


class Reference:
    """The reference model and the KL scale. `model` None: the algorithm has no KL term."""

    def __init__(self, model: Decoder | None, algorithm: Algorithm) -> None:
        assert (model is not None) == algorithm.needs_reference, "reference and needs_reference disagree"
        self.model, self._algorithm = model, algorithm
        self.kl_scale = 1.0  # factor of the KL coefficient

    def follow(self, policy: Decoder, policy_version: int, kl: float | None) -> dict[str, float]:
        """Update scale and weights after the `train` call that made `policy_version`; returns metrics.

        `kl`: the call's mean KL per token, in nats; None if the policy was not trained.
        """
        if self.model is None:
            return {}
        found = {}
        if self._algorithm.adapt_kl is not None:
            found["kl/scale"] = self.kl_scale
            if kl is not None:
                self.kl_scale = self._algorithm.adapt_kl(self.kl_scale, kl)
        every = self._algorithm.reference_every
        if every and policy_version % every == 0:
            self._copy({name: parameter.detach() for name, parameter in policy.trained_parameters()})
        return found

    def replays(self, kv_mode: str) -> bool:
        """Whether its forward quantises K and V as the policy's does. Calibrated scales belong to the policy only."""
        return kv_mode == "dynamic" and self.model is not None and self.model.policy.kv_mode == "dynamic"

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint: weights and scale, each only if it changes during the run."""
        state: dict[str, Tensor] = {}
        if self.model is not None and self._algorithm.reference_every:
            state |= {f"reference.{name}": weight.detach() for name, weight in self.model.trained_parameters()}
        if self._algorithm.adapt_kl is not None:
            state[KL_SCALE] = torch.tensor(self.kl_scale, dtype=torch.float64)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, in place. UserError if it belongs to another model."""
        weights = {name.removeprefix("reference."): tensor for name, tensor in state.items() if name != KL_SCALE}
        if weights:
            self._copy(weights)
        if KL_SCALE in state:
            self.kl_scale = float(state[KL_SCALE])

    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        assert self.model is not None, "a run without a reference has no weights to copy into"
        own = {name: parameter.detach() for name, parameter in self.model.trained_parameters()}
        copy_all(own, weights, what="reference")
        self.model.requantize()
