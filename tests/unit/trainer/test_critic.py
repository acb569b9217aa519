"""Critic and reward model: gradients against autograd sequence by sequence, packing, what they fit, and their state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.bradley_terry import bradley_terry_loss
from octetrl.algorithms.gae import gae_advantages
from octetrl.algorithms.ppo import ppo_returns
from octetrl.algorithms.sequences import last_of_each
from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.value_loss import value_loss
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import CriticConfig, OptimizerConfig, TrainerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.records import (
    Completion,
    FinishReason,
    MicroBatch,
    PackedBatch,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Sample,
    Task,
    Turn,
)
from octetrl.rollout.samples import to_samples
from octetrl.system.errors import UserError
from octetrl.trainer.critic import Critic, explained_variance
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.prepared import MetricMeans, PreparedMicroBatch
from octetrl.trainer.reward_trainer import RewardTrainer, pair_ends
from octetrl.trainer.scalar_trainer import ScalarPart, ScalarState
from tests.objectives import objective
from tests.team import run_team, share_of
from tests.unit.trainer.same_state import NORM, copy_of, owned_part
from tests.unit.trainer.tiny_trainer import BF16, FP8, SPEC, random_samples


def tiny_scalar_model(fp8: Fp8Config = BF16, dtype: torch.dtype = torch.bfloat16) -> ScalarDecoder:
    """Random, its head too."""
    model = ScalarDecoder(SPEC, precision_policy(SPEC, fp8), dtype=dtype)
    model.random_init(0)
    with torch.no_grad():
        model.score.weight.normal_(generator=torch.Generator().manual_seed(1))
    return model


def tiny_critic(
    fp8: Fp8Config = BF16,
    dtype: torch.dtype = torch.bfloat16,
    *,
    checkpointing: str = "none",
    weight_codes: str = "kept",
    **config: object,
) -> Critic:
    settings = {"optimizer": OptimizerConfig(lr=1e-2, max_grad_norm=1e9)} | config
    trainer = TrainerConfig.model_validate({"activation_checkpointing": checkpointing, "weight_codes": weight_codes})
    return Critic(tiny_scalar_model(fp8, dtype), CriticConfig(**settings), trainer, total_steps=10, seed=3)


def packed(samples: Sequence[Sample], tokens: int = 64) -> tuple[tuple[MicroBatch, ...], float]:
    batch = pack(samples, PackingLayout(tokens), "token")
    return batch.minibatches[0], batch.loss_denominators[0]


def targets(micro_batch: MicroBatch) -> Tensor:
    """A return for each token that follows from the token before it and its place alone."""
    return ((micro_batch.token_ids_T[micro_batch.predictor_N] * 7 + micro_batch.target_positions_N) % 5).float() / 2


def step(critic: Critic, micro_batches: Sequence[MicroBatch], denominator: float) -> dict[str, float]:
    prepared = [PreparedMicroBatch(m, values_N=critic.values(m), returns_N=targets(m)) for m in micro_batches]
    return updated(critic, prepared, denominator)


def updated(critic: Critic, prepared: Sequence[PreparedMicroBatch], denominator: float) -> dict[str, float]:
    means = MetricMeans()
    return critic.update(prepared, denominator, 0, means) | means.read()


def gradients(critic: Critic, micro_batches: Sequence[MicroBatch], denominator: float) -> list[Tensor]:
    """Of the squared error, as the optimizer has summed them."""
    trainer = critic.scalar_trainer
    trainer.optimizer.zero_grad()
    for m in micro_batches:
        old_N = critic.values(m)

        loss = partial(value_loss, old_values_N=old_N, returns_N=targets(m), value_clip=None)
        trainer.backward(ScalarPart(m, m.predictor_N, loss, m.weights_N), denominator, MetricMeans())
    return [slot.gradient.clone() for slot in trainer.optimizer.slots]


def test_codes_that_are_remade_change_no_bit_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a step that failed."""
    micro_batches, denominator = packed(random_samples(5))
    results = []
    for weight_codes in ("kept", "remade"):
        critic, held = tiny_critic(FP8, weight_codes=weight_codes), []
        linears = [linear for _, linear in critic.scalar_trainer.model.float8_linears()]
        optimizer, clip = critic.scalar_trainer.optimizer, critic.scalar_trainer.optimizer.clip_gradients
        for result in (clip, lambda: torch.tensor(torch.nan)):

            def clipped(result: Any = result, held: list[bool] = held, linears: Any = linears) -> Tensor:
                held.append(all(linear.has_codes for linear in linears))
                return result()

            monkeypatch.setattr(optimizer, "clip_gradients", clipped)
            with nullcontext() if result == clip else pytest.raises(NonFiniteError):
                results.append((step(critic, micro_batches, denominator), list(critic.state().weights.values())))
            assert held.pop() == (weight_codes == "kept") and all(linear.has_codes for linear in linears)
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


