"""What several workers save: the same number goes on to the bit, and any other has the same weights and moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import (
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    RouterConfig,
    TrainerConfig,
)
from octetrl.models.families import spec_from_config
from octetrl.models.row_shards import RowShards
from octetrl.models.weight_files import SINGLE
from octetrl.records import PackedBatch
from octetrl.shapes.presets import preset_config
from octetrl.trainer import checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.packing import pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.worker import Worker
from tests.objectives import objective
from tests.parity.shapes import TINY
from tests.parity.short_run import worker_of
from tests.parity.sides import PRECISIONS
from tests.team import run_team
from tests.unit.trainer.tiny_trainer import random_samples, supervised

SPEC = replace(TINY["qwen3"], hidden_size=72, intermediate_size=200, vocab_size=301)  # several blocks, short last ones
# Experts whose rows are no multiples of 128, with a correction bias.
MOE = spec_from_config(
    preset_config("tiny-mla-moe") | {"num_hidden_layers": 2, "moe_intermediate_size": 40, "vocab_size": 301}
)
Saved = Callable[[Path], list[WrittenFile]]


def worker(peers: Peers, kind: str) -> Worker:
    lora = LoraConfig(rank=4) if kind == "lora" else None
    algorithm = objective(name="sft")
    if kind == "ppo":
        algorithm = objective(name="ppo")
    elif kind == "reference":
        algorithm = objective(kl_coefficient=0.1, reference_every=2)
    recipe = Recipe(
        model=ModelConfig(preset="tiny", init="random", context_length=SPEC.max_positions, lora=lora),
        fp8=PRECISIONS["bf16" if kind in ("bf16", "lora") else "fp8"],
        algorithm=algorithm,
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-2, states="8bit" if kind in ("fp8", "moe") else "float32"),
            tokens_per_micro_batch=64,
            router=RouterConfig(bias_rate=0.01 if kind == "moe" else 0.0),
        ),
        engine=EngineConfig(kv_cache_tokens=1 << 12, max_batch=4),
        steps=9,
    )
    return worker_of(recipe, MOE if kind == "moe" else SPEC, "cpu", peers)


def step(one: Worker, number: int) -> str:
    """An update and its publishing; the digest of what the engine then holds."""
    samples = random_samples(8, number, policy_version=None)
    if one.recipe.algorithm.name == "sft":
        samples = supervised(samples)
    whole: PackedBatch = pack(samples, one.layout, "token")
    share = one.peers.share
    own = tuple(minibatch[share.rank :: share.count] for minibatch in whole.minibatches)
    return one.publish(one.train(replace(whole, minibatches=own)).policy_version).weights_digest


def save(folder: Path, workers: list[Worker]) -> Path:
    def write(place: Path) -> list[WrittenFile]:
        return [file for one in workers for file in one.write_state(place, copied=True)]

    assert [one.copy_state() for one in workers] == [None] * len(workers)
    return checkpoint.save(folder, 2, {}, write_more=write)


def owned(one: Worker) -> dict[str, Tensor]:
    """Copies of the rows of weights and state that this worker owns, critic and all, with the codes that it has."""
    state = one.trainer.state()
    found = {f"weight/{name}": tensor for name, tensor in state.weights.items()} | dict(state.optimizer)
    if one.trainer.critic is not None:
        critic = one.trainer.critic.state()
        found |= {f"critic weight/{name}": tensor for name, tensor in critic.weights.items()}
        found |= {f"critic {name}": tensor for name, tensor in critic.optimizer.items()}
    models = {"codes": one.trainer_model}
    if one.trainer.reference.model is not None:
        models["codes of the reference"] = one.trainer.reference.model
    for what, model in models.items():
        found |= {f"{what} {name}": linear.codes.view(torch.uint8) for name, linear in model.float8_linears()}
        found |= {f"{what} {name}": held for name, held in model.named_parameters() if name.endswith("correction_bias")}
    return {name: tensor.clone() for name, tensor in found.items()}


def whole_of(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all workers, joined; what is on every worker must be equal there."""
    names = dict.fromkeys(name for part in parts for name in part)
    joined: dict[str, Tensor] = {}
    for name in names:
        own = [part[name] for part in parts if name in part]
        if name.startswith("codes") or own[0].dim() == 0:
            assert all(torch.equal(own[0], other) for other in own), name
            joined[name] = own[0]
        else:
            joined[name] = torch.cat(own)
    return joined


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def loaded(path: Path, kind: str, count: int) -> dict[str, Tensor]:
    def work(peers: Peers) -> dict[str, Tensor]:
        one = worker(peers, kind)
        one.load(checkpoint.load(path), 2)
        assert one.policy_version == 2
        return owned(one)

    return whole_of(list(run_team(count, work)) if count > 1 else [work(ALONE)])


@pytest.mark.parametrize("kind", ["bf16", "fp8", "lora", "ppo", "moe", "reference"])
def test_a_run_goes_on_from_what_any_number_of_workers_saved(kind: str, tmp_path: Path) -> None:
    def trained(peers: Peers) -> Worker:
        one = worker(peers, kind)
        for number in (1, 2):
            step(one, number)
        return one

    def begun(peers: Peers) -> tuple[Worker, dict[str, Tensor], list[WrittenFile], str, dict[str, Tensor]]:
        """Saves after step 2 and runs step 3 before the copy is written."""
        one = trained(peers)
        before = owned(one)
        assert one.copy_state() is None
        digest = step(one, 3)
        folder = tmp_path / "parts"
        folder.mkdir(exist_ok=True)
        return one, before, one.write_state(folder, copied=True), digest, owned(one)

    def resumed(peers: Peers) -> tuple[str, dict[str, Tensor]]:
        one = worker(peers, kind)
        one.load(checkpoint.load(path), 2)
        return step(one, 3), owned(one)

    team: list[Any] = run_team(2, begun, deadline_seconds=60)
    path = checkpoint.save(tmp_path / "two", 2, {}, write_more=lambda place: _moved(tmp_path / "parts", place, team))
    assert not (path / SINGLE).exists() and RowShards.find(path) is not None
    saved = whole_of([before for _, before, *_ in team])
    for (_, _, _, digest, after), (again, state) in zip(team, run_team(2, resumed, deadline_seconds=60), strict=True):
        assert digest == again
        same(after, state)
    same(loaded(path, kind, 1), saved)
    same(loaded(path, kind, 3), saved)
    alone = trained(ALONE)
    path = save(tmp_path / "one", [alone])
    assert RowShards.find(path) is None
    same(loaded(path, kind, 3), owned(alone))


def _moved(parts: Path, place: Path, team: list[Any]) -> list[WrittenFile]:
    for file in parts.iterdir():
        file.rename(place / file.name)
    return [file for one in team for file in one[2]]
