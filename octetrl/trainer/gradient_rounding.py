"""BF16 gradient sums (`trainer.gradients: bfloat16`): how a contribution is added, and the error that this makes.

Each addition rounds stochastically (kernels/optimizer/add_gradient_rounded.py). A compensated sum would need a second
BF16 number for each weight, as much memory as float32. Error of the sum, relative to it, of M micro-batches' gradients
with a common part and 4 times, or a tenth, as much noise of their own (tests/unit/trainer/test_gradient_rounding.py):

    M                               4        16       64       256      1,024
    stochastic, either kind         0.3%     0.6%     1.1%     2.2%     4.3%
    to nearest, mostly noise        0.3%     0.5%     0.8%     1.5%     6.0%
    to nearest, nearly equal        0.2%     0.4%     1.3%     7.2%     60%

To nearest, small contributions to a large sum are lost, all in one direction. Stochastic rounding has no bias, so that
its errors average out over steps.

The random bits of an addition depend only on seed, optimizer step, worker, parameter, the number of the addition within
the step, and the element's number in the whole parameter. The same number of workers repeats its bits, also after a
resume. Workers that sum whole gradients draw different bits, so that their errors do not add up.
"""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import torch
from torch import Tensor

from octetrl.kernels.optimizer.add_gradient_rounded import add_gradient_rounded
from octetrl.trainer.peers import Peers
from octetrl.trainer.stochastic_rounding import chance_key


class GradientRounding:
    """Of the sums of one optimizer. `worker`: "" if all workers share the random bits of their rows."""

    dtype = torch.bfloat16

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._step, self.worker = seed, 0, ""
        self._additions: Counter[str] = Counter()  # of each parameter in this optimizer step
        self._squared_error = torch.zeros((), dtype=torch.float64, device=device)
        self._norms: list[Tensor] = []  # of error and gradient [2], of the optimizer steps since `take_metrics`

    def begin(self, step: int) -> None:
        """A new sum. `step`: number of the optimizer step."""
        self._step = step
        self._additions.clear()
        self._squared_error.zero_()

    def add(self, sum_: Tensor, gradient: Tensor, name: str, *, first: int = 0) -> None:
        """Add to the sum of parameter `name`, or of a part whose first element has number `first`."""
        part = f"{name}/{first}"
        self._additions[part] += 1
        label = f"gradient/{self.worker}/{name}/{self._additions[part]}"
        key = chance_key(seed=self._seed, step=self._step, name=label)
        add_gradient_rounded(sum_, gradient, self._squared_error, key=key, first=first)

    def end(self, norm: Tensor, peers: Peers) -> None:
        """The sums are complete. norm: of the whole gradient."""
        squared = peers.sum(self._squared_error.reshape(1), "gradient error")[0]
        self._norms.append(torch.stack([squared.sqrt(), norm.double()]))

    def take_metrics(self) -> dict[str, float]:
        """`gradients/rounding_error`: expected norm of the error over the norm of the gradient, the mean of the
        optimizer steps since the last call whose gradient is not 0."""
        norms, self._norms = self._norms, []
        errors = [error / gradient for error, gradient in (both.tolist() for both in norms) if gradient != 0]
        return {"gradients/rounding_error": fmean(errors)} if errors else {}
