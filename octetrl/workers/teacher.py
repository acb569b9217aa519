"""The teacher of a distillation: a second model folder in the trainer's process, BF16 or FP8, read and never trained.

It may be of any size and of a family of its own; it must read the policy's tokens. Where its folder holds a tokenizer,
that must be the policy's; a vocabulary padded to another length is fine.
"""

from __future__ import annotations

from pathlib import Path

import torch

from octetrl.config.algorithm import DistillConfig
from octetrl.config.schema import Fp8Config, Recipe
from octetrl.config.validate import validate_with_spec
from octetrl.data.tokenizer import VOCABULARIES, Tokenizer, load_tokenizer
from octetrl.fp8.backends import BackendName
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.layers.weight_memory import LoadCount
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.shared_loading import load_shared


def teacher_fp8(recipe: Recipe) -> Fp8Config:
    """What of the teacher is FP8: its linears, or nothing."""
    uses_fp8 = _distillation(recipe).teacher_precision == "fp8"
    own = {"rollout": False, "train": uses_fp8, "kv_cache": "none", "ignore": ()}
    return recipe.fp8.model_copy(update={**own, "bf16_first_layers": 0, "bf16_last_layers": 0})


def teacher_policy(recipe: Recipe, spec: ModelSpec) -> PrecisionPolicy:
    return precision_policy(spec, teacher_fp8(recipe), recipe.numerics)


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
        model = Decoder(spec, policy, "train", dtype=dtype, device=device, backend=backend, fp8_weights=False)
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
