"""What ends an update whose numbers are not finite: never a step, always a name."""

from __future__ import annotations

from torch import Tensor

from octetrl.fp8.non_finite import NonFiniteError as NonFiniteError
from octetrl.records import MicroBatch


def refuse_non_finite(what: str, values_N: Tensor, micro_batch: MicroBatch) -> None:
    """NonFiniteError naming the first of the values of its trained tokens that is not finite by sample and position."""
    finite_N = values_N.isfinite()
    if bool(finite_N.all()):
        return
    first = int((~finite_N).nonzero()[0, 0])
    raise NonFiniteError(
        f"the {what} of sample {int(micro_batch.sample_N[first])} of the batch at position"
        f" {int(micro_batch.target_positions_N[first])} is {float(values_N[first])} ({int((~finite_N).sum())} such in"
        f" its micro-batch); nothing was stepped"
    )
