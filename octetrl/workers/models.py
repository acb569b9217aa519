"""Builds the models of a worker: the trainer's, the engine's, the reference or teacher, and the critic.

All but the critic are a `Decoder` under one `PrecisionPolicy`.

**Teacher.** The teacher of a distillation: a second model folder in the trainer's process, BF16 or FP8, read and never
trained.

It may be of any size and of a family of its own; it must read the policy's tokens. Where its folder holds a tokenizer,
that must be the policy's; a vocabulary padded to another length is fine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from octetrl.algorithms.table import Algorithm
from octetrl.config.algorithm import DistillConfig
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import Recipe
from octetrl.config.validate import validate_with_spec
from octetrl.data.tokenizer import VOCABULARIES, Tokenizer, load_tokenizer
from octetrl.engine.weights import share_weights
from octetrl.fp8.backends import BackendName
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.policy import PrecisionPolicy, Side, precision_policy
from octetrl.layers.weight_memory import LoadCount, Loading
from octetrl.models.decoder import Decoder
from octetrl.models.decoder_class import decoder_class
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights, take_published_codes
from octetrl.models.published_codes import takes_published_codes
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.trainer.critic import Critic
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.sharded_state import load_shared
from octetrl.trainer.shared_weights import keep_owned_rows
from octetrl.workers.scalar_models import build_critic_model

LoadWeights = Callable[[Decoder, Loading], None]


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """`load_weights` fills the trainer's model, and that of a reference. `trains` false: no weight will change.

    Only a worker that updates all rows of the weights has whole weights of FP8 linears (layers/weight_memory.py).
    Several workers fill a model together (trainer/sharded_state.py). `count`: what this one has loaded.
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
            backend = self._fp8_backend if uses_fp8 else self._backend
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
        return decoder_class(self.spec)(
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
            return self._fp8_backend
        return "emulated"

    @property
    def _fp8_backend(self) -> BackendName:
        return choose_backend(self.device, self.recipe.fp8.emulate, mx=self.policy.mx)


def teacher_fp8(recipe: Recipe) -> Fp8Config:
    """What of the teacher is FP8: its linears, or nothing."""
    uses_fp8 = _distillation(recipe).teacher_precision == "fp8"
    own = {"rollout": False, "train": uses_fp8, "kv_cache": "none", "ignore": ()}
    return recipe.fp8.model_copy(update={**own, "bf16_first_layers": 0, "bf16_last_layers": 0})


def teacher_policy(recipe: Recipe, spec: ModelSpec) -> PrecisionPolicy:
    return precision_policy(spec, teacher_fp8(recipe))


def load_teacher(
    recipe: Recipe,
    tokenizer: Tokenizer,
    device: torch.device,
    backend: BackendName,
    peers: Peers = ALONE,
    count: LoadCount | None = None,
) -> Decoder:
    """The teacher, loaded and quantised by all `peers` together. `count` is added to. UserError when the folder holds
    none that can teach this policy."""
    teacher = _distillation(recipe).teacher
    assert teacher is not None, "validated: distill has a teacher"
    folder = Path(teacher)
    try:
        spec = load_spec(folder)
        validate_with_spec(recipe.model_copy(update={"fp8": teacher_fp8(recipe)}), spec)
        if any((folder / name).is_file() for name in VOCABULARIES):
            _same_tokens(tokenizer, load_tokenizer(folder))
        if spec.vocab_size < len(tokenizer):
            raise UserError(f"its vocabulary of {spec.vocab_size} is smaller than the tokenizer's {len(tokenizer)}")
        dtype: torch.dtype = getattr(torch, recipe.model.dtype)
        policy = teacher_policy(recipe, spec)
        new = decoder_class(spec)
        model = new(spec, policy, "train", dtype=dtype, device=device, backend=backend, fp8_weights=False)
        load_shared(model, peers, lambda model, rows: load_weights(model, folder, loading=rows), count)
    except UserError as error:
        raise UserError(f"algorithm.teacher: {error}") from None
    model.drop_fp8_weights()
    return model.requires_grad_(False)


def _distillation(recipe: Recipe) -> DistillConfig:
    assert isinstance(recipe.algorithm, DistillConfig), f"{recipe.algorithm.name} has no teacher"
    return recipe.algorithm


def _same_tokens(policy: Tokenizer, teacher: Tokenizer) -> None:
    if policy.get_vocab() != teacher.get_vocab():
        raise UserError("its tokenizer is not the policy's, so their tokens can't be compared; take one of the same")
