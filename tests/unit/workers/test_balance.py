"""Micro-batches are dealt out once each, by cost, and a worker may have none."""

from __future__ import annotations

import random

from octetrl.algorithms.weighting import TokenWeighting
from octetrl.models.families import spec_from_config
from octetrl.records import Sample
from octetrl.shapes.presets import preset_config
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.workers.assignment import Costs, deal, shared_out

COSTS = Costs.of(spec_from_config(preset_config("qwen3-8b")))


def test_costs_are_those_of_the_model() -> None:
    assert COSTS.token == 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288)
    assert COSTS.pair == 36 * 4096


def test_a_mixture_costs_the_experts_of_a_token_and_latent_attention_its_own_form() -> None:
    """Moonlight: 27 layers, the first dense; 6 of 64 experts and 2 shared of 1,408; heads of 128 + 64 and 128."""
    costs = Costs.of(spec_from_config(preset_config("moonlight-16b-a3b")))
    attention = 2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * 256 + 16 * 128 * 2048
    experts = 3 * 2048 * 1408 * (6 + 2) + 64 * 2048
    assert costs.token == 27 * attention + 3 * 2048 * 11264 + 26 * experts
    assert costs.pair == 27 * 16 * ((512 + 512 + 64) + 5 * 192 + 4 * 128) / 7


def test_every_micro_batch_once_and_the_longest_sequences_apart() -> None:
    weighting: TokenWeighting = "token"
    lengths = [4000, 4000, *[500] * 16, *[100] * 40]
    samples = [Sample((1,) * n, (False, *[True] * (n - 1)), None, 1.0, None) for n in lengths]
    batch = pack(samples, PackingLayout(4000, minibatches=2), weighting)
    parts = deal(batch, 2, COSTS)
    assert all(part.loss_denominators == batch.loss_denominators for part in parts)
    for number, minibatch in enumerate(batch.minibatches):
        dealt = [one for part in parts for one in part.minibatches[number]]
        assert sorted(map(id, dealt)) == sorted(map(id, minibatch))
    long_ones = [[one.max_seqlen == 4000 for one in part.minibatches[0]].count(True) for part in parts]
    assert long_ones == [1, 1]
    alone = deal(pack(samples[:1], PackingLayout(4000), weighting), 3, COSTS)
    assert [len(part.minibatches[0]) for part in alone] == [1, 0, 0]


def test_no_worker_has_much_more_than_its_share() -> None:
    draw = random.Random(0)
    for workers in (2, 3, 8):
        costs = [draw.lognormvariate(0, 1) for _ in range(10 * workers)]
        loads = [0.0] * workers
        for cost, owner in zip(costs, shared_out(costs, workers), strict=True):
            loads[owner] += cost
        assert max(loads) <= max(sum(costs) / workers * 1.1, max(costs))
