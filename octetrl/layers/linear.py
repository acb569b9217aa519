"""The two linears of the house: `Linear` in the model's dtype and `Float8Linear` in block-scaled FP8. Both
sides use them.

`Float8Linear` is one autograd Function with three GEMMs (fp8/gemm.py):

    forward   y[M, N]  = q(x)[M, K]    w8[N, K]^T       x quantised 1x128 along K, on the fly
    dgrad     dx[M, K] = q(dy)[M, N]   w8[N, K]         dy quantised 1x128 along N; forward's very codes, transposed
    wgrad     dw[N, K] = qt(dy)[N, M]  qt(x)[K, M]^T    both quantised again in blocks of 128 tokens; x's span 128
                                                        channels too if `square_wgrad`: the faster GEMM

The weight is quantised **once per optimizer step**, by `requantize()`, from its BF16 rounding, into the
buffers `codes` and `scale`; forward does not quantise it. The engine reads the same buffers, so trainer and
engine multiply by the same bytes. Whether the codes are those of the present weight is judged by the tensor's
version counter, which every in-place change through autograd-visible operations bumps (an optimizer's step,
`copy_` under no_grad; not writes through `.data`): forward refuses stale codes instead of training on last
step's.

While a trained weight is updated, its codes may be freed (`release_codes`). Each product then quantises the weight
again, in the orientation that it needs and to the same bytes, and FP8 needs no more memory than BF16. `requantize()`
restores the codes in the same tensor, at another address.

An engine's copy has no `weight` (`drop_weight()`): it only reads `codes` and `scale`, which the trainer writes. Until
then `scale` is NaN, so a missing publish shows at the first token.

Where a GPU runs fused (models/rollout_forward.py, models/training_forward.py) these modules hold the tensors; what is
kept for backward there is told there. Here the input is saved in BF16, not its codes. Forward's codes have their blocks
along K and wgrad needs them along tokens, so codes would mean a second quantisation in forward, thrown away and redone
wherever activations are recomputed; and a neighbour may keep that tensor anyway (attention its output). Price: one byte
more per element where none does.

`lora`, where a model has adapters, is a branch that the product is handed to, with the input in the model's dtype
(layers/lora.py). The weight is frozen then, and where it is FP8 the trainer may drop it too.

Layouts on Hopper: `codes` [N, K] row-major serves forward; dgrad's operand must be row-major [K, N], so
`requantize` also fills a transposed copy, made on first use (an engine's copy never has one). Emulated, each
side keeps a float64 copy of the codes' values and renews it when the codes' version counter moves: decoding
costs more than a small GEMM.

Order of rounding, the same for trainer and engine because it is the same module. CPU: accumulate, add the
bias in float32, round to the output dtype once. CUDA: cuBLAS rounds to BF16, then the bias is added in BF16.
CPU forwards accumulate in float64 (`Linear`) or exactly (`Float8Linear` emulated), so a row's bits do not
depend on the batch, the number of threads or the padding. Backward makes no such promise and runs in float32.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octetrl.fp8.format import BLOCK, E4M3, decode_e4m3
from octetrl.fp8.gemm import BackendName, fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad, transposed
from octetrl.fp8.quantize import Quantized, quantize_activation_values, quantize_tokens_values, row_chunks
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.quantize.quantize_weight import quantize_weight, quantize_weight_transposed
from octetrl.layers.lora import LoraAdapter

GIVEN_BACK = "the codes were freed for an update: requantize() restores them"

_ACTIVATION_QUANTIZERS: dict[BackendName, Callable[[Tensor, bool], Quantized]] = {
    "scaled_mm": quantize_activation,
    "emulated": quantize_activation_values,
}
_TOKEN_QUANTIZERS: dict[BackendName, Callable[[Tensor, bool, bool], Quantized]] = {
    "scaled_mm": quantize_tokens,
    "emulated": quantize_tokens_values,
}


class Linear(nn.Module):
    """y = x W^T + b in `dtype`. weight [N, K], bias [N] or None; x [..., K].

    On a GPU the product is cuBLAS's here and the bias is added after its rounding, as in the fused forwards. Their
    product is `bf16_gemm`'s, of one order at every M where it promises one; cuBLAS's may follow M at few rows, and
    there this module's bits may not be theirs. On a CPU a row's bits depend on the row alone.

    `fast`: a fused forward too takes `F.linear`, bias included, at any M.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        *,
        fast: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.fast = in_features, out_features, fast
        self.weight = nn.Parameter(_initial_weight(out_features, in_features, dtype, device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.lora: LoraAdapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.reshape(-1, self.in_features)
        if x.device.type != "cpu":
            y_MN = F.linear(x_MK, self.weight)
            y_MN = y_MN if self.bias is None else y_MN + self.bias
        else:
            y_MN = _LinearFunction.apply(x_MK, self.weight, self.bias)
        y_MN = y_MN if self.lora is None else self.lora(y_MN, x_MK)
        return y_MN.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, {self.weight.dtype}"


class _LinearFunction(torch.autograd.Function):
    """CPU only. Forward accumulates in float64 and rounds to float32, adds the bias, rounds; backward in
    float32.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        weight_KN = weight_NK.double().t()
        y_MN = torch.empty(x_MK.shape[0], weight_NK.shape[0], dtype=x_MK.dtype)
        for rows in row_chunks(x_MK.shape[0], max(weight_NK.shape), 1):
            chunk_MN = (x_MK[rows].double() @ weight_KN).float()
            y_MN[rows] = chunk_MN if bias_N is None else chunk_MN.add_(bias_N)
        return y_MN

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        dy_MN = dy_MN.float()
        dx_MK = (dy_MN @ weight_NK.float()).to(x_MK.dtype) if need_x else None
        dweight_NK = (dy_MN.t() @ x_MK.float()).to(weight_NK.dtype) if need_weight else None
        return dx_MK, dweight_NK, dy_MN.sum(0) if need_bias else None


class Float8Linear(nn.Module):
    """y = x W^T + b with FP8 operands. x [..., K]; `weight` [N, K] in `dtype`; `codes` and `scale` are what
    is multiplied.

    `backend` is `choose_backend(device, emulate)`. Call `requantize()` after every change of `weight`.
    """

    codes: Tensor  # E4M3 [N, K]
    scale: Tensor  # float32 [ceil(N/128), ceil(K/128)]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        backend: BackendName = "emulated",
        power_of_two: bool = False,
        square_wgrad: bool = False,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.backend: BackendName = backend
        self.power_of_two = power_of_two
        self.square_wgrad = square_wgrad
        self.weight: nn.Parameter | None
        self.weight = nn.Parameter(_initial_weight(out_features, in_features, dtype, device))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.lora: LoraAdapter | None = None
        blocks = (-(-out_features // BLOCK), -(-in_features // BLOCK))
        codes = torch.zeros(out_features, in_features, dtype=E4M3, device=device)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", torch.full(blocks, torch.nan, device=device), persistent=False)
        self._quantized_version: int | None = None
        self._codes_transposed: Tensor | None = None
        self._decoded: tuple[tuple[int, int], Tensor] | None = None

    @property
    def quantized(self) -> Quantized:
        """What every GEMM multiplies by, and what is published: the live buffers, not a copy."""
        assert self.has_codes, GIVEN_BACK
        assert self.codes.dtype == E4M3 and self.scale.dtype == torch.float32, (
            "Float8Linear was cast as a whole (module.to(dtype)): cast its weight instead"
        )
        return Quantized(self.codes, self.scale)

    @torch.no_grad()
    def requantize(self, name: str = "weight", *, check: bool = True) -> None:
        """Quantises `weight` into `codes` and `scale`, in place. Raises ValueError, naming `name`, if it is
        not finite; `check=False` leaves that to the caller (kernels/quantize/quantize_weight.py: `check_scales`).
        """
        assert self.weight is not None, "an engine's copy has no weight to quantise"
        if not self.has_codes:
            self.codes.untyped_storage().resize_(self.codes.numel())
        quantize_weight(
            self.weight.detach(),
            self.power_of_two,
            name=name,
            out=self.quantized,
            transposed_KN=self._codes_transposed,
            check=check,
        )
        self._quantized_version = self.weight._version
        if self.backend == "emulated":  # a kernel's writes count for nothing, and each side decodes by the counter
            torch.autograd.graph.increment_version(self.codes)

    @property
    def codes_are_settled(self) -> bool:
        """Whether the codes will do as they are: of a frozen weight that they were made from, or of one dropped."""
        return self.weight is None or (
            not self.weight.requires_grad and self.weight._version == self._quantized_version
        )

    @property
    def has_codes(self) -> bool:
        """False from `release_codes()` to `requantize()`."""
        return self.codes.untyped_storage().nbytes() > 0

    def release_codes(self) -> None:
        """Gives the memory of a trained weight's codes back until `requantize()`; the scales stay. Nothing where the
        weight is frozen or gone."""
        if self.weight is not None and self.weight.requires_grad:
            self.check_codes()
            self.codes.untyped_storage().resize_(0)
            self._codes_transposed = self._decoded = None

    def disown_codes(self) -> None:
        """Forward refuses the codes until `requantize()`: the caller found that they are not to be used."""
        self._quantized_version = None

    def drop_weight(self) -> None:
        """Leaves codes and scales only, nothing to go stale: the engine's copy, or a frozen weight of the trainer's."""
        self.weight = None
        self._codes_transposed = None

    def check_codes(self) -> None:
        """RuntimeError if the weight is not the one that the codes were made from."""
        if self.weight is not None and self.weight._version != self._quantized_version:
            was = "never quantised" if self._quantized_version is None else "changed since requantize()"
            raise RuntimeError(f"Float8Linear: the weight was {was}; its FP8 codes are stale: call requantize()")

    def forward(self, x: Tensor) -> Tensor:
        self.check_codes()
        x_MK = x.reshape(-1, self.in_features)
        y_MN = Float8LinearFunction.apply(x_MK, self.weight, self.bias, self)
        y_MN = y_MN if self.lora is None else self.lora(y_MN, x_MK)
        return y_MN.view(*x.shape[:-1], self.out_features)

    def forward_operand(self) -> Quantized:
        """The weight as forward's GEMM wants it."""
        if self.has_codes:
            held = self.quantized
            return held if self.backend != "emulated" else Quantized(self._decoded_codes(), held.scale)
        assert self.weight is not None, GIVEN_BACK
        made = quantize_weight(self.weight.detach(), self.power_of_two, check=False)
        if self.backend != "emulated":
            return made
        return Quantized(decode_e4m3(made.codes, torch.float64), made.scale)

    def dgrad_operand(self) -> Quantized:
        """The weight as dgrad's GEMM wants it: the same codes, transposed."""
        if self.backend == "emulated":
            return transposed(self.forward_operand())
        if not self.has_codes:
            assert self.weight is not None, GIVEN_BACK
            return quantize_weight_transposed(self.weight.detach(), self.power_of_two)
        if self._codes_transposed is None:
            self._codes_transposed = self.codes.t().contiguous()
        return Quantized(self._codes_transposed, self.scale.t())

    def _decoded_codes(self) -> Tensor:
        """The codes' values in float64, renewed when the codes' version counter moves."""
        version = (self.codes.data_ptr(), self.codes._version)
        if self._decoded is None or self._decoded[0] != version:
            self._decoded = version, decode_e4m3(self.codes, torch.float64)
        return self._decoded[1]

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, backend={self.backend}"


Projection = Linear | Float8Linear


class Float8LinearFunction(torch.autograd.Function):
    """The three GEMMs of `Float8Linear`; the module's docstring tells what is quantised when and what is
    saved.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor | None, bias_N: Tensor | None, linear: Float8Linear
    ) -> Tensor:
        # The weight is saved only so that autograd notices if it changes between forward and backward.
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.linear = linear
        x8 = _ACTIVATION_QUANTIZERS[linear.backend](x_MK, linear.power_of_two)
        w8 = linear.forward_operand()
        if linear.backend == "scaled_mm":
            y_MN = fp8_gemm_nt(x8, w8, "scaled_mm", x_MK.dtype)
            return y_MN if bias_N is None else y_MN + bias_N
        y_MN = fp8_gemm_nt(x8, w8, "emulated", torch.float32 if bias_N is not None else x_MK.dtype)
        return y_MN if bias_N is None else y_MN.add_(bias_N).to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK = ctx.saved_tensors
        linear: Float8Linear = ctx.linear
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx_MK = dweight_NK = dbias_N = None
        if need_x:
            dy8 = _ACTIVATION_QUANTIZERS[linear.backend](dy_MN, linear.power_of_two)
            dx_MK = fp8_gemm_dgrad(dy8, linear.dgrad_operand(), linear.backend, x_MK.dtype)
        if need_weight:
            quantize = _TOKEN_QUANTIZERS[linear.backend]
            dy8_NT = quantize(dy_MN, linear.power_of_two, False)
            x8_KT = quantize(x_MK, linear.power_of_two, linear.square_wgrad)
            dweight_NK = fp8_gemm_wgrad(dy8_NT, x8_KT, linear.backend, weight_NK.dtype)
        if need_bias:
            dbias_N = dy_MN.float().sum(0)
        return dx_MK, dweight_NK, dbias_N, None


def _initial_weight(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device | str | None
) -> Tensor:
    """Normal with standard deviation 1/sqrt(in_features); a loaded checkpoint overwrites it."""
    weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
    return weight.normal_(std=1.0 / math.sqrt(in_features))
