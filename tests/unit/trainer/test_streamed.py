"""An update whose loss has another divisor until its denominator is known: a power of two keeps the bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.records import PackedBatch
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.trainer.streamed import StreamedCall
from tests.unit.trainer.tiny_trainer import BF16, FP8, objective, random_samples, tiny_decoder, tiny_trainer


def gradients_of(fp8: bool, quotient: float | None) -> dict[str, Tensor]:
    """Of one update. `quotient`: divisor / denominator; None: by `Trainer.train`."""
    trainer = tiny_trainer(tiny_decoder(FP8 if fp8 else BF16, torch.bfloat16), objective())
    kv = KVReplay(trainer.model.policy.kv_mode)
    batch = pack(random_samples(24), trainer.layout, "token")
    (micro_batches,), (denominator,) = batch.minibatches, batch.loss_denominators
    found: dict[str, Tensor] = {}
    clip = trainer.optimizer.clip_gradients

    def look() -> Tensor:
        found.update({name: one.double().clone() for name, one in trainer.optimizer.gradients.owned.items()})
        return clip()

    trainer.optimizer.clip_gradients = look  # type: ignore[method-assign]
    if quotient is None:
        trainer.train(batch, kv, None)
    else:
        call = StreamedCall(trainer, denominator * quotient)
        for one in micro_batches:
            call.add(PackedBatch(((one,),), (denominator,), batch.policy_version), kv, None)
        call.finish(batch, kv, None)
    assert len(micro_batches) > 1 and found
    return found


def difference(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Norm of the difference by the norm of `other`."""
    return float(
        (sum((mine[name] - other[name]).square().sum() for name in other)) ** 0.5
        / sum(one.square().sum() for one in other.values()) ** 0.5
    )


@pytest.mark.parametrize("fp8", [False, True])
def test_quotients_that_are_powers_of_two_keep_the_bits_and_others_the_size(fp8: bool) -> None:
    expected = gradients_of(fp8, None)
    for quotient in (0.5, 4.0):
        mine = gradients_of(fp8, quotient)
        assert all(torch.equal(mine[name], one) for name, one in expected.items()), quotient
    for quotient in (0.71, 3.0):
        assert 1e-3 < difference(gradients_of(fp8, quotient), expected) < (0.12 if fp8 else 0.02), quotient