def test_the_gradient_is_that_of_the_formula_sequence_by_sequence() -> None:
    critic, samples = tiny_critic(dtype=torch.float32), random_samples(5)
    micro_batches, denominator = packed(samples)
    assert len(micro_batches) > 1
    found = gradients(critic, micro_batches, denominator)
    model = tiny_scalar_model(dtype=torch.float32)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        tokens_T = torch.tensor(sample.token_ids)
        context = PackedContext(torch.tensor([0, len(tokens_T)], dtype=torch.int32), len(tokens_T))
        hidden_TE = model(tokens_T, torch.arange(len(tokens_T)), context)
        scalars_T = hidden_TE.double() @ model.score.weight[0].double()
        for t, trained in enumerate(sample.loss_mask):
            if trained:
                target = ((sample.token_ids[t - 1] * 7 + t) % 5) / 2
                total, count = total + 0.5 * (scalars_T[t - 1] - target) ** 2, count + 1
    assert count == denominator
    expected = torch.autograd.grad(total / count, list(model.parameters()))
    for gradient, one in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, one, rtol=1e-3, atol=3e-6)


def test_neither_packing_nor_checkpointing_changes_the_gradient() -> None:
    samples = random_samples(6)
    whole, *others = (
        gradients(tiny_critic(dtype=torch.float32, checkpointing=checkpointing), *packed(samples, tokens))
        for checkpointing, tokens in (("none", 512), ("none", 32), ("layer", 512))
    )
    for parts in others:
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=3e-6)


@pytest.mark.parametrize("fp8", [BF16, FP8], ids=["bf16", "fp8"])
def test_it_learns_the_returns(fp8: Fp8Config) -> None:
    critic = tiny_critic(fp8, value_clip=None, optimizer=OptimizerConfig(lr=4e-3))
    micro_batches, denominator = packed(random_samples(4))
    before = step(critic, micro_batches, denominator)
    for _ in range(35):
        after = step(critic, micro_batches, denominator)
    assert after["value/loss"] < 0.2 * before["value/loss"]
    assert after["value/lr"] == 4e-3 and after["value/grad_norm"] > 0
    values, returns = (torch.cat([of(m) for m in micro_batches]) for of in (critic.values, targets))
    explained = explained_variance(values, returns)
    assert explained is not None and explained > 0.6


@pytest.mark.parametrize("name", ["terminal", "bootstrap"])
def test_returns_of_truncated_answers_end_in_nothing_or_in_the_value_after_them(name: Any) -> None:
    """Against the sums of each answer alone in float64: the reward, then V after the last token if it was cut off."""
    config = objective(name="ppo", truncated=name, discount=0.9, gae_lambda=0.8, kl_in="loss")
    algorithm, critic = build_algorithm(config), tiny_critic(dtype=torch.float32)
    turn = Turn((1, 2), Completion((3, 4, 5), (-1.0, -2.0, -3.0), "", FinishReason.LENGTH, 0, "digest"))
    statuses = (RolloutStatus.SCORED, RolloutStatus.TRUNCATED, RolloutStatus.UNFINISHED)
    tasks = [Rollout(Task("t", "1 2", {}), (turn,), status, 0.5 * n) for n, status in enumerate(statuses)]
    samples = to_samples([RolloutGroup(tasks[0].task, tuple(tasks))], algorithm)
    micro_batch = pack(samples, PackingLayout(64), "token").minibatches[0][0]
    prepared = PreparedMicroBatch(micro_batch)
    critic.prepare([prepared], partial(ppo_returns, config=config))
    tokens = torch.tensor([1, 2, 3, 4, 5])
    model = critic.scalar_trainer.model
    hidden_TE = model(tokens, torch.arange(5), PackedContext(torch.tensor([0, 5], dtype=torch.int32), 5))
    value_T = (hidden_TE.double() @ model.score.weight[0].double()).tolist()
    assert prepared.returns_N is not None
    for sequence in range(3):
        sample = samples[int(micro_batch.sample_N[micro_batch.sequence_N == sequence][0])]
        cut = name == "bootstrap" and sample is not samples[0]
        after, advantage, expected = value_T[4] if cut else 0.0, 0.0, []
        for t in (3, 2, 1):  # the token before the one that V is of
            delta = (sample.advantage if t == 3 else 0.0) + 0.9 * after - value_T[t]
            advantage, after = delta + 0.9 * 0.8 * advantage, value_T[t]
            expected.insert(0, advantage + value_T[t])
        found = prepared.returns_N[micro_batch.sequence_N == sequence].tolist()
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("value_clip", [0.1, None])
def test_several_updates_on_one_batch_stop_at_the_clip(value_clip: float | None) -> None:
    optimizer = OptimizerConfig(lr=1.4e-5, betas=(0.0, 0.95))
    critic = tiny_critic(dtype=torch.float32, value_clip=value_clip, optimizer=optimizer)
    micro_batches, denominator = packed(random_samples(4))
    old = [critic.values(m) for m in micro_batches]
    for _ in range(35):
        batch = [
            PreparedMicroBatch(m, values_N=old_N, returns_N=old_N + 3.0)
            for m, old_N in zip(micro_batches, old, strict=True)
        ]
        clipped = updated(critic, batch, denominator)["value/clip_fraction"]
    moved = float((torch.cat([critic.values(m) for m in micro_batches]) - torch.cat(old)).mean())
    if value_clip is None:
        assert clipped == 0 and moved > 0.3
    else:
        assert clipped > 0.5 and 0.05 < moved < 0.2


