"""The reward model's loss of one preference pair (Bradley-Terry; InstructGPT, arXiv 2203.02155, eq. 1).

    P(chosen is better) = sigmoid(margin)          margin = r_chosen - r_rejected
    loss = -log sigmoid(margin) + center * (r_chosen + r_rejected)^2

The data determine only differences, so the mean of the rewards may drift. `center` pulls their sum towards 0 (arXiv
2312.09244 uses 0.01; the default here is 0). A model that cannot tell the two answers apart has margin 0 and loss log
2. Its accuracy counts as 0.

P pairs of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from octetrl.algorithms.token_loss import TokenLoss

RewardLoss = Callable[[Tensor, Tensor], TokenLoss]  # rewards of chosen and rejected [P] -> loss of each pair


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, center: float = 0.0) -> TokenLoss:
    """Loss of each pair, float32 [P], and its metrics. `chosen_P`, `rejected_P`: float32 rewards [P]."""
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
