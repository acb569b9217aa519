"""Options that follow other libraries, against their published formulas written out in float64.

TRL and verl, as their documentation and papers define them; the losses here are sums over padded or split answers, with
no token weights and no packing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.dpo import preference_loss
from octetrl.algorithms.grpo import grpo_loss
from octetrl.algorithms.policy_loss import step_means
from octetrl.algorithms.ratios import MAX_LOG_RATIO, kl_estimate, token_ratio
from octetrl.algorithms.rloo import rloo_loss
from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.algorithms.weighting import weigh
from tests.objectives import objective

LENGTHS = [3, 1, 5, 2, 4, 6]
SEQUENCE_N = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
TOKENS = sum(LENGTHS)


def random_logprobs(count: int, spread: float = 0.3, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    base_N = -2.0 * torch.rand(TOKENS, generator=draw, dtype=torch.float64) - 0.2
    return [base_N + spread * torch.randn(TOKENS, generator=draw, dtype=torch.float64) for _ in range(count)]


def inputs_of(logprobs_N: Tensor, **fields: Any) -> LossInputs:
    zeros_N = torch.zeros_like(logprobs_N)
    given = {"entropy_N": zeros_N, "advantages_N": zeros_N, "sequence_N": SEQUENCE_N, "num_sequences": len(LENGTHS)}
    return LossInputs(logprobs_N, **(given | fields))


def trained(loss_N: Tensor, weighting: Any) -> Tensor:
    """As the trainer reduces it."""
    weights, denominator = weigh(LENGTHS, weighting)
    return (torch.tensor(weights, dtype=torch.float64)[SEQUENCE_N] * loss_N).sum() / denominator


def assert_same(ours: Tensor, theirs: Tensor, logprobs_N: Tensor) -> None:
    """Value and gradient."""
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-10)
    gradients = [torch.autograd.grad(one, logprobs_N)[0] for one in (ours, theirs)]
    assert gradients[1].abs().max() > 0
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-13)


# --- preferences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_preferences_by_the_mean_of_a_token(name: Any) -> None:
    """TRL's IPO: log-probs divided by the tokens of their answer, of policy and reference, then eq. 17."""
    logprobs_N, reference_N = random_logprobs(2)
    logprobs_N.requires_grad_()
    config = objective(name=name, preference_beta=0.3, preference_logprobs="mean")
    chosen_N = (SEQUENCE_N % 2 == 0).clone()
    result = preference_loss(inputs_of(logprobs_N, reference_logprobs_N=reference_N, chosen_N=chosen_N), config)
    policy = [part.mean() for part in logprobs_N.split(LENGTHS)]
    before = [part.mean() for part in reference_N.split(LENGTHS)]
    h = [(policy[i] - policy[i + 1]) - (before[i] - before[i + 1]) for i in (0, 2, 4)]
    losses = [(one - 1 / (2 * 0.3)) ** 2 if name == "ipo" else -(1 / (1 + (-0.3 * one).exp())).log() for one in h]
    assert result.metrics["preference/margin"].tolist() == pytest.approx([0.3 * float(one) for one in h])
    assert_same(trained(result.loss_N, "sequence"), torch.stack(losses).mean(), logprobs_N)


# --- RLOO ---------------------------------------------------------------------------------------------------------


