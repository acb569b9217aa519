"""Every objective against its paper's formula, written out over padded float64 matrices: value and gradient of the
whole loss, through the token weights and the division; and what they are equal to in special cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.advantages import group_relative_advantages
from octetrl.algorithms.dapo import soft_overlong_penalty
from octetrl.algorithms.kl_control import adapted_kl_scale
from octetrl.algorithms.rloo import leave_one_out_advantages
from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.algorithms.weighting import weigh
from octetrl.config.objective_settings import AlgorithmConfig
from tests.objectives import objective

LENGTHS = (5, 1, 7, 3)
COUNT = sum(LENGTHS)
MASK = torch.tensor([[t < length for t in range(max(LENGTHS))] for length in LENGTHS])  # [G, T]


def padded(values_N: Tensor) -> Tensor:
    """[G, T], zeros beyond each answer's end."""
    return torch.zeros(MASK.shape, dtype=values_N.dtype).masked_scatter(MASK, values_N)


def inputs_of(seed: int = 0, spread: float = 0.4, *, one_advantage: bool = True) -> LossInputs:
    """Several updates into a batch: policy, proximal and engine all differ."""
    draw = torch.Generator().manual_seed(seed)
    policy, proximal, generator = (torch.randn(COUNT, generator=draw, dtype=torch.float64) for _ in range(3))
    advantages = torch.randn(len(LENGTHS), generator=draw, dtype=torch.float64)
    sequence_N = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    base = torch.randn(COUNT, generator=draw, dtype=torch.float64) - 2.0
    per_token = advantages[sequence_N]
    if not one_advantage:
        per_token = torch.randn(COUNT, generator=draw, dtype=torch.float64)
    return LossInputs(
        logprobs_N=(base + spread * policy).requires_grad_(),
        entropy_N=torch.rand(COUNT, generator=draw, dtype=torch.float64),
        advantages_N=per_token,
        sequence_N=sequence_N,
        num_sequences=len(LENGTHS),
        generator_logprobs_N=base + spread * generator,
        proximal_logprobs_N=base + spread * proximal,
    )


def whole_loss(config: AlgorithmConfig, inputs: LossInputs) -> Tensor:
    """What the trainer minimises."""
    algorithm = build_algorithm(config)
    weights, denominator = weigh(LENGTHS, algorithm.token_weighting)
    weights_N = torch.tensor(weights, dtype=torch.float64)[inputs.sequence_N]
    return (weights_N * algorithm.loss(inputs).loss_N).sum() / denominator


def value_and_gradient(loss: Callable[[LossInputs], Tensor], inputs: LossInputs) -> tuple[Tensor, Tensor]:
    value = loss(inputs)
    return value.detach(), torch.autograd.grad(value, inputs.logprobs_N)[0]


def assert_same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-8)


# --- the papers' formulas, without importance correction ------------------------------------------------------