def test_the_critics_state_comes_back_bit_for_bit_and_anothers_is_refused() -> None:
    critic, micro_batches = tiny_critic(FP8), packed(random_samples(6))
    step(critic, *micro_batches)
    other = tiny_critic(FP8)
    state = critic.state()
    other.load_state(state)
    assert step(other, *micro_batches) == step(critic, *micro_batches)
    ours, theirs = critic.state(), other.state()
    for tensors, given in ((ours.weights, theirs.weights), (ours.optimizer, theirs.optimizer)):
        assert all(torch.equal(tensors[name], given[name]) for name in tensors)
    weights = {name: tensor for name, tensor in state.weights.items() if name != "score.weight"}
    with pytest.raises(UserError, match=r"'score\.weight' is missing"):
        critic.load_state(type(state)(weights, state.optimizer))


def test_a_value_that_is_not_finite_is_named() -> None:
    critic = tiny_critic()
    (micro_batch, *_), _ = packed(random_samples(3), 512)
    with torch.no_grad():
        critic.scalar_trainer.model.score.weight.fill_(float("nan"))
    sample, position = int(micro_batch.sample_N[0]), int(micro_batch.target_positions_N[0])
    with pytest.raises(
        NonFiniteError, match=f"the value of sample {sample} of the batch at position {position} is nan"
    ):
        critic.values(micro_batch)


def test_a_step_whose_numbers_are_not_finite_steps_nothing() -> None:
    critic, (micro_batches, denominator) = tiny_critic(), packed(random_samples(4))
    weights = {name: tensor.clone() for name, tensor in critic.state().weights.items()}
    returns = [PreparedMicroBatch(m, values_N=critic.values(m), returns_N=targets(m) / 0.0) for m in micro_batches]
    with pytest.raises(NonFiniteError, match=r"scalar head: loss .* nothing was updated"):
        updated(critic, returns, denominator)
    assert all(torch.equal(weights[name], tensor) for name, tensor in critic.state().weights.items())


def test_explained_variance() -> None:
    returns_N = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns_N, returns_N) == 1.0
    assert explained_variance(torch.ones(3), returns_N) == 0.0
    assert explained_variance(-returns_N, returns_N) == -3.0
    assert explained_variance(returns_N, torch.ones(3)) is None


def test_values_and_returns_are_of_the_whole_batch_in_its_order() -> None:
    critic, samples = tiny_critic(), random_samples(6)
    (micro_batches, _), (whole, _) = packed(samples), packed(samples, 512)
    prepared, together = [PreparedMicroBatch(m) for m in micro_batches], [PreparedMicroBatch(m) for m in whole]
    config = objective(name="ppo", gae_lambda=0.8)
    metrics = critic.prepare(prepared, partial(ppo_returns, config=config))
    assert metrics == pytest.approx(critic.prepare(together, partial(ppo_returns, config=config)), rel=1e-3)
    for one in prepared:
        assert one.values_N is not None and one.returns_N is not None
        last_N = last_of_each(one.micro_batch.sequence_N)
        assert torch.equal(one.values_N, critic.values(one.micro_batch))
        expected_N = gae_advantages(
            torch.where(last_N, one.micro_batch.advantages_N, 0.0), one.values_N, last_N, 1.0, 0.8
        )
        assert torch.equal(one.returns_N, expected_N + one.values_N)


