"""The memory estimate of `octetrl check` against what is allocated: by the models that a run has beside its policy, and
by a worker that only generates."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.config.load import recipe_from_mapping
from octetrl.config.memory import ScalarModel, estimate_memory
from octetrl.config.schema import Recipe
from octetrl.config.worker_memory import of_engine, on_each_worker
from octetrl.fp8.policy import precision_policy, scoring_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.run.tiny_model import save_tokenizer
from octetrl.shapes.presets import preset_config
from octetrl.trainer.critic import Critic
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.shared_weights import keep_owned_rows
from octetrl.workers.build import build_worker, fill_weights
from octetrl.workers.model_shape import model_spec
from octetrl.workers.models import ModelBuilder
from octetrl.workers.scalar_models import scalar_decoder
from tests.allocated import Allocated
from tests.team import run_team

CPU = torch.device("cpu")
SPEC = replace(spec_from_config(preset_config("tiny")), num_layers=2, num_heads=8, num_kv_heads=4)
PRECISIONS = ["bf16", "fp8_rollout", "fp8_full"]


def recipe_of(precision: str, **sections: Any) -> Recipe:
    model = {"model": {"preset": "tiny", "tokenizer": "t", "init": "random"}}
    return recipe_from_mapping({**model, "environment": {"dataset": "d"}, "precision": precision, **sections})


def estimated(recipe: Recipe, name: str, **models: Any) -> int:
    """Of a GPU: the values of emulated codes are allocated by the first product, not when a model is built."""
    precisions = precision_policy(SPEC, recipe.fp8).precisions()
    whole = estimate_memory(recipe, SPEC, precisions, on_gpu=True, device_bytes=None, **models)
    return next(part.num_bytes for part in on_each_worker(recipe, whole, None).parts if part.name == name)


def allocated_by(build: Callable[[], tuple[Decoder, Any]]) -> int:
    """Bytes that are kept of what `build` allocates, without the table of rotary angles."""
    with Allocated() as allocated:
        model, rest = build()
    kept = allocated.now() - sum(one.nbytes for one in model.rotary.buffers())
    del rest
    return kept


@pytest.mark.parametrize("kind", ["reference", "reward model"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_that_scores_is_codes_and_what_is_not_fp8(kind: str, precision: str) -> None:
    recipe = recipe_of(precision, algorithm={"kl_coefficient": 0.1 if kind == "reference" else 0.0})
    policy = precision_policy(SPEC, recipe.fp8) if kind == "reference" else scoring_policy(SPEC, recipe.fp8)

    def reference() -> tuple[Decoder, None]:
        built = ModelBuilder(recipe, SPEC, policy, CPU, lambda model, rows: fill_weights(model, recipe, rows), ALONE)
        return built._first_policy(Decoder(SPEC, policy, "train", device="meta")), None

    def reward_model() -> tuple[Decoder, None]:
        model = scalar_decoder(recipe, SPEC, policy, CPU, fp8_weights=False)
        model.random_init(0)
        model.drop_fp8_weights()
        return model, None

    if kind == "reference":
        assert allocated_by(reference) == pytest.approx(estimated(recipe, "reference model"), rel=0.005)
        return
    scorer = ScalarModel(SPEC, replace(policy.precisions(), fp8_rollout=[]))
    assert allocated_by(reward_model) == pytest.approx(estimated(recipe, "reward model", scorer=scorer), rel=0.005)


@pytest.mark.parametrize(
    ("precision", "count", "gradients"),
    [("bf16", 2, "local"), ("fp8", 1, "local"), ("fp8", 2, "local"), ("fp8", 3, "sharded")],
)
def test_a_critic_on_several_workers(precision: str, count: int, gradients: Any) -> None:
    """Weights, gradient sums, moments and masters. Transposed codes come with the first backward."""
    cluster = {"gradients": gradients} | ({"gpus": count} if count > 1 else {})
    recipe = recipe_of(precision, algorithm={"name": "ppo"}, cluster=cluster, critic={"optimizer": {"states": "8bit"}})
    policy = precision_policy(SPEC, recipe.fp8)

    def work(peers: Peers) -> int:
        def build() -> tuple[Decoder, Critic]:
            model = scalar_decoder(recipe, SPEC, policy, CPU, fp8_weights=peers.share.count == 1)
            keep_owned_rows(model, peers)
            model.random_init(0)
            return model, Critic(model, recipe.critic, recipe.trainer, total_steps=1, peers=peers)

        return allocated_by(build)

    found = run_team(count, work, gradients=gradients) if count > 1 else [work(ALONE)]
    critic = ScalarModel(SPEC, replace(policy.precisions(), fp8_rollout=[]))
    transposed = sum(linear.num_weights for _, linear in SPEC.linears()) if precision == "fp8" else 0
    expected = estimated(recipe, "critic", critic=critic) - transposed
    assert sum(found) / count == pytest.approx(expected, rel=0.005)
    assert max(found) <= 1.15 * expected, "shares differ by at most a block of 128 rows of each weight"


TABLES = 200_000  # bytes: RoPE's tables, and the rows of the engine's batch


@pytest.mark.parametrize("lora", [{}, {"lora": {}}], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["fp8_full", "fp8_rollout", "bf16"])
def test_the_weights_of_a_worker_that_generates(precision: str, lora: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    save_tokenizer(["a b"], tokenizer)
    limits = {"max_prompt_tokens": 16, "max_new_tokens": 16, "prompts_per_step": 2, "group_size": 2}
    model = {"preset": "tiny", "init": "random", "tokenizer": str(tokenizer), "context_length": 1024, **lora}
    roles = {"trainer_cpus": 1, "engine_cpus": 1}
    recipe = recipe_of(precision, model=model, rollout=limits, cluster=roles)
    with Allocated() as allocated:
        worker = build_worker(recipe, CPU, role="generates")
        gc.collect()
        held = allocated.now()
    assert worker.worker is not None
    spec = model_spec(recipe)
    precisions = precision_policy(spec, recipe.fp8).precisions()
    both = estimate_memory(recipe, spec, precisions, on_gpu=False, device_bytes=None)
    estimate = of_engine(recipe, spec, precisions, both, on_gpu=False, available=None)
    (weights,) = [part.num_bytes for part in estimate.parts if part.name == "weights"]
    assert 0 <= held - weights < TABLES < weights / 5