def test_rloo_clips_the_ratio_of_the_whole_answer() -> None:
    """TRL: one ratio an answer, of summed log-probs; the mean over answers of the larger of two losses."""
    logprobs_N, old_N, generator_N = random_logprobs(3)
    logprobs_N.requires_grad_()
    advantages_B = torch.tensor([1.0, -2.0, 0.5, -0.7, 1.5, -0.1], dtype=torch.float64)
    config = objective(name="rloo", rloo_ratio="sequence", corrections=())
    inputs = inputs_of(
        logprobs_N,
        advantages_N=advantages_B[SEQUENCE_N],
        generator_logprobs_N=generator_N,
        proximal_logprobs_N=old_N,
    )
    result = rloo_loss(inputs, config)
    ratio_B = torch.stack([part.sum().exp() for part in (logprobs_N - old_N).split(LENGTHS)])
    losses_B = torch.maximum(-ratio_B * advantages_B, -ratio_B.clamp(0.8, 1.2) * advantages_B)
    clipped_B = -ratio_B.clamp(0.8, 1.2) * advantages_B > -ratio_B * advantages_B
    assert 0 < clipped_B.sum() < len(LENGTHS), "some are clipped"
    assert torch.equal(result.metrics["ratio/clip_fraction"], clipped_B[SEQUENCE_N].float())
    assert_same(trained(result.loss_N, 50), losses_B.mean() / 50, logprobs_N)


def test_on_policy_both_ratios_of_rloo_have_one_gradient() -> None:
    logprobs_N, generator_N = random_logprobs(2)
    gradients = []
    for ratio in ("token", "sequence"):
        logprobs = logprobs_N.clone().requires_grad_()
        inputs = inputs_of(logprobs, advantages_N=SEQUENCE_N - 2.5, generator_logprobs_N=generator_N, on_policy=True)
        config = objective(name="rloo", rloo_ratio=ratio, corrections=())
        gradients += torch.autograd.grad(trained(rloo_loss(inputs, config).loss_N, 7), logprobs)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_kl_is_taken_from_the_reward_before_siblings_are_compared(name: Any, offset: float) -> None:
    """TRL's RLOO, and verl's use_kl_in_reward: r - beta * sum of k1 of the answer, then the objective's baseline."""
    first_N, reference_N = random_logprobs(2)
    rewards = [[offset + 1.0, offset + 0.0, offset + 0.5], [offset + 0.25, offset + 1.0, offset + 0.0]]
    config = objective(name=name, kl_in="reward_before_baseline", kl_coefficient=0.2, kl_estimator="k1")
    algorithm = build_algorithm(config)
    outcomes = torch.tensor([a for group in algorithm.advantages(rewards) for a in group], dtype=torch.float32)
    order = [3, 0, 4, 1, 5, 2]  # as packing may leave them: siblings need not stand together
    lengths = [LENGTHS[i] for i in order]
    sequence_N = torch.arange(6).repeat_interleave(torch.tensor(lengths))
    log_ratio = (first_N - reference_N).split(LENGTHS)
    is_last_N = torch.ones(TOKENS, dtype=torch.bool)
    is_last_N[:-1] = sequence_N[1:] != sequence_N[:-1]
    given = TokenRewards(
        outcome_N=outcomes[order][sequence_N],
        sequence_N=sequence_N,
        num_sequences=6,
        is_last_N=is_last_N,
        kl_N=torch.cat([log_ratio[i] for i in order]),
        group_N=torch.tensor(order)[sequence_N] // 3,
        kl_scale=1.5,
    )
    assert algorithm.shape is not None and algorithm.shaping_kl is not None
    found = [float(part[0]) for part in algorithm.shape(given).split(lengths)]
    expected = [0.0] * 6
    for group in (0, 1):
        net = [rewards[group][j] - 0.2 * 1.5 * float(log_ratio[3 * group + j].sum()) for j in range(3)]
        for j, own in enumerate(net):
            others = [net[k] for k in range(3) if k != j]
            mean = sum(net) / 3
            deviation = math.sqrt(sum((one - mean) ** 2 for one in net) / 2)
            expected[3 * group + j] = {
                "rloo": own - sum(others) / 2, "grpo": (own - mean) / deviation, "reinforce_pp_baseline": own - mean
            }[name]  # fmt: skip
    if name == "reinforce_pp_baseline":
        tokens = torch.tensor(expected, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))
        expected = ((torch.tensor(expected, dtype=torch.float64) - tokens.mean()) / tokens.std()).tolist()
    assert found == pytest.approx([expected[i] for i in order], rel=1e-5, abs=1e-6)


