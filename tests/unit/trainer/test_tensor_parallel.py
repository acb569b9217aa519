"""One update by workers that share the model by rows, against the same update by one worker that has it whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.config.schema import LoraConfig, OptimizerConfig, TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.tensor_rows import cut_rows_of, pieces_of
from octetrl.records import PackedBatch
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.trainer import Trainer
from tests.grid import run_grid, smallest_shape
from tests.objectives import objective
from tests.team import share_of
from tests.unit.trainer.tiny_trainer import BF16, random_samples, supervised

SPEC = replace(smallest_shape("qwen3", 2), num_layers=1, qkv_bias=True, o_bias=True)


class Run(NamedTuple):
    metrics: list[dict[str, float]]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


def trainer_of(peers: Peers, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None) -> Trainer:
    part = SPEC.cut(TensorCut(peers.group.rank, peers.group.size))
    model = Decoder(part, precision_policy(SPEC, BF16), "train", dtype=dtype, group=peers.group, lora=lora)
    model.random_init(3)
    if lora is not None:
        model.draw_adapters(3)
        for _, adapter in model.adapters():  # zeros would hide a wrong gradient of A
            torch.nn.init.constant_(adapter.b, 0.01)
        model.train_adapters_alone()
    return Trainer(
        model,
        config=TrainerConfig(tokens_per_micro_batch=40, optimizer=OptimizerConfig(lr=1e-3, max_grad_norm=0.5)),
        algorithm=build_algorithm(objective(name="sft")),
        temperature=1.0,
        total_steps=9,
        peers=peers,
    )


def batch(seed: int = 0) -> PackedBatch:
    layout = PackingLayout(tokens_per_micro_batch=40, padded_attention=True)
    return pack(supervised(random_samples(4, seed)), layout, "token")


def trained(peers: Peers, lora: LoraConfig | None = None) -> Run:
    trainer = trainer_of(peers, lora=lora)
    metrics = [dict(trainer.train(share_of(batch(seed), peers), KVReplay(), None).metrics) for seed in range(2)]
    gradients = {slot.name: slot.gradient for slot in trainer.optimizer.slots}
    return Run(metrics, gradients, {name: one.detach() for name, one in trainer.model.named_parameters()})


@pytest.mark.parametrize(("groups", "lora"), [(1, None), (2, None), (1, LoraConfig(rank=4))])
def test_gradients_are_those_of_one_worker_but_for_the_order_of_sums(groups: int, lora: LoraConfig | None) -> None:
    alone, runs = trained(ALONE, lora), run_grid(groups, 2, lambda peers: trained(peers, lora))
    again = run_grid(groups, 2, lambda peers: trained(peers, lora))
    for rank, (run, repeated) in enumerate(zip(runs, again, strict=True)):
        cut = cut_rows_of(SPEC.cut(TensorCut(rank % 2, 2)), lora)
        for one, other in zip(run.metrics, alone.metrics, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
        for name, weight in run.weights.items():
            assert torch.equal(weight, repeated.weights[name]), name
            assert name in cut or torch.equal(weight, runs[0].weights[name]), f"{name} differs between workers"
        if groups == 1:
            for name, gradient in run.gradients.items():
                pieces = pieces_of(cut.get(name), 0, gradient.shape[0])
                whole = torch.cat([alone.gradients[name][one.whole : one.whole + one.rows] for one in pieces])
                torch.testing.assert_close(gradient, whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()), msg=name)


def test_a_number_that_is_not_finite_in_one_part_stops_all_before_they_update() -> None:
    """Only one worker sees the gradient of its rows."""

    def work(peers: Peers) -> str:
        trainer = trainer_of(peers, torch.bfloat16)
        before = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
        add = trainer.optimizer.gradients._add

        def spoiled(name: str, gradient: Tensor) -> None:
            if peers.group.rank == 1 and name.endswith("down_proj.weight"):
                gradient = gradient.clone().fill_(math.inf)
            add(name, gradient)

        trainer.optimizer.gradients._add = spoiled  # type: ignore[method-assign]
        with pytest.raises(NonFiniteError) as error:
            trainer.train(batch(), KVReplay(), None)
        assert trainer.weights_are_whole
        assert all(torch.equal(one, before[name]) for name, one in trainer.model.named_parameters())
        return str(error.value)

    first, second = run_grid(1, 2, work)
    assert first == second and "gradient norm inf" in first, first
