"""Loads the weights of a policy version into the engine's model, and reads back what it holds.

In one process, trainer and engine hold the same tensors: `share_weights` gives the engine's model the trainer's memory
once. After an optimizer step the trainer quantises each weight once, in place, into the codes that the engine reads, so
`put_weights` copies nothing. If only the rollout is FP8, the trainer has no codes, and `put_weights` quantises its BF16
weight into the engine's codes. Weights in other memory (a `WeightSet` of another process) are copied in place, so
captured graphs stay valid.

In all cases `weights_digest` reads back what the engine holds and compares it with what was put in: the bytes of every
FP8 weight and of every other parameter. One weight per version is quantised again, so that stale codes are found.

With LoRA the frozen weights and the adapters are shared in the same way. Nothing is merged or copied: a new version is
what the optimizer wrote into the adapters. The codes of frozen weights do not change.

**Weight digest.** A digest of weights from sums over their bytes, computed where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.fp8.kv_scales import KVScales
from octetrl.kernels.rows.sum_words import mixed_with_places, sum_words
from octetrl.layers.linear import Float8Linear
from octetrl.layers.many_linears import requantize
from octetrl.models.decoder import Decoder
from octetrl.records import WeightSet


def share_weights(model: Decoder, trainer_model: Decoder) -> None:
    """Makes every tensor of `model`, which may have been built on the meta device, the trainer's own.

    A linear that is FP8 on both sides keeps no weight in the engine, only the trainer's codes. A linear that is FP8
    only in the rollout gets its own codes beside the trainer's weight.
    """
    trainer_modules = dict(trainer_model.named_modules())
    for name, module in model.named_modules():
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


@torch.no_grad()
def put_weights(model: Decoder, weights: WeightSet) -> None:
    """Copies tensors that are not shared, and quantises BF16 weights into codes that only the engine has.

    Synchronises with the host once. Raises ValueError naming a weight that is not finite.
    """
    for name, parameter in model.named_parameters():
        _copy(parameter, weights.tensors[name])
    made: dict[str, Float8Linear] = {}
    for name, linear in model.float8_linears():
        if name in weights.codes:
            codes, scale = weights.codes[name]
            _copy(linear.codes, codes)
            _copy(linear.scale, scale)
        elif not linear.skips_requantize:
            assert linear.weight is not None, f"{name} has no codes, and the engine has no weight to quantise"
            made[name] = linear
    requantize(made)


def weights_digest(model: Decoder, weights: WeightSet, *, covers_all: bool = False) -> str:
    """Compares what the engine reads with `weights`, as last put in; returns the digest of the engine's weights.

    It covers codes, scales and adapters; if `covers_all`, all parameters. Raises RuntimeError naming the first tensor
    that differs. It needs one host synchronisation and few launches; shared memory is recognised by its address.
    """
    version = weights.policy_version
    linears = list(model.float8_linears())
    compared: list[tuple[str, Tensor]] = []  # the name, and whether all bytes are equal
    read: list[Tensor] = []  # what an engine reads and a trainer updates
    for index, (name, linear) in enumerate(linears):
        held = linear.quantized
        if name in weights.codes:
            compared += [(name, equal) for equal in _equal_bytes(held, weights.codes[name])]
        weight = weights.tensors.get(f"{name}.weight")
        if index == version % len(linears) and weight is not None:
            fresh = linear.quantize(weight)
            compared += [(name, equal) for equal in _equal_bytes(held, (fresh.codes, fresh.scale))]
        read += held
    for name, parameter in model.named_parameters():
        compared += [(name, equal) for equal in _equal_bytes((parameter.detach(),), (weights.tensors[name],))]
    adapters = [tensor for _, adapter in model.adapters() for tensor in adapter.parameters()]
    read += [tensor.detach() for tensor in (model.parameters() if covers_all else adapters)]
    digest, flags = digest_and_flags(version, read, [equal for _, equal in compared])
    for (name, _), equal in zip(compared, flags, strict=True):
        if not equal:
            raise RuntimeError(
                f"publish: the engine's '{name}' differs from the trainer's at policy version {version}; stopping"
            )
    return digest


def weight_set(trainer_model: Decoder, version: int, kv_scales: KVScales | None = None) -> WeightSet:
    """The trainer's weights as a `WeightSet` of policy version `version`: live tensors, no copies.

    Weights that this worker does not have whole are left out; the set has their codes.
    """
    parameters = trainer_model.named_parameters()
    tensors = {name: one.detach() for name, one in parameters if one.untyped_storage().nbytes() > 0 or one.numel() == 0}
    codes = {name: (linear.codes, linear.scale) for name, linear in trainer_model.float8_linears()}
    return WeightSet(version, tensors, codes, kv_scales)


def _copy(held: Tensor, given: Tensor) -> None:
    if held.data_ptr() != given.data_ptr():
        held.copy_(given)


def _equal_bytes(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[Tensor]:
    """For each pair that does not share memory: whether its bytes are equal, on the device."""
    return [
        (one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all()
        for one, other in zip(ours, theirs, strict=True)
        if one.data_ptr() != other.data_ptr()
    ]


def digest_of(version: int, tensors: Sequence[Tensor]) -> str:
    """The digest of policy version `version` and the bytes of these tensors, in their order."""
    return digest_and_flags(version, tensors, ())[0]


def digest_and_flags(version: int, tensors: Sequence[Tensor], flags: Sequence[Tensor]) -> tuple[str, list[bool]]:
    """`digest_of`, and the values of boolean scalars, which are read from the device in the same host synchronisation.

    Each word is mixed with its place in its row, and each row's sum with the row's place among the rows of all tensors.
    So two words that changed places show, two rows or tensors, and two changed signs. Sums may wrap around.
    """
    total = mixed_with_places(sum_words(tensors)).sum()
    read = [total] if not flags else [torch.stack(list(flags)).long(), total.to(flags[0].device)]
    *values, number = torch.cat([one.view(-1) for one in read]).tolist()
    return hashlib.sha256(repr((version, number)).encode()).hexdigest()[:16], [bool(value) for value in values]