def matrices(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Ratios and advantages, [G, T]."""
    assert inputs.proximal_logprobs_N is not None
    return padded((inputs.logprobs_N - inputs.proximal_logprobs_N).exp()), padded(inputs.advantages_N)


def per_answer(gain_GT: Tensor) -> Tensor:
    """1/G sum_i 1/|o_i| sum_t"""
    return -((gain_GT * MASK).sum(1) / MASK.sum(1)).mean()


def per_token(gain_GT: Tensor) -> Tensor:
    """1 / sum_i |o_i|  sum_i sum_t"""
    return -(gain_GT * MASK).sum() / MASK.sum()


def grpo(inputs: LossInputs, low: float, high: float, mean: Callable[[Tensor], Tensor]) -> Tensor:
    r, a = matrices(inputs)
    return mean(torch.min(r * a, r.clip(1 - low, 1 + high) * a))


def dual_clip(inputs: LossInputs) -> Tensor:
    r, a = matrices(inputs)
    clipped = torch.min(r * a, r.clip(0.8, 1.2) * a)
    return per_token(torch.where(a < 0, torch.max(clipped, 1.5 * a), clipped))


def gspo(inputs: LossInputs) -> Tensor:
    assert inputs.proximal_logprobs_N is not None
    log_ratio = padded(inputs.logprobs_N - inputs.proximal_logprobs_N)
    s = (log_ratio.sum(1) / MASK.sum(1)).exp()
    a = padded(inputs.advantages_N)[:, 0]
    return -torch.min(s * a, s.clip(0.9, 1.1) * a).mean()


def gspo_token(inputs: LossInputs) -> Tensor:
    assert inputs.proximal_logprobs_N is not None
    log_ratio = padded(inputs.logprobs_N - inputs.proximal_logprobs_N)
    s = (log_ratio.sum(1) / MASK.sum(1)).exp().detach()
    p = padded(inputs.logprobs_N).exp()
    s_t, a = s[:, None] * p / p.detach(), padded(inputs.advantages_N)
    return per_answer(torch.min(s_t * a, s_t.clip(0.9, 1.1) * a))


def cispo(inputs: LossInputs) -> Tensor:
    r, a = matrices(inputs)
    return per_token(r.clip(0.7, 1.4).detach() * a * padded(inputs.logprobs_N))


def sapo(inputs: LossInputs) -> Tensor:
    r, a = matrices(inputs)
    tau = torch.where(a > 0, 1.0, 1.05).double()
    return per_answer(4 / tau / (1 + (-tau * (r - 1)).exp()) * a)


PAPERS: dict[str, tuple[dict[str, object], Callable[[LossInputs], Tensor]]] = {
    "grpo": ({"token_weighting": "sequence"}, partial(grpo, low=0.2, high=0.2, mean=per_answer)),
    "dr_grpo": (
        {"name": "grpo", "token_weighting": "constant", "constant_length": 9},
        partial(grpo, low=0.2, high=0.2, mean=lambda gain: -((gain * MASK).sum(1) / 9).mean()),
    ),
    "dapo": ({}, partial(grpo, low=0.2, high=0.28, mean=per_token)),
    "dual_clip": ({"dual_clip": 1.5}, dual_clip),
    "gspo": ({"clip_low": 0.1, "clip_high": 0.1}, gspo),
    "gspo_token": ({"clip_low": 0.1, "clip_high": 0.1}, gspo_token),
    "cispo": ({"clip_low": 0.3, "clip_high": 0.4}, cispo),
    "sapo": ({}, sapo),
}


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_formula(name: str) -> None:
    changes, paper = PAPERS[name]
    config = objective(**{"name": name, "corrections": ()} | changes)
    for seed in range(3):
        inputs = inputs_of(seed, one_advantage=name != "gspo_token")
        assert_same(value_and_gradient(partial(whole_loss, config), inputs), value_and_gradient(paper, inputs))


@pytest.mark.parametrize("name", PAPERS)
def test_the_clip_that_is_counted_is_the_one_that_acts(name: str) -> None:
    """Where `clip_fraction` is 1 a token has no gradient of its own, except with CISPO, which bounds its weight."""
    changes, _ = PAPERS[name]
    config = objective(**{"name": name, "corrections": ()} | changes)
    inputs = inputs_of(0)
    loss = build_algorithm(config).loss(inputs)
    gradient_N = torch.autograd.grad(loss.loss_N.sum(), inputs.logprobs_N)[0]
    clipped_N = loss.metrics["ratio/clip_fraction"]
    assert clipped_N.sum() > 0
    assert torch.equal(gradient_N == 0, (clipped_N == 1) & (name != "cispo"))


# --- special cases --------------------------------------------------------------------------------------------


def loss_of(inputs: LossInputs, **changes: object) -> tuple[Tensor, Tensor]:
    return value_and_gradient(partial(whole_loss, objective(**changes)), inputs)


def test_dapo_with_equal_clips_is_grpo() -> None:
    assert_same(loss_of(inputs_of(), name="dapo", clip_high=0.2), loss_of(inputs_of(), name="grpo"))


def test_gspo_token_with_one_advantage_an_answer_is_gspo() -> None:
    clips = {"clip_low": 0.1, "clip_high": 0.2}
    assert_same(loss_of(inputs_of(), name="gspo_token", **clips), loss_of(inputs_of(), name="gspo", **clips))


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_on_answers_of_one_token_is_grpo(name: str) -> None:
    inputs = replace(inputs_of(), sequence_N=torch.arange(COUNT), num_sequences=COUNT)
    own, grpos = (build_algorithm(objective(name=n, clip_low=0.2, clip_high=0.2)).loss(inputs) for n in (name, "grpo"))
    torch.testing.assert_close(own.loss_N, grpos.loss_N)


def test_dual_clip_that_nothing_reaches_is_grpo() -> None:
    assert_same(loss_of(inputs_of(), name="dual_clip", dual_clip=1e9), loss_of(inputs_of(), name="grpo"))


NAMES = ("grpo", "dapo", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "rloo", "reinforce_pp")


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_objective_has_the_gradient_of_reinforce(name: str) -> None:
    inputs = replace(inputs_of(), proximal_logprobs_N=None, on_policy=True)
    loss_N = build_algorithm(objective(name=name, corrections=())).loss(inputs).loss_N
    weights_N = 1.0 / torch.tensor(LENGTHS).double()[inputs.sequence_N]
    gradient = torch.autograd.grad((weights_N * loss_N).sum(), inputs.logprobs_N)[0]
    torch.testing.assert_close(gradient, -weights_N * inputs.advantages_N)


def test_rloo_is_grpo_without_the_deviation_times_g_over_g_less_one() -> None:
    rewards = [1.0, 0.0, 0.25, 0.0, 1.0]
    grpos = group_relative_advantages(rewards, normalize=False)
    assert leave_one_out_advantages(rewards) == pytest.approx([5 / 4 * a for a in grpos])
    others = [[r for j, r in enumerate(rewards) if j != i] for i in range(5)]
    by_hand = [r - sum(rest) / 4 for r, rest in zip(rewards, others, strict=True)]
    assert leave_one_out_advantages(rewards) == pytest.approx(by_hand)
    assert leave_one_out_advantages([0.3] * 3) == [0.0] * 3 and leave_one_out_advantages([0.3]) == [0.0]


# --- advantages of whole batches ------------------------------------------------------------------------------


def rewards_of(outcome: list[float], kl_N: Tensor | None = None) -> TokenRewards:
    sequence_N = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    last = torch.tensor(LENGTHS).cumsum(0) - 1
    is_last_N = torch.zeros(COUNT, dtype=torch.bool).index_fill(0, last, True)
    return TokenRewards(torch.tensor(outcome)[sequence_N], sequence_N, len(LENGTHS), is_last_N, kl_N)


def test_kl_in_the_reward_charges_each_token_for_what_follows() -> None:
    kl_N = torch.randn(COUNT)
    rewards = rewards_of([1.0, 0.0, -1.0, 2.0], kl_N)
    shape = build_algorithm(objective(kl_coefficient=0.1, kl_in="reward", kl_estimator="k1")).shape
    assert shape is not None
    expected, start = [], 0
    for length, outcome in zip(LENGTHS, [1.0, 0.0, -1.0, 2.0], strict=True):
        kl = kl_N[start : start + length].tolist()
        expected += [outcome - 0.1 * sum(kl[t:]) for t in range(length)]
        start += length
    torch.testing.assert_close(shape(rewards), torch.tensor(expected))
    doubled = shape(replace(rewards, kl_scale=2.0))
    torch.testing.assert_close(doubled - rewards.outcome_N, 2 * (shape(rewards) - rewards.outcome_N))
    assert build_algorithm(objective(kl_in="reward")).shape is None, "no coefficient, no KL"


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_reinforce_pp_normalises_over_the_tokens_of_the_batch(name: str) -> None:
    algorithm = build_algorithm(objective(name=name))
    assert algorithm.shape is not None
    groups = algorithm.advantages([[1.0, 0.0], [1.0, 0.5]])
    assert groups == ([[1.0, 0.0], [1.0, 0.5]] if name == "reinforce_pp" else [[0.5, -0.5], [0.25, -0.25]])
    outcome = [advantage for group in groups for advantage in group]
    tokens = torch.tensor([o for o, length in zip(outcome, LENGTHS, strict=True) for _ in range(length)]).double()
    expected = (tokens - tokens.mean()) / tokens.std()
    torch.testing.assert_close(algorithm.shape(rewards_of(outcome)).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(algorithm.shape(rewards_of([0.1] * 4)), torch.zeros(COUNT))


# --- the parts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "was_cut", "penalty"),
    [(1, False, 0.0), (80, False, 0.0), (85, False, -0.25), (99, False, -0.95), (100, False, -1.0), (100, True, -1.0)],
)
def test_soft_overlong_punishment(length: int, was_cut: bool, penalty: float) -> None:
    found = soft_overlong_penalty(length, limit=100, buffer=0.2, was_cut=was_cut)
    assert found == pytest.approx(penalty)


def test_an_adaptive_kl_goes_to_its_target() -> None:
    assert adapted_kl_scale(1.0, 0.02, 0.02) == 1.0
    assert adapted_kl_scale(2.0, 1.0, 0.02) == pytest.approx(2.04)
    assert adapted_kl_scale(2.0, 0.0, 0.02) == pytest.approx(1.96)
    assert adapted_kl_scale(1.0, 0.021, 0.02) == pytest.approx(1.005)


def test_an_entropy_bonus_and_its_gradient() -> None:
    entropy_N = torch.rand(COUNT, dtype=torch.float64, requires_grad=True)
    inputs = replace(inputs_of(), entropy_N=entropy_N)
    with_bonus, without = (build_algorithm(objective(entropy_coefficient=c)).loss(inputs).loss_N for c in (0.1, 0.0))
    torch.testing.assert_close(with_bonus, without - 0.1 * entropy_N)
    torch.testing.assert_close(torch.autograd.grad(with_bonus.sum(), entropy_N)[0], torch.full_like(entropy_N, -0.1))


@pytest.mark.parametrize(
    ("choice", "several", "on_policy", "base"),
    [
        ("auto", False, True, "policy"), ("auto", True, False, "proximal"), ("auto", False, False, "generator"),
        ("proximal", False, False, "policy"), ("proximal", True, False, "proximal"),
        ("generator", False, True, "generator"), ("generator", True, False, "generator"),
    ],
)  # fmt: skip
def test_what_the_ratio_is_taken_against(choice: str, several: bool, on_policy: bool, base: str) -> None:
    inputs = inputs_of()
    bases = {
        "policy": inputs.logprobs_N.detach(),
        "proximal": inputs.proximal_logprobs_N,
        "generator": inputs.generator_logprobs_N,
    }
    inputs = replace(inputs, on_policy=on_policy, proximal_logprobs_N=inputs.proximal_logprobs_N if several else None)
    config = objective(ratio_base=choice, clip_low=1.0, clip_high=math.inf, corrections=("tis",), tis_cap=1e9)
    loss_N = build_algorithm(config).loss(inputs).loss_N
    expected_N = bases[base]
    assert expected_N is not None and inputs.generator_logprobs_N is not None
    weight_N = (expected_N - inputs.generator_logprobs_N).exp()
    ratio_N = (inputs.logprobs_N - expected_N).exp()
    torch.testing.assert_close(loss_N, -weight_N * ratio_N * inputs.advantages_N)