# --- corrections --------------------------------------------------------------------------------------------------

BAD_ANSWER = 3  # the second answer's only token
BAD_TOKEN = 5  # of the third answer: its ratio is e^-10 = 4.5e-5, its probability about e^-12


def masked_mean(values_N: Tensor, stays_N: Tensor, weighting: Any) -> Tensor:
    """verl's token-mean, seq-mean-token-mean and seq-mean-token-sum-norm over a response mask."""
    if weighting == "token":
        return values_N[stays_N].mean()
    answers = list(zip(values_N.split(LENGTHS), stays_N.split(LENGTHS), strict=True))
    if weighting == "sequence":
        return torch.stack([values[stays].mean() for values, stays in answers if stays.any()]).mean()
    return torch.stack([values[stays].sum() / weighting for values, stays in answers]).mean()


@pytest.mark.parametrize("normalize", [(), ("self_normalize",)], ids=["plain", "self_normalize"])
@pytest.mark.parametrize("mask", ["token_mask", "veto"])
@pytest.mark.parametrize("weighting", ["token", "sequence", 7])
def test_what_is_masked_is_out_of_the_denominator(weighting: Any, mask: Any, normalize: Any) -> None:
    """verl: rejection changes the response mask, over which policy loss, KL and entropy are averaged. One answer is
    left out whole. Normalised weights have a mean of 1 over what stays."""
    logprobs_N, generator_N, reference_N = random_logprobs(3, spread=0.5)
    logprobs_N[[BAD_ANSWER, BAD_TOKEN]] -= 10
    logprobs_N.requires_grad_()
    entropy_N = -logprobs_N
    config = objective(
        token_weighting=weighting if isinstance(weighting, str) else "constant", constant_length=7,
        corrections=("tis", mask, *normalize), token_mask_range=(0.7, 1.6), veto_by="ratio", veto_floor=1e-4,
        masked_tokens="left_out", kl_coefficient=0.3, kl_estimator="k2", entropy_coefficient=0.1,
    )  # fmt: skip
    inputs = inputs_of(
        logprobs_N, entropy_N=entropy_N, advantages_N=SEQUENCE_N - 2.5, generator_logprobs_N=generator_N,
        reference_logprobs_N=reference_N, on_policy=True,
    )  # fmt: skip
    weights_N = torch.tensor(weigh(LENGTHS, weighting).token_weights, dtype=torch.float64)[SEQUENCE_N]
    means: dict[str, Any] = {
        name: (weights_N * values(inputs)).sum() / weights_N.sum() for name, values in step_means(config).items()
    }
    ours = trained(grpo_loss(replace(inputs, **means), config).loss_N, weighting)

    k_N = (logprobs_N - generator_N).exp().detach()
    out_B = SEQUENCE_N[[BAD_ANSWER, BAD_TOKEN]]
    stays_N = ((k_N >= 0.7) & (k_N <= 1.6)) if mask == "token_mask" else ~torch.isin(SEQUENCE_N, out_B)
    assert 0 < stays_N.sum() < TOKENS
    weight_N = k_N.clamp(max=2.0)
    if normalize:
        weight_N = weight_N / masked_mean(weight_N, stays_N, weighting if isinstance(weighting, str) else "token")
    ratio_N = (logprobs_N - logprobs_N.detach()).exp()
    x_N = logprobs_N - reference_N
    per_token_N = -weight_N * ratio_N * (SEQUENCE_N - 2.5) + 0.3 * x_N**2 / 2 - 0.1 * entropy_N
    assert_same(ours, masked_mean(per_token_N, stays_N, weighting), logprobs_N)


