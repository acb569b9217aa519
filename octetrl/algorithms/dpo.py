"""Learning from preference pairs without a reward model: DPO, cDPO and IPO.

With y+ preferred to y-, a reference policy q, and the difference of the log-ratios, each summed over a whole answer,

    h = (log p(y+) - log q(y+)) - (log p(y-) - log q(y-))

    dpo   -(1 - e) log sigmoid(b h) - e log sigmoid(-b h)     arXiv 2305.18290, eq. 7; e: labels that are wrong (cDPO)
    ipo   (h - 1 / (2 b))^2                                    arXiv 2310.12036, eq. 17: h is fitted, not driven off

b = `preference_beta` is the strength of the pull to the reference (0.1; IPO wants it larger the fewer the pairs). With
e = 0 it is DPO as published; at p = q every DPO loss is log 2 and every IPO loss 1 / (4 b^2). Take IPO, or e > 0, where
labels are noisy or nearly all agree: DPO's h then grows without end. `preference/accuracy` counts h = 0 as wrong.

`preference_logprobs: mean` divides each log-ratio by the tokens of its answer, as TRL does for IPO. Then h, and with it
a good b, depend less on length, and a short answer is no longer cheaper to move.

A pair's loss stands on every token of both answers. With `sequence` weights each answer adds it once, and the trainer
divides by the number of answers: the mean over pairs, however they were packed. Metrics have one value a pair.

N trained tokens, B samples (chosen and rejected side by side), P = B / 2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import DpoConfig
from octetrl.config.objective_settings import PreferenceSettings


def preference_loss(inputs: LossInputs, config: PreferenceSettings) -> TokenLoss:
    """Per-token loss [N], the same on all tokens of a pair, and its metrics [P]; reference and chosen are required."""
    reference_N, pairs = inputs.reference_logprobs_N, inputs.num_sequences // 2
    assert reference_N is not None and inputs.chosen_N is not None, "preferences need a reference and pairs"
    sign_P2 = _summed(inputs.chosen_N.float() * 2 - 1, inputs).sign().view(pairs, 2)
    assert bool((sign_P2.sum(1) == 0).all()), "chosen and rejected of a pair stand side by side"
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
    """Over the tokens of each sample, float32 [B]."""
    return values_N.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_N, values_N)


def _mean(values_N: Tensor, inputs: LossInputs) -> Tensor:
    return _summed(values_N, inputs) / _summed(torch.ones_like(values_N), inputs)