# ---------------------------------------------------------------- reward models


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


def packed_pairs(samples: list[Sample], tokens: int = 64, minibatches: int = 1) -> PackedBatch:
    return pack(samples, PackingLayout(tokens, minibatches), "token")


def test_a_pair_shares_a_micro_batch_and_stands_side_by_side() -> None:
    samples = pairs(9)
    batch = packed_pairs(samples, 48, 2)
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


def test_a_reward_models_loss_is_that_of_the_formula_pair_by_pair() -> None:
    model, samples = tiny_scalar_model(dtype=torch.float32), pairs(5)
    rewards = {}
    for sample in samples:
        tokens_T = torch.tensor(sample.token_ids)
        context = PackedContext(torch.tensor([0, len(tokens_T)], dtype=torch.int32), len(tokens_T))
        hidden_TE = model(tokens_T, torch.arange(len(tokens_T)), context).detach().double()
        rewards[sample.pair, sample.chosen] = hidden_TE[-1] @ model.score.weight[0].detach().double()
    margins = torch.stack([rewards[index, True] - rewards[index, False] for index in range(5)])
    metrics = tiny_reward_trainer(model).train(packed_pairs(samples)).metrics
    assert metrics["loss"] == pytest.approx(float((1 + (-margins).exp()).log().mean()), rel=1e-4)
    assert metrics["preference/accuracy"] == pytest.approx(float((margins > 0).double().mean()))
    assert metrics["preference/margin"] == pytest.approx(float(margins.mean()), rel=1e-4)
    assert metrics["train/pairs"] == 5


def test_packing_changes_no_step() -> None:
    whole, parts = (
        tiny_reward_trainer(tiny_scalar_model(dtype=torch.float32)).train(packed_pairs(pairs(6), tokens)).metrics
        for tokens in (512, 48)
    )
    for name in ("loss", "grad_norm", "preference/margin"):
        assert whole[name] == pytest.approx(parts[name], rel=1e-4)


def test_it_learns_which_is_better() -> None:
    trainer = tiny_reward_trainer(fp8=FP8)
    for seed in range(12):
        trainer.train(packed_pairs(pairs(8, seed)))
    metrics = trainer.train(packed_pairs(pairs(24, 99))).metrics
    assert metrics["preference/accuracy"] > 0.9 and metrics["preference/margin"] > 1.0
    assert trainer.policy_version == 13 and trainer.weights_are_whole


def test_a_reward_trainers_state_comes_back_bit_for_bit() -> None:
    trainer, other = tiny_reward_trainer(), tiny_reward_trainer()
    trainer.train(packed_pairs(pairs(4)))
    other.load_state(trainer.state(), trainer.policy_version)
    ours, theirs = (one.train(packed_pairs(pairs(4, 1), 64, 2)) for one in (trainer, other))
    timeless = [{n: v for n, v in update.metrics.items() if "per_second" not in n} for update in (ours, theirs)]
    assert timeless[0] == timeless[1] and ours.policy_version == theirs.policy_version == 2


def test_only_the_first_layers_run_again() -> None:
    forwards: list[int] = []
    model = tiny_scalar_model(BF16)
    trainer = tiny_reward_trainer(model, activation_checkpointing="layer", checkpointed_layers=1)
    layers = model.layers
    for index, layer in enumerate(layers):
        layer.attention.register_forward_hook(lambda *_, index=index: forwards.append(index))
    trainer.train(packed_pairs(pairs(1)))
    assert len(layers) > 1 and sorted(forwards) == sorted([*range(len(layers)), 0])


def test_nothing_to_learn_from_changes_nothing() -> None:
    update = tiny_reward_trainer().train(packed_pairs([]))
    assert update.policy_version == 0 and update.metrics == {"train/skipped": 1.0}


def test_samples_without_pairs_are_refused() -> None:
    with pytest.raises(AssertionError, match="preference pairs"):
        tiny_reward_trainer().train(packed_pairs(random_samples(2, policy_version=None)))


def test_several_workers_train_one_reward_model() -> None:
    """Each update of the team begins at the state that the one worker had before it."""
    given = [packed_pairs(pairs(7, seed), 48) for seed in range(3)]
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
