"""On-policy distillation: the policy learns from a teacher's distribution at positions that the policy sampled itself.

    sampled      A_t = log q(y_t) - log p(y_t)    advantage of each sampled token, computed before the first update:
                                                  the policy gradient of KL(p || q); MiniLLM, arXiv 2306.08543
    reverse_kl   sum_k p_k (log p_k - log q_k)    the policy concentrates on what the teacher finds likely
    forward_kl   sum_k q_k (log q_k - log p_k)    the policy covers all that the teacher finds likely; GKD,
                                                  arXiv 2306.13649

q is the teacher and p the policy. Each KL is computed over the teacher's K likeliest tokens at a position and one more
outcome, which stands for all other tokens. This KL is never negative, at most the full KL, equal to it for K = V, and 0
where p = q. It is differentiated through p at the sampled positions; the sampling is not differentiated.

`sampled` needs one number per token. It is unbiased but noisy, and it uses GRPO's loss, which bounds the ratio of stale
samples. A KL carries K times as many numbers per token and costs one more product with the policy's lm_head. Rewards
are measured but do not enter the loss.

N trained tokens, K tokens of the teacher.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.config.algorithm import DistillConfig

NO_OTHERS = -110.0  # log-prob of all other tokens where there are none: its exponential is 0 in float32


def teacher_advantages(rewards: TokenRewards) -> Tensor:
    """log q - log p of each sampled token, float32 [N]."""
    assert rewards.kl_N is not None, "distillation needs the teacher's log-probs"
    return -rewards.kl_N


def divergence_loss(inputs: LossInputs, config: DistillConfig) -> TokenLoss:
    """The KL at each position, float32 [N], and metrics, among them the log-ratio of the sampled tokens."""
    policy_NK1, teacher_NK1 = inputs.top_logprobs_NK1, inputs.teacher_top_logprobs_NK1
    assert policy_NK1 is not None and teacher_NK1 is not None and inputs.reference_logprobs_N is not None
    p_NK1, q_NK1 = (one.masked_fill(one == -torch.inf, NO_OTHERS) for one in (policy_NK1, teacher_NK1))
    above_NK1, below_NK1 = (p_NK1, q_NK1) if config.distillation == "reverse_kl" else (q_NK1, p_NK1)
    loss_N = (above_NK1.exp() * (above_NK1 - below_NK1)).sum(1)
    metrics = {
        "distill/log_ratio": (inputs.logprobs_N - inputs.reference_logprobs_N).detach(),
        "distill/teacher_mass": teacher_NK1[:, :-1].exp().sum(1),
        "distill/policy_mass": policy_NK1[:, :-1].detach().exp().sum(1),
    }
    return TokenLoss(loss_N, metrics)
