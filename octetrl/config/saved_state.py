"""Estimate the host memory of a checkpoint's copy (trainer/state_writer.py). No torch.

P is the number of trained parameters (with LoRA, of the adapters). b is the bytes of a value in the model's dtype, s
the bytes of a parameter's two moments.

    weights       b P
    optimizer     s P + 4 P      both moments, and the float32 master weights. No master weights with
                                 `stochastic_rounding` or float32 weights
    critic        both of these for PPO's value model
    reference     b P            only if it changes during the run (`reference_every`)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octetrl.config.lora import adapter_elements
from octetrl.config.memory import STATE_BYTES, ScalarModel
from octetrl.config.objective_settings import KlSettings
from octetrl.config.schema import OptimizerConfig, Recipe
from octetrl.shapes.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SavedState:
    """Size of a run's state, in bytes."""

    weights: int  # includes those of a reference that changes during the run
    optimizer: int

    @property
    def num_bytes(self) -> int:
        return self.weights + self.optimizer


def saves_beside_steps(recipe: Recipe) -> bool:
    """Whether a checkpoint is due before the run's last step. Only such a checkpoint is copied."""
    return 0 < recipe.checkpoint.every < recipe.steps


def saved_state(recipe: Recipe, spec: ModelSpec, critic: ScalarModel | None) -> SavedState:
    """Estimate the size of one checkpoint of the run."""
    weight_bytes = 2 if recipe.model.dtype == "bfloat16" else 4
    lora, algorithm = recipe.model.lora, recipe.algorithm
    trains_scalar = algorithm.name == "reward_model"
    if trains_scalar:
        spec = replace(spec, tied_embeddings=True)  # the scalar head replaces lm_head
    trained = spec.num_parameters
    if lora is not None:
        trained = adapter_elements(spec, lora) + (spec.hidden_size if trains_scalar else 0)
    weights = weight_bytes * trained
    optimizer = int(_optimizer_bytes(recipe.trainer.optimizer, weight_bytes) * trained)
    if isinstance(algorithm, KlSettings) and algorithm.keeps_reference and algorithm.reference_every:
        weights *= 2
    if critic is not None:
        elements = critic.trunk.num_parameters
        weights += weight_bytes * elements
        optimizer += int(_optimizer_bytes(recipe.critic.optimizer, weight_bytes) * elements)
    return SavedState(weights, optimizer)


def _optimizer_bytes(optimizer: OptimizerConfig, weight_bytes: int) -> float:
    """Bytes of the optimizer's state for one parameter."""
    has_master = optimizer.master == "float32" and weight_bytes == 2
    return STATE_BYTES[optimizer.states] + (4 if has_master else 0)
