"""Builds the models of a worker: the trainer's, the engine's, the reference or teacher, and the critic.

All but the critic are a `Decoder` under one `PrecisionPolicy`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from octetrl.algorithms.table import Algorithm
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer
from octetrl.engine.weights import share_weights
from octetrl.fp8.backends import BackendName, choose_backend
from octetrl.fp8.policy import PrecisionPolicy, Side
from octetrl.layers.weight_memory import LoadCount, Loading
from octetrl.models.decoder import Decoder
from octetrl.models.hf_weights import take_published_codes
from octetrl.models.published_codes import takes_published_codes
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.critic import Critic
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.shared_loading import load_shared
from octetrl.trainer.shared_weights import keep_owned_rows
from octetrl.workers.scalar_models import build_critic_model
from octetrl.workers.teacher import load_teacher, teacher_fp8

LoadWeights = Callable[[Decoder, Loading], None]


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """`load_weights` fills the trainer's model, and that of a reference. `trains` false: no weight will change.

    Only a worker that updates all rows of the weights has whole weights of FP8 linears (layers/weight_memory.py).
    Several workers fill a model together (trainer/shared_loading.py). `count`: what this one has loaded.
    """

    recipe: Recipe
    spec: ModelSpec
    policy: PrecisionPolicy
    device: torch.device
    load_weights: LoadWeights
    peers: Peers = ALONE
    trains: bool = True
    count: LoadCount = field(default_factory=LoadCount)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations that are not FP8."""
        dtype: torch.dtype = getattr(torch, self.recipe.model.dtype)
        return dtype

    def trainer_model(self) -> Decoder:
        """A model with loaded and quantised weights. With LoRA only the adapters are trained."""
        updates = self.trains and self.recipe.model.lora is None
        model = self._model("train", self.device, fp8_weights=updates and self.peers.share.count == 1)
        if updates:
            keep_owned_rows(model, self.peers)
        self._load(model, published=takes_published_codes(self.recipe))
        if model.lora is not None:
            model.train_adapters_alone()
        elif not updates:
            model.drop_fp8_weights()
        return model

    def engine_model(self, trainer_model: Decoder) -> Decoder:
        """The engine's model. Its tensors are those of `trainer_model`; another backend has none of ours."""
        if self.recipe.engine.backend != "octetrl":
            return trainer_model
        model = self._model("rollout", torch.device("meta"))
        share_weights(model, trainer_model)
        return model

    def reference(self, algorithm: Algorithm, trainer_model: Decoder, tokenizer: Tokenizer) -> Decoder | None:
        """The teacher, the policy at the start of the run, or None, as `algorithm` needs."""
        if algorithm.needs_teacher:
            uses_fp8 = teacher_fp8(self.recipe).train
            backend = choose_backend(self.device, self.recipe.fp8.emulate) if uses_fp8 else self._backend
            return load_teacher(self.recipe, tokenizer, self.device, backend, self.peers, self.count)
        return self._first_policy(trainer_model) if algorithm.needs_reference else None

    def _first_policy(self, trainer_model: Decoder) -> Decoder:
        """The policy at the start of the run. With LoRA it shares the frozen weights and has its own adapters."""
        if self.recipe.model.lora is None:
            model = self._model("train", self.device, fp8_weights=False)
            self._load(model)
            model.drop_fp8_weights()
            return model
        model = self._model("train", torch.device("meta"))
        share_weights(model, trainer_model)
        for _, adapter in model.adapters():
            adapter.own_tensors()
        return model

    def critic(self) -> Critic:
        """PPO's value model with its optimizer."""
        recipe = self.recipe
        model = build_critic_model(recipe, self.spec, self.device, self.peers, self.count)
        return Critic(
            model, recipe.critic, recipe.trainer, total_steps=recipe.steps, seed=recipe.seed, peers=self.peers
        )

    def _load(self, model: Decoder, *, published: bool = False) -> None:
        def load(model: Decoder, loading: Loading) -> None:
            self.load_weights(model, loading)
            model.requantize()
            if published:
                take_published_codes(model, Path(str(self.recipe.model.path)), loading)

        load_shared(model, self.peers, load, self.count)

    def _model(self, side: Side, device: torch.device, *, fp8_weights: bool = True) -> Decoder:
        return Decoder(
            self.spec,
            self.policy,
            side,
            dtype=self.dtype,
            device=device,
            backend=self._backend,
            lora=self.recipe.model.lora,
            group=self.peers.group,
            fp8_weights=fp8_weights,
        )

    @property
    def _backend(self) -> BackendName:
        """Depends on the device only if something is FP8. A BF16 run works on any GPU."""
        if self.policy.uses_fp8("rollout") or self.policy.uses_fp8("train"):
            return choose_backend(self.device, self.recipe.fp8.emulate)
        return "emulated"
