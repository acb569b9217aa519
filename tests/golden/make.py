"""Writes `quantize.safetensors`: inputs and what the quantisers and the emulated GEMM must make of them, byte
for byte.

    python -m tests.golden.make

Inputs come from a small integer generator written out here, so they do not depend on any library's random
numbers. The file is made once, by the plain-torch reference; a CPU test holds the reference to it ever after
and a GPU test holds the Triton kernels to it. Make it once more only when the contract itself (rounding, scales,
layout) is changed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from octetrl.fp8.backends import fp8_gemm_nt
from octetrl.fp8.quantize import (
    Quantized,
    quantize_activation_reference,
    quantize_kv_per_token,
    quantize_tokens_reference,
    quantize_weight_reference,
)

PATH = Path(__file__).with_name("quantize.safetensors")
ROWS, COLUMNS = 130, 140  # ragged both ways


def integers(count: int, seed: int) -> list[int]:
    """31-bit numbers of a linear congruential generator (Numerical Recipes' constants), its better upper
    bits.
    """
    state, numbers = seed, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
        numbers.append(state >> 1)
    return numbers


def golden_input(seed: int) -> torch.Tensor:
    """[130, 140] BF16: products of two integers of very different size, with zero rows, ±448 and subnormal
    rows.
    """
    numbers = torch.tensor(integers(ROWS * COLUMNS, seed), dtype=torch.float64).view(ROWS, COLUMNS)
    centred = numbers / 2**30 - 1
    x = centred**5 * torch.ldexp(torch.ones(ROWS, dtype=torch.float64), torch.arange(ROWS) % 9 - 4)[:, None]
    x[3] = 0
    x[4, :128], x[5, 128:] = 0, -0.0
    x[6] = centred[6].sign() * 448
    x[7] *= 2.0**-120  # the inverse is finite, the scale near float32's smallest normal
    x[8] *= 2.0**-130  # no finite inverse
    x[9] *= 2.0**125
    return x.to(torch.bfloat16)


def golden_inputs() -> dict[str, torch.Tensor]:
    return {"x": golden_input(1), "w": golden_input(2)[10:].clone()}


def put(tensors: dict[str, torch.Tensor], name: str, q: Quantized) -> None:
    tensors[f"{name}.codes"] = q.codes.view(torch.uint8).contiguous()
    tensors[f"{name}.scale"] = q.scale.contiguous()


def golden_tensors() -> dict[str, torch.Tensor]:
    """Everything in the file: inputs as they are, codes as uint8, scales and products as float32."""
    tensors = golden_inputs()
    x, w = tensors["x"], tensors["w"]
    for option, power_of_two in (("float32", False), ("power_of_two", True)):
        put(tensors, f"activation.{option}", quantize_activation_reference(x, power_of_two))
        put(tensors, f"weight.{option}", quantize_weight_reference(w, power_of_two))
        put(tensors, f"tokens.{option}", quantize_tokens_reference(x, power_of_two))
    put(tensors, "kv_per_token", quantize_kv_per_token(x[:, :128].view(ROWS, 2, 64)))
    ordinary_rows = x[10:20]  # row 9 is 2^125 large: its products leave float32
    forward = fp8_gemm_nt(quantize_activation_reference(ordinary_rows), quantize_weight_reference(w))
    tensors["forward"] = forward.view(torch.int16)
    return tensors


if __name__ == "__main__":
    save_file(golden_tensors(), PATH)
    print(f"wrote {PATH}, {PATH.stat().st_size} bytes")
