"""What ends an update whose numbers are not finite: never a step, always a name."""

from __future__ import annotations

from torch import Tensor


class NonFiniteError(RuntimeError):
    """The loss or a gradient is not finite; the weights are those before the step."""


def refuse_non_finite(what: str, values_N: Tensor, sequence_N: Tensor, target_positions_N: Tensor) -> None:
    """NonFiniteError naming the first of the values [N] that is not finite by its sample and position."""
    finite_N = values_N.isfinite()
    if bool(finite_N.all()):
        return
    first = int((~finite_N).nonzero()[0, 0])
    raise NonFiniteError(
        f"{what} {float(values_N[first])} of sample {int(sequence_N[first])} at position"
        f" {int(target_positions_N[first])} ({int((~finite_N).sum())} such values): nothing was stepped"
    )