def test_veto_by_probability_and_by_ratio() -> None:
    """verl's veto: an answer is out if any of its tokens has p / g below the floor, however likely p itself is."""
    trainer_N, generator_N = random_logprobs(2)
    trainer_N[BAD_TOKEN] = generator_N[BAD_TOKEN] - 8.0  # p / g = 3.4e-4, p above 1e-5
    unlikely = 9
    trainer_N[unlikely] = generator_N[unlikely] = -12.0  # p = 6e-6 on both sides: p / g = 1
    inputs = inputs_of(trainer_N, generator_logprobs_N=generator_N, on_policy=True)
    out = {}
    for by in ("probability", "ratio"):
        floor = 1e-5 if by == "probability" else 1e-3
        config = objective(corrections=("veto",), veto_by=by, veto_floor=floor)
        out[by] = grpo_loss(inputs, config).metrics["correction/veto_fraction"] > 0
    ratio_N, probability_N = (trainer_N - generator_N).exp(), trainer_N.exp()
    for by, values_N, floor in (("ratio", ratio_N, 1e-3), ("probability", probability_N, 1e-5)):
        below = [bool((part < floor).any()) for part in values_N.split(LENGTHS)]
        assert out[by].tolist() == [below[i] for i in SEQUENCE_N], by
        assert sum(below) == 1
    assert not torch.equal(out["ratio"], out["probability"])


# --- KL in the loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gradient", ["auto", "estimator", "k2"])
def test_values_and_gradients_of_the_kl_in_the_loss(estimator: Any, gradient: Any) -> None:
    """verl's k1 and k3 differentiate themselves, k1+ and k3+ have k2's gradient; ours is `auto`."""
    logprobs_N, reference_N = random_logprobs(2)
    logprobs_N.requires_grad_()
    x_N = (logprobs_N - reference_N).detach()
    values_N = kl_estimate(logprobs_N, reference_N, estimator, gradient)
    expected_N = {"k1": x_N, "k2": x_N**2 / 2, "k3": (-x_N).exp() - 1 + x_N}[estimator]
    own_N = {"k1": torch.ones_like(x_N), "k2": x_N, "k3": 1 - (-x_N).exp()}[estimator]
    is_own = gradient == "estimator" or (gradient == "auto" and estimator != "k1")
    torch.testing.assert_close(values_N.detach(), expected_N, rtol=1e-12, atol=1e-15)
    (found_N,) = torch.autograd.grad(values_N.sum(), logprobs_N)
    torch.testing.assert_close(found_N, own_N if is_own else x_N, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimators_of_the_kl_as_exact_expectations_over_a_small_vocabulary(estimator: str) -> None:
    """k1 and k3 have the reverse KL's value. In training, where tokens are drawn and only the estimate is
    differentiated, k1 and k2 have the reverse KL's gradient and k3 has the forward KL's."""
    draw = torch.Generator().manual_seed(0)
    logits_V = torch.randn(7, generator=draw, dtype=torch.float64).requires_grad_()
    near = 0.05 if estimator == "k2" else 1.0  # k2 is biased, but close when the policies are
    reference_V = (logits_V.detach() + near * torch.randn(7, generator=draw, dtype=torch.float64)).log_softmax(0)
    logprobs_V = logits_V.log_softmax(0)
    reverse = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    forward = (reference_V.exp() * (reference_V - logprobs_V)).sum()
    estimate = (logprobs_V.exp().detach() * kl_estimate(logprobs_V, reference_V, estimator)).sum()
    torch.testing.assert_close(estimate, reverse, rtol=0.1 if estimator == "k2" else 1e-7, atol=1e-12)
    wanted, found = (
        torch.autograd.grad(kl, logits_V, retain_graph=True)[0]
        for kl in (forward if estimator == "k3" else reverse, estimate)
    )
    torch.testing.assert_close(found, wanted)


def test_an_extreme_ratio_stays_finite_in_value_and_gradient() -> None:
    logprobs = torch.tensor([0.0, -200.0], requires_grad=True)
    ratio = token_ratio(logprobs, torch.tensor([-200.0, 0.0]))
    ratio.sum().backward()
    assert ratio.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert ratio[0] == torch.tensor(MAX_LOG_RATIO).exp()
