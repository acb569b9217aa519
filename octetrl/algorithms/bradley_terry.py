"""The reward model's loss of one preference pair (Bradley-Terry; InstructGPT, arXiv 2203.02155, eq. 1).

    P(chosen is better) = sigmoid(margin)          margin = r_chosen - r_rejected
    loss = -log sigmoid(margin) + center * (r_chosen + r_rejected)^2

Only differences are observed, so rewards may drift together; `center` (arXiv 2312.09244; 0.01 there, 0 here) pulls
their sum towards 0. A model that can't tell the two apart has margin 0 and loss log 2; its accuracy counts as 0.

P pairs of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from octetrl.algorithms.token_loss import TokenLoss

RewardLoss = Callable[[Tensor, Tensor], TokenLoss]  # rewards of chosen and rejected [P] -> loss of each pair


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, center: float = 0.0) -> TokenLoss:
    """Per-pair loss [P] from float32 rewards, and its metrics."""
    margin_P = chosen_P - rejected_P
    loss_P = -logsigmoid(margin_P)
    if center:
        loss_P = loss_P + center * (chosen_P + rejected_P).square()
    metrics = {
        "preference/accuracy": (margin_P > 0).float(),
        "preference/margin": margin_P.detach(),
        "preference/chosen_reward": chosen_P.detach(),
        "preference/rejected_reward": rejected_P.detach(),
    }
    return TokenLoss(loss_P, metrics)
