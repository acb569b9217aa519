"""The reference policy of a KL term: its weights, when they change, and the scale of the KL coefficient.

    every `reference_every` updates   the reference becomes the current policy
    after each `train`                the KL coefficient's scale adapts to the measured KL (algorithms/kl_control.py)

A fixed reference has the weights with which the run began, and a checkpoint does not contain it. With LoRA only the
adapters of the reference change; the base weights are the policy's.

The FP8 weights of a reference are dropped (`Decoder.drop_fp8_weights`): it takes the policy's codes, which those
weights would have too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octetrl.algorithms.table import Algorithm
from octetrl.fp8.quantize import Quantized
from octetrl.models.decoder import Decoder
from octetrl.shapes.blocks import SCALE_PER_TOKEN
from octetrl.trainer.optimizer import copy_all

KL_SCALE, CODES, SCALE = "kl_scale", ".codes", ".scale"


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
            self._copy(_tensors(policy, self.model))
        return found

    def replays(self, kv_mode: str) -> bool:
        """Whether its forward quantises K and V as the policy's does. Calibrated scales belong to the policy only."""
        return kv_mode in SCALE_PER_TOKEN and self.model is not None and self.model.policy.kv_mode == kv_mode

    def state(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint: weights and scale, each only if it changes during the run."""
        state: dict[str, Tensor] = {}
        if self.model is not None and self._algorithm.reference_every:
            state |= {f"reference.{name}": tensor for name, tensor in _tensors(self.model, self.model).items()}
        if self._algorithm.adapt_kl is not None:
            state[KL_SCALE] = torch.tensor(self.kl_scale, dtype=torch.float64)
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, in place. UserError if it belongs to another model."""
        weights = {name.removeprefix("reference."): tensor for name, tensor in state.items() if name != KL_SCALE}
        if weights:
            self._adapt_to(weights)
            self._copy(weights)
        if KL_SCALE in state:
            self.kl_scale = float(state[KL_SCALE])

    def _adapt_to(self, saved: dict[str, Tensor]) -> None:
        """Makes a state of weights one of codes, or this reference one of codes, where the other number of workers that
        saved it had the other kind."""
        assert self.model is not None, "a run without a reference has no weights to load"
        for name, linear in self.model.float8_linears():
            weight = f"{name}.weight"
            if linear.weight is None and weight in saved and saved[weight].shape == linear.codes.shape:
                made = linear.quantize(saved.pop(weight).to(linear.codes.device))
                saved |= _codes_of(name, made)
            elif linear.weight is not None and f"{name}{CODES}" in saved:
                linear.drop_weight()

    def _copy(self, weights: Mapping[str, Tensor]) -> None:
        assert self.model is not None, "a run without a reference has no weights to copy into"
        copy_all(_tensors(self.model, self.model), weights, what="reference")
        self.model.requantize()


def _tensors(model: Decoder, like: Decoder) -> dict[str, Tensor]:
    """Live tensors of `model`: codes and scales where `like` has no weight, and all other parameters that
    change."""
    dropped = {name for name, linear in like.float8_linears() if linear.weight is None and like.lora is None}
    moved = () if like.lora is not None else model.spec.without_gradient()  # correction biases of routers
    changing = dict(model.trained_parameters()) | {name: model.get_parameter(name) for name in moved}
    tensors = {
        name: parameter.detach() for name, parameter in changing.items() if name.removesuffix(".weight") not in dropped
    }
    for name, linear in model.float8_linears():
        if name in dropped:
            tensors |= _codes_of(name, linear.quantized)
    return tensors


def _codes_of(name: str, held: Quantized) -> dict[str, Tensor]:
    return {f"{name}{CODES}": held.codes, f"{name}{SCALE}": held.scale}
