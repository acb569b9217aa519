"""On-policy distillation: learning from what a teacher would have said at the places that the policy itself reached.

    sampled      A_t = log q(y_t) - log p(y_t)    the advantage of each drawn token, before the first update: the
                                                  policy gradient of KL(p || q); MiniLLM, arXiv 2306.08543
    reverse_kl   sum_k p_k (log p_k - log q_k)    the policy keeps to what the teacher would say
    forward_kl   sum_k q_k (log q_k - log p_k)    it covers all that the teacher might say; GKD, arXiv 2306.13649

with q the teacher and p the policy. A KL is over the teacher's K likeliest tokens at each place, all others counted as
one more: never more than the whole KL, equal to it for K = V, never negative, and 0 where p = q. It is differentiated
through p at the places drawn, not through what was drawn. `sampled` needs one number a token, is unbiased but noisy,
and goes through GRPO's loss, which bounds the ratio of stale samples; a KL says K times more a token, for the lm_head
of the policy once more. Rewards are measured and not learnt from.

N trained tokens, K tokens of the teacher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.algorithm import DistillConfig

LEAST_REST = 1e-6  # of all other tokens together: below it float32's sum of the K is all rounding


def teacher_advantages(rewards: TokenRewards) -> Tensor:
    """log q - log p of each drawn token, float32 [N]."""
    assert rewards.kl_N is not None, "distillation needs the teacher's log-probs"
    return -rewards.kl_N


def divergence_loss(inputs: LossInputs, config: DistillConfig) -> TokenLoss:
    """The KL at each place, float32 [N], and the drawn tokens' log-ratio."""
    policy_NK, teacher_NK = inputs.top_logprobs_NK, inputs.teacher_top_logprobs_NK
    assert policy_NK is not None and teacher_NK is not None and inputs.reference_logprobs_N is not None
    p_NK1, q_NK1 = _with_rest(policy_NK), _with_rest(teacher_NK)
    above_NK1, below_NK1 = (p_NK1, q_NK1) if config.distillation == "reverse_kl" else (q_NK1, p_NK1)
    loss_N = (above_NK1.exp() * (above_NK1 - below_NK1)).sum(1)
    metrics = {
        "distill/log_ratio": (inputs.logprobs_N - inputs.reference_logprobs_N).detach(),
        "distill/teacher_mass": teacher_NK.exp().sum(1),
        "distill/policy_mass": policy_NK.detach().exp().sum(1),
    }
    return TokenLoss(loss_N, metrics)


def _with_rest(logprobs_NK: Tensor) -> Tensor:
    """Log-probs of the K tokens and of all others together, float32 [N, K + 1]."""
    rest_N = (1 - logprobs_NK.exp().sum(1)).clamp(min=LEAST_REST)
    return torch.cat([logprobs_NK, rest_N.log()[:, None]], dim=1)
