"""A reward model's trainer: the loss sequence by sequence, packing, what it learns, and its state."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from octetrl.algorithms.bradley_terry import bradley_terry_loss
from octetrl.config.schema import Fp8Config, OptimizerConfig, TrainerConfig
from octetrl.layers.context import PackedContext
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import PackedBatch, Sample
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.reward_trainer import RewardTrainer, pair_ends
from octetrl.trainer.scalar_trainer import ScalarState
from tests.team import run_team, share_of
from tests.unit.trainer.same_state import NORM, copy_of, owned_part
from tests.unit.trainer.test_critic import tiny_scalar_model
from tests.unit.trainer.tiny_trainer import BF16, FP8, random_samples


def pairs(count: int, seed: int = 0) -> list[Sample]:
    """Chosen answers hold even tokens, rejected ones odd; either may come first."""
    draw, samples = random.Random(seed), random_samples(2 * count, seed, policy_version=None)
    found: list[Sample] = []
    for index in range(count):
        sides = []
        for parity, sample in enumerate(samples[2 * index : 2 * index + 2]):
            tokens = tuple(2 * (token // 2) + parity for token in sample.token_ids)
            sides.append(Sample(tokens, sample.loss_mask, None, 1.0, None, pair=index, chosen=parity == 0))
        draw.shuffle(sides)
        found += sides
    return found


def tiny_reward_trainer(
    model: ScalarDecoder | None = None,
    fp8: Fp8Config = BF16,
    *,
    lr: float = 1e-3,
    peers: Peers = ALONE,
    **config: object,
) -> RewardTrainer:
    trainer = TrainerConfig(
        optimizer=OptimizerConfig(lr=lr, max_grad_norm=1e9), **{"tokens_per_micro_batch": 64} | config
    )
    loss = partial(bradley_terry_loss, center=0.0)
    return RewardTrainer(model or tiny_scalar_model(fp8), trainer, loss, total_steps=10, seed=3, peers=peers)


def packed(samples: list[Sample], tokens: int = 64, minibatches: int = 1) -> PackedBatch:
    return pack(samples, PackingLayout(tokens, minibatches), "token")


def test_a_pair_shares_a_micro_batch_and_stands_side_by_side() -> None:
    samples = pairs(9)
    batch = packed(samples, 48, 2)
    assert len(batch.minibatches) == 2 and sum(map(len, batch.minibatches)) > 4
    texts = {(sample.pair, sample.chosen): sample.token_ids for sample in samples}
    met = []
    for micro_batch in (m for minibatch in batch.minibatches for m in minibatch):
        sequences = [
            tuple(ids.tolist()) for ids in micro_batch.token_ids_T.split(micro_batch.cu_seqlens_B1.diff().tolist())
        ]
        rows = pair_ends(micro_batch).tolist()
        last = [int(end) - 1 for end in micro_batch.cu_seqlens_B1[1:]]
        chosen, rejected = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        for good, bad in zip(chosen, rejected, strict=True):
            met.append((sequences[last.index(good)], sequences[last.index(bad)]))
    assert sorted(met) == sorted((texts[index, True], texts[index, False]) for index in range(9))


def test_the_loss_is_that_of_the_formula_pair_by_pair() -> None:
    model, samples = tiny_scalar_model(dtype=torch.float32), pairs(5)
    rewards = {}
    for sample in samples:
        tokens_T = torch.tensor(sample.token_ids)
        context = PackedContext(torch.tensor([0, len(tokens_T)], dtype=torch.int32), len(tokens_T))
        hidden_TE = model(tokens_T, torch.arange(len(tokens_T)), context).detach().double()
        rewards[sample.pair, sample.chosen] = hidden_TE[-1] @ model.score.weight[0].detach().double()
    margins = torch.stack([rewards[index, True] - rewards[index, False] for index in range(5)])
    metrics = tiny_reward_trainer(model).train(packed(samples)).metrics
    assert metrics["loss"] == pytest.approx(float((1 + (-margins).exp()).log().mean()), rel=1e-4)
    assert metrics["preference/accuracy"] == pytest.approx(float((margins > 0).double().mean()))
    assert metrics["preference/margin"] == pytest.approx(float(margins.mean()), rel=1e-4)
    assert metrics["train/pairs"] == 5


def test_packing_changes_no_step() -> None:
    whole, parts = (
        tiny_reward_trainer(tiny_scalar_model(dtype=torch.float32)).train(packed(pairs(6), tokens)).metrics
        for tokens in (512, 48)
    )
    for name in ("loss", "grad_norm", "preference/margin"):
        assert whole[name] == pytest.approx(parts[name], rel=1e-4)


def test_it_learns_which_is_better() -> None:
    trainer = tiny_reward_trainer(fp8=FP8)
    for seed in range(12):
        trainer.train(packed(pairs(8, seed)))
    metrics = trainer.train(packed(pairs(24, 99))).metrics
    assert metrics["preference/accuracy"] > 0.9 and metrics["preference/margin"] > 1.0
    assert trainer.policy_version == 13 and trainer.weights_are_whole


def test_its_state_comes_back_bit_for_bit() -> None:
    trainer, other = tiny_reward_trainer(), tiny_reward_trainer()
    trainer.train(packed(pairs(4)))
    other.load_state(trainer.state(), trainer.policy_version)
    ours, theirs = (one.train(packed(pairs(4, 1), 64, 2)) for one in (trainer, other))
    timeless = [{n: v for n, v in update.metrics.items() if "per_second" not in n} for update in (ours, theirs)]
    assert timeless[0] == timeless[1] and ours.policy_version == theirs.policy_version == 2


def test_only_the_first_layers_run_again() -> None:
    forwards: list[int] = []
    model = tiny_scalar_model(BF16)
    trainer = tiny_reward_trainer(model, activation_checkpointing="layer", checkpointed_layers=1)
    layers = model.layers
    for index, layer in enumerate(layers):
        layer.attention.register_forward_hook(lambda *_, index=index: forwards.append(index))
    trainer.train(packed(pairs(1)))
    assert len(layers) > 1 and sorted(forwards) == sorted([*range(len(layers)), 0])


def test_nothing_to_learn_from_changes_nothing() -> None:
    update = tiny_reward_trainer().train(packed([]))
    assert update.policy_version == 0 and update.metrics == {"train/skipped": 1.0}


def test_samples_without_pairs_are_refused() -> None:
    with pytest.raises(AssertionError, match="preference pairs"):
        tiny_reward_trainer().train(packed(random_samples(2, policy_version=None)))


def test_several_workers_train_one_reward_model() -> None:
    """Each update of the team begins at the state that the one worker had before it."""
    given = [packed(pairs(7, seed), 48) for seed in range(3)]
    states: list[ScalarState] = []

    def work(peers: Peers) -> list[dict[str, float]]:
        trainer = tiny_reward_trainer(fp8=FP8, peers=peers)
        metrics = []
        for step, batch in enumerate(given):
            state = trainer.state()
            if peers.share.count == 1:
                states.append(copy_of(state))
            else:
                trainer.load_state(owned_part(states[step], state, trainer.scalar_trainer), step)
            metrics.append(dict(trainer.train(share_of(batch, peers)).metrics))
        return metrics

    alone, teams = work(ALONE), run_team(2, work, gradients="sharded")
    for step, want in enumerate(alone):
        for metrics in teams:
            assert metrics[step].keys() == want.keys()
            for key in want.keys() - {"train/tokens_per_second"}:
                assert metrics[step][key] == pytest.approx(want[key], rel=NORM, abs=1e-7), key
