"""GRPO's loss against the formula worked out token by token in Python, finite differences, and REINFORCE."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octetrl.algorithms.grpo import grpo_loss
from octetrl.algorithms.token_loss import LossInputs
from tests.objectives import objective

CONFIG = objective(clip_low=0.2, clip_high=0.3, kl_coefficient=0.1, corrections=("tis",), tis_cap=2.0)


def inputs_of(logprobs: Tensor, **changes: object) -> LossInputs:
    given = {"advantages_N": torch.ones_like(logprobs), "generator_logprobs_N": logprobs.detach().clone()}
    given |= {"sequence_N": torch.zeros_like(logprobs, dtype=torch.int64), "num_sequences": 1}
    return LossInputs(logprobs_N=logprobs, entropy_N=torch.zeros_like(logprobs), **(given | changes))


def by_hand(logprob: float, proximal: float, generator: float, reference: float, advantage: float) -> float:
    ratio, weight = math.exp(logprob - proximal), min(math.exp(proximal - generator), 2.0)
    clipped = min(max(ratio, 0.8), 1.3)
    kl = math.exp(reference - logprob) - 1.0 - (reference - logprob)
    return -weight * min(ratio * advantage, clipped * advantage) + 0.1 * kl


def test_loss_and_metrics_by_hand() -> None:
    logprobs = [-1.0, -1.0, -0.5, -0.5, -2.0, -2.0]
    proximal = [-1.1, -1.6, -0.6, -0.1, -2.0, -1.0]
    generator = [-1.1, -1.5, -1.6, -0.2, -2.5, -1.1]
    reference = [-1.3, -1.0, -0.9, -0.4, -2.0, -3.0]
    advantages = [1.0, 1.0, -1.0, -1.0, 2.0, 0.5]
    loss = grpo_loss(
        inputs_of(
            torch.tensor(logprobs),
            proximal_logprobs_N=torch.tensor(proximal),
            generator_logprobs_N=torch.tensor(generator),
            reference_logprobs_N=torch.tensor(reference),
            advantages_N=torch.tensor(advantages),
        ),
        CONFIG,
    )
    rows = zip(logprobs, proximal, generator, reference, advantages, strict=True)
    torch.testing.assert_close(loss.loss_N, torch.tensor([by_hand(*row) for row in rows]))
    assert loss.metrics["ratio/clip_fraction"].tolist() == [0, 1, 0, 1, 0, 0]
    assert loss.metrics["correction/clip_fraction"].tolist() == [0, 0, 1, 0, 0, 0]
    assert loss.metrics["correction/mean_weight"][2] == 2.0
    assert loss.metrics["correction/mean_square_weight"][2] == 4.0
    assert loss.metrics["correction/tis_fraction"].tolist() == [0, 0, 1, 0, 0, 0]
    assert set(loss.metrics) == {
        "ratio/clip_fraction", "ratio/limited_fraction", "correction/clip_fraction", "correction/tis_fraction",
        "correction/mean_weight", "correction/mean_square_weight", "kl",
    }  # fmt: skip


@pytest.mark.parametrize("estimator", ["k2", "k3"])  # k1's gradient is not its value's, on purpose
def test_gradient_by_finite_differences(estimator: str) -> None:
    torch.manual_seed(1)
    logprobs, proximal, generator, reference, advantages = torch.randn(5, 16, dtype=torch.float64)
    config = CONFIG.model_copy(update={"kl_estimator": estimator})

    def loss(logprobs_N: Tensor) -> Tensor:
        return grpo_loss(
            inputs_of(
                logprobs_N,
                proximal_logprobs_N=proximal,
                generator_logprobs_N=generator,
                reference_logprobs_N=reference,
                advantages_N=advantages,
            ),
            config,
        ).loss_N

    assert torch.autograd.gradcheck(loss, (logprobs.requires_grad_(),))


def test_on_policy_the_correction_mends_what_is_left_of_the_mismatch() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = grpo_loss(inputs_of(logprobs, generator_logprobs_N=torch.tensor([-1.1, -3.0]), on_policy=True), objective())
    torch.testing.assert_close(torch.autograd.grad(loss.loss_N.sum(), logprobs)[0], -torch.tensor([math.exp(0.1), 2.0]))


def test_stale_samples_and_one_update_are_clipped_against_the_generator_and_corrected_once() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = grpo_loss(inputs_of(logprobs, generator_logprobs_N=torch.tensor([-1.1, -3.0])), CONFIG)
    torch.testing.assert_close(loss.loss_N, -torch.tensor([math.exp(0.1), 1.3]))
    assert torch.autograd.grad(loss.loss_N.sum(), logprobs)[0][1] == 0.0
    assert loss.metrics["correction/mean_weight"].tolist() == [1.0, 1.0]


def test_masked_tokens_give_no_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = grpo_loss(
        inputs_of(logprobs, generator_logprobs_N=torch.tensor([-1.1, -3.0]), on_policy=True),
        objective(corrections=("tis", "token_mask")),
    )
    assert torch.autograd.grad(loss.loss_N.sum(), logprobs)[0][1] == 0.0


def test_without_generator_logprobs_it_says_so() -> None:
    with pytest.raises(AssertionError, match="engine"):
        grpo_loss(inputs_of(torch.zeros(2), generator_logprobs_N=None), CONFIG)
