"""Learning from preference pairs without a reward model: DPO, cDPO and IPO.

y+ is preferred to y-, q is the reference policy. h is the difference of the two log-ratios, each summed over its
answer:

    h = (log p(y+) - log q(y+)) - (log p(y-) - log q(y-))

    dpo   -(1 - e) log sigmoid(b h) - e log sigmoid(-b h)     arXiv 2305.18290, eq. 7; e: share of wrong labels (cDPO)
    ipo   (h - 1 / (2 b))^2                                    arXiv 2310.12036, eq. 17: h is fitted to a finite value

b = `preference_beta` is the strength of the pull to the reference (default 0.1; IPO needs a larger one if there are few
pairs). With e = 0 it is DPO as published. At p = q every DPO loss is log 2, and every IPO loss is 1 / (4 b^2). Use IPO,
or e > 0, if labels are noisy or nearly all agree: DPO's h then grows without bound. `preference/accuracy` counts h = 0
as wrong.

`preference_logprobs: mean` divides each log-ratio by the number of tokens of its answer, as TRL does for IPO. h then
depends less on length, and so does a good b. Short answers are no longer cheaper to move than long ones.

Every token of both answers carries the loss of its pair. With `sequence` weights each answer adds the loss once, and
the trainer divides by the number of answers. The result is the mean over pairs, independent of packing. Metrics have
one value per pair.

N trained tokens, B samples (chosen and rejected are neighbours), P = B / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import DpoConfig
from octetrl.config.objective_settings import PreferenceSettings


def preference_loss(inputs: LossInputs, config: PreferenceSettings) -> TokenLoss:
    """Per-token loss [N], equal on all tokens of a pair, and its metrics [P].

    `inputs` must have the reference's log-probs and `chosen_N`.
    """
    reference_N, pairs = inputs.reference_logprobs_N, inputs.num_sequences // 2
    assert reference_N is not None and inputs.chosen_N is not None, "preferences need a reference and pairs"
    sign_P2 = _summed(inputs.chosen_N.float() * 2 - 1, inputs).sign().view(pairs, 2)
    assert bool((sign_P2.sum(1) == 0).all()), "chosen and rejected of a pair must be neighbours"
    of_answer = _mean if config.preference_logprobs == "mean" else _summed
    logprobs_P2 = of_answer(inputs.logprobs_N, inputs).view(pairs, 2)
    ratios_P2 = of_answer(inputs.logprobs_N - reference_N, inputs).view(pairs, 2)
    beta = config.preference_beta
    difference_P = (ratios_P2 * sign_P2).sum(1)
    if isinstance(config, DpoConfig):
        wrong = config.label_smoothing
        loss_P = -(1 - wrong) * logsigmoid(beta * difference_P) - wrong * logsigmoid(-beta * difference_P)
    else:
        loss_P = (difference_P - 1 / (2 * beta)).square()
    chosen_P2 = sign_P2 > 0
    of_pairs = {
        "preference/accuracy": (difference_P > 0).float(),
        "preference/margin": beta * difference_P,
        "preference/chosen_reward": beta * ratios_P2[chosen_P2],
        "preference/rejected_reward": beta * ratios_P2[~chosen_P2],
        "preference/chosen_logprob": logprobs_P2[chosen_P2],
        "preference/rejected_logprob": logprobs_P2[~chosen_P2],
    }
    return TokenLoss(loss_P[inputs.sequence_N // 2], {name: values_P.detach() for name, values_P in of_pairs.items()})


def _summed(values_N: Tensor, inputs: LossInputs) -> Tensor:
    """Sums over the tokens of each sample, float32 [B]."""
    return values_N.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_N, values_N)


def _mean(values_N: Tensor, inputs: LossInputs) -> Tensor:
    return _summed(values_N, inputs) / _summed(torch.ones_like(values_N), inputs)
