"""Publishing: how the trainer's weights become the engine's.

Colocated, both models hold the same tensors: the trainer quantises a weight once after its optimizer step, in place,
into the very codes that the engine reads, so there is nothing to copy. Where only the rollout is FP8 the trainer has no
codes, and publishing quantises its BF16 weight into the engine's.

Whatever the way, what the engine holds is read back and compared: the bytes of every FP8 weight against the trainer's,
one weight a step quantised afresh (a stale code would show), the KV scales bit for bit. A published set has a digest.

With LoRA the frozen weights and the adapters are shared alike: nothing is merged and nothing copied, a new version is
what the optimizer wrote into the adapters. Codes that were made once stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.kernels.quantize.quantize_weight import check_scales, quantize_weight
from octetrl.layers.linear import Float8Linear, Linear
from octetrl.models.decoder import Decoder


def share_weights(engine_model: Decoder, trainer_model: Decoder) -> None:
    """Make every tensor of `engine_model`, which may have been built on the meta device, the trainer's own.

    A linear that is FP8 on both sides keeps no weight in the engine, only the trainer's codes; one that is FP8 in the
    rollout alone gets codes of its own beside the trainer's weight.
    """
    trainer_modules = dict(trainer_model.named_modules())
    for name, module in engine_model.named_modules():
        theirs = trainer_modules[name]
        for key in module._parameters:
            module._parameters[key] = theirs._parameters[key]
        if isinstance(module, Float8Linear) and not isinstance(theirs, Float8Linear):
            module.codes = torch.zeros_like(module.codes, device=theirs.weight.device)
            module.scale = torch.full_like(module.scale, torch.nan, device=theirs.weight.device)
            continue
        for key in module._buffers:
            module._buffers[key] = theirs._buffers[key]
        if isinstance(module, Float8Linear):
            module.drop_weight()


def quantize_for_engine(engine_model: Decoder, trainer_model: Decoder) -> None:
    """Fill the codes that only the engine has, from the trainer's BF16 weights; one host read for all of them."""
    trainer_modules = dict(trainer_model.named_modules())
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in engine_model.float8_linears():
        if isinstance(trainer_modules[name], Linear) and not module.codes_are_settled:
            module.requantize(name, check=False)
            assert module.weight is not None
            made[name] = (module.weight.detach(), module.scale)
    check_scales(made)


def verify_weights(engine_model: Decoder, trainer_model: Decoder, version: int) -> str:
    """Compare what the engine reads with what the trainer holds; returns the digest of the engine's weights.

    Raises RuntimeError naming the first tensor that differs. Two host synchronisations in all, and few launches: what
    is one memory, as `share_weights` makes it, is told by its address.
    """
    trainer_modules = dict(trainer_model.named_modules())
    linears = list(engine_model.float8_linears())
    compared: list[tuple[str, Tensor]] = []  # the name, and whether all bytes are equal
    rows: list[Tensor] = []  # sums of what an engine reads and a trainer renews
    for index, (name, module) in enumerate(linears):
        theirs = trainer_modules[name]
        held = module.quantized
        if isinstance(theirs, Float8Linear):
            compared += [(name, equal) for equal in _equal_bytes(held, (theirs.codes, theirs.scale))]
        if index == version % len(linears) and theirs.weight is not None:
            fresh = quantize_weight(theirs.weight.detach(), power_of_two=module.power_of_two, check=False)
            compared += [(name, equal) for equal in _equal_bytes(held, (fresh.codes, fresh.scale))]
        rows += [_row_sums(tensor) for tensor in held]
    for name, parameter in engine_model.named_parameters():
        own = (trainer_model.get_parameter(name).detach(),)
        compared += [(name, equal) for equal in _equal_bytes((parameter.detach(),), own)]
    rows += [_row_sums(tensor.detach()) for _, adapter in engine_model.adapters() for tensor in adapter.parameters()]
    if compared:
        for (name, _), equal in zip(compared, torch.stack([equal for _, equal in compared]).tolist(), strict=True):
            if not equal:
                raise RuntimeError(
                    f"publish: the engine's '{name}' differs from the trainer's at policy version {version}; stopping"
                )
    return hashlib.sha256(repr((version, _sum_of_rows(rows))).encode()).hexdigest()[:16]


def _equal_bytes(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
    """Of each pair that is not one memory: whether its bytes are equal, on the device."""
    return [
        (one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all()
        for one, other in zip(ours, theirs, strict=True)
        if one.data_ptr() != other.data_ptr()
    ]


def _row_sums(tensor: Tensor) -> Tensor:
    """int64 sums of the bytes of each row, by words of eight where rows have them; they wrap around, which is fine for
    a digest."""
    octets = tensor.contiguous().view(torch.uint8).flatten(1)
    words = octets.view(torch.int64) if octets.shape[1] % 8 == 0 else octets
    return words.sum(dim=1, dtype=torch.int64)


def _sum_of_rows(rows: Sequence[Tensor]) -> int:
    """A sum to which the order of all rows matters: each counts by an odd number of its own."""
    if not rows:
        return 0
    all_rows = torch.cat(list(rows))
    weights = 2 * torch.arange(all_rows.numel(), device=all_rows.device, dtype=torch.int64) + 1
    return int((all_rows * weights).sum())
