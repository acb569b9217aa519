"""The reference policy of a KL term: what it holds, when it moves, and how much its KL weighs.

    every `reference_every` updates   the reference becomes the present policy
    after each `train`                the KL coefficient's scale adapts to the KL seen (algorithms/kl_control.py)

A fixed reference holds the weights the run began with, and a checkpoint needs nothing of it. Of a policy with adapters
the adapters move; the weights beneath are the policy's own.
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
    """`model` None: the algorithm has no KL term."""

    def __init__(self, model: Decoder | None, algorithm: Algorithm) -> None:
        assert (model is not None) == algorithm.needs_reference, "reference and needs_reference disagree"
        self.model, self._algorithm = model, algorithm
        self.kl_scale = 1.0  # of the KL coefficient

    def follow(self, policy: Decoder, policy_version: int, kl: float | None) -> dict[str, float]:
        """After a `train` call that made `policy_version`: move what is due; further metrics. `kl` is the call's mean
        KL of a token, None where the policy was not trained."""
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
        """Whether its forward sees K and V as the policy's does: with scales made of the very tokens, where it is built
        for them; calibrated ones are the policy's own."""
        return kv_mode == "dynamic" and self.model is not None and self.model.policy.kv_mode == "dynamic"

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the weights where they move, the scale where it does; else nothing."""
        state: dict[str, Tensor] = {}
        if self.model is not None and self._algorithm.reference_every:
            state |= {f"reference.{name}": weight.detach() for name, weight in self.model.trained_parameters()}
        if self._algorithm.adapt_kl is not None:
            state[KL_SCALE] = torch.tensor(self.kl_scale, dtype=torch.float64)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`, in place. UserError when it is another model's."""
        weights = {name.removeprefix("reference."): tensor for name, tensor in state.items() if name != KL_SCALE}
        if weights:
            self._copy(weights)
        if KL_SCALE in state:
            self.kl_scale = float(state[KL_SCALE])

    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        assert self.model is not None, "a run without a reference has none to move"
        own = {name: parameter.detach() for name, parameter in self.model.trained_parameters()}
        copy_all(own, weights, what="reference")
        self.model.requantize()
