"""`Float8Linear`: a linear with block-scaled FP8 operands, the same module for trainer and engine.

Its three GEMMs (fp8/backends.py):

    forward   y[M, N]  = q(x)[M, K]    w8[N, K]^T       x quantised 1x128 along K, in each forward
    dgrad     dx[M, K] = q(dy)[M, N]   w8[N, K]         dy quantised 1x128 along N; the forward's codes, transposed
    wgrad     dw[N, K] = qt(dy)[N, M]  qt(x)[K, M]^T    both quantised again in blocks of 128 tokens

With `square_wgrad` a block of x in wgrad also spans 128 channels, which is the faster GEMM. In MXFP8 (`backend`
"mxfp8" or "dot_scaled") all blocks are 1x32 along the sum, so dgrad has codes of its own, quantised along N: `columns`.

**Codes.** `requantize()` quantises the weight once per optimizer step, from its BF16 rounding, into the buffers `codes`
and `scale`. The forward does not quantise it. The engine reads the same buffers, so trainer and engine multiply by the
same bytes. The forward refuses stale codes. It recognises them by the version counter of the weight, which every
in-place change that autograd sees increments (an optimizer's step, `copy_` under no_grad; not writes to `.data`).

**Freed codes.** While a trained weight is updated, its codes may be freed (`release_codes`). Each product then
quantises the weight again, in the orientation that it needs and to the same bytes, so FP8 needs no more memory than
BF16. `requantize()` restores the codes in the same tensor, at another address.

**No weight.** The engine's copy has no `weight` (`drop_weight`). It only reads `codes` and `scale`, which the trainer
writes. `scale` is NaN before the first publish, so a missing publish shows at the first token. With LoRA the trainer
may drop a frozen weight too. `lora` is the adapter (layers/lora.py): it receives the product, and the input in the
model's dtype.

**Layouts on Hopper.** The forward reads `codes` [N, K] row-major. dgrad's operand must be row-major [K, N], so
`requantize` also fills a transposed copy. It is created on first use; an engine's copy never has one. Emulated, each
side keeps the codes' values in float64, since decoding is slow, and renews them when the codes' version changes.

**Rounding** is the same for trainer and engine. Emulated products are exact, the bias is added in float32, and the sum
is rounded once to the output dtype. A row's bits therefore do not depend on the batch, the threads or the padding. On
CUDA cuBLAS rounds to BF16, and the bias is then added in BF16. The backward runs in float32 and makes no such promise.

If a GPU runs the fused forms (models/rollout_forward.py, models/training_forward.py), this module only holds the
tensors.

Legend: M tokens, N out_features, K in_features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octetrl.fp8.backends import BACKENDS, ON_GPU, BackendName, fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad, transposed
from octetrl.fp8.format import E4M3, decode_e4m3
from octetrl.fp8.mxfp8 import quantize_mx_reference, quantize_mx_values, quantize_mx_weight
from octetrl.fp8.quantize import Quantized, quantize_activation_values, quantize_tokens_values
from octetrl.kernels.gemm import mxfp8_gemm  # noqa: F401  (it adds the backend "dot_scaled")
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_mx import quantize_mx
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.quantize.quantize_weight import quantize_weight, quantize_weight_transposed
from octetrl.kernels.quantize.quantize_weights import QuantizedWeight
from octetrl.kernels.quantize.transpose_codes import transpose_codes
from octetrl.layers.lora import LoraAdapter
from octetrl.layers.own_rows import OwnRows, weight_without_memory
from octetrl.layers.unquantized_linear import Linear, initial_weight

CODES_ARE_FREED = "the codes are freed during an update; call requantize() to restore them"
ACTIVATION_QUANTIZERS: dict[BackendName, Callable[[Tensor, bool], Quantized]] = {
    "scaled_mm": quantize_activation,
    "triton": quantize_activation,
    "emulated": quantize_activation_values,
    "mxfp8": lambda x_MK, _: quantize_mx_values(x_MK),
    "dot_scaled": lambda x_MK, _: quantize_mx(x_MK),
}
_TOKEN_QUANTIZERS: dict[BackendName, Callable[[Tensor, bool, bool], Quantized]] = {
    "scaled_mm": quantize_tokens,
    "triton": quantize_tokens,
    "emulated": quantize_tokens_values,
    "mxfp8": lambda x_TK, _, __: quantize_mx_values(x_TK.t()),
    "dot_scaled": lambda x_TK, _, __: quantize_mx(x_TK.t()),
}
_MX_QUANTIZERS: dict[BackendName, Callable[[Tensor], Quantized]] = {  # of weights
    "mxfp8": quantize_mx_reference,
    "dot_scaled": quantize_mx,
}


class Float8Linear(nn.Module):
    """y = x W^T + b with FP8 operands. x [..., K]; `weight` [N, K] in `dtype`. The GEMMs read `codes` and `scale`.

    `backend` is `choose_backend(device, emulate)`. Call `requantize()` after every change of `weight`. `has_weight`
    false: it has no memory (layers/weight_memory.py).
    """

    codes: Tensor  # E4M3 [N, K]
    scale: Tensor  # float32 [ceil(N/128), ceil(K/128)], or [N, ceil(K/32)]

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
        has_weight: bool = True,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.backend: BackendName = backend
        self.power_of_two = power_of_two
        self.square_wgrad = square_wgrad
        self.weight: nn.Parameter | None
        make = initial_weight if has_weight else weight_without_memory
        self.weight = nn.Parameter(make(out_features, in_features, dtype, device))
        self.own_rows: OwnRows | None = None
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype, device=device)) if bias else None
        self.lora: LoraAdapter | None = None
        self.block = BACKENDS[backend].block
        blocks = (-(-out_features // self.block[0]), -(-in_features // self.block[1]))
        codes = torch.zeros(out_features, in_features, dtype=E4M3, device=device)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scale", torch.full(blocks, torch.nan, device=device), persistent=False)
        self._quantized_version: int | None = None
        self.codes_transposed: Tensor | None = None  # [K, N], for dgrad
        self.columns: Quantized | None = None  # MXFP8: codes [K, N], scale [K, ceil(N/32)], for dgrad
        self._decoded: tuple[tuple[int, int], Tensor] | None = None

    @property
    def quantized(self) -> Quantized:
        """Codes and scales that every GEMM reads and that are published: the live buffers, not a copy."""
        assert self.has_codes, CODES_ARE_FREED
        assert self.codes.dtype == E4M3 and self.scale.dtype == torch.float32, (
            "Float8Linear was cast as a whole (module.to(dtype)): cast its weight instead"
        )
        return Quantized(self.codes, self.scale)

    @torch.no_grad()
    def requantize(self, name: str = "weight", *, check: bool = True) -> None:
        """Quantises `weight` into `codes` and `scale`, in place. Raises ValueError naming `name` if it is not finite.

        With `check=False` the caller checks (`check_scales` in kernels/quantize/quantize_weight.py).
        """
        weight_NK, out, transposed_KN = self.weight_to_quantize()
        self.quantize(weight_NK, name=name, out=out, transposed_KN=transposed_KN, check=check)
        self.mark_codes_current()

    def weight_to_quantize(self) -> QuantizedWeight:
        """The weight, and where `requantize` writes its codes. Freed codes get memory."""
        assert self.weight is not None, "this linear has no weight to quantise"
        if not self.has_codes:
            self.codes.untyped_storage().resize_(self.codes.numel())
        return QuantizedWeight(self.weight.detach(), self.quantized, self.codes_transposed)

    def mark_codes_current(self) -> None:
        """Declares that all codes and the scales, which the caller wrote, are those of the current weight."""
        assert self.weight is not None
        self._quantized_version = self.weight._version
        if self.backend not in ON_GPU:  # a kernel's writes do not move the counter
            torch.autograd.graph.increment_version(self.codes)
        if self.backend in _MX_QUANTIZERS and self.has_weight:  # now, since a frozen weight is dropped later
            self.columns = self.columns_of(self.weight.detach())

    def quantize(
        self,
        weight_NK: Tensor,
        *,
        name: str = "weight",
        out: Quantized | None = None,
        transposed_KN: Tensor | None = None,
        check: bool = False,
    ) -> Quantized:
        """Codes and scales of a weight of this shape, in this linear's blocks (`quantize_weight`)."""
        if self.backend in _MX_QUANTIZERS:
            return quantize_mx_weight(weight_NK, name, out, check, _MX_QUANTIZERS[self.backend])
        return quantize_weight(
            weight_NK, self.power_of_two, name=name, out=out, transposed_KN=transposed_KN, check=check
        )

    def columns_of(self, weight_NK: Tensor) -> Quantized:
        """The operand of dgrad in MXFP8."""
        return _MX_QUANTIZERS[self.backend](weight_NK.t())

    @property
    def skips_requantize(self) -> bool:
        """Whether `requantize` has nothing to do: the weight is frozen and quantised, dropped or freed."""
        return not self.has_weight or (
            self.weight is not None
            and not self.weight.requires_grad
            and self.weight._version == self._quantized_version
        )

    @property
    def has_weight(self) -> bool:
        """False where the weight was dropped, or has no memory (layers/weight_memory.py)."""
        return self.weight is not None and self.weight.untyped_storage().nbytes() > 0

    @torch.no_grad()
    def adopt_codes(self) -> None:
        """Declares that `codes` and `scale`, which the caller wrote, are those of the current weight."""
        if self.codes_transposed is not None:
            transpose_codes(self.codes, self.codes_transposed)
        self.mark_codes_current()

    @property
    def has_codes(self) -> bool:
        """False from `release_codes()` to `requantize()`."""
        return self.codes.untyped_storage().nbytes() > 0

    def release_codes(self) -> None:
        """Frees the codes of a trained weight until `requantize()`. The scales stay, and all codes of a frozen one."""
        if self.weight is not None and self.weight.requires_grad:
            self.check_codes()
            self.codes.untyped_storage().resize_(0)
            self.codes_transposed = self.columns = self._decoded = None

    def mark_codes_stale(self) -> None:
        """Makes forward refuse the codes until `requantize()`."""
        self._quantized_version = None

    def drop_weight(self) -> None:
        """Drops the weight and keeps codes and scales: for the engine's copy, or a frozen weight of the trainer."""
        self.weight = None
        self.codes_transposed = None

    def check_codes(self) -> None:
        """Raises RuntimeError if the weight changed since its codes were computed."""
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
        """The weight as the operand of the forward's GEMM."""
        if self.has_codes:
            held = self.quantized
            return held if self.backend in ON_GPU else Quantized(self._decoded_codes(), held.scale)
        assert self.weight is not None, CODES_ARE_FREED
        made = self.quantize(self.weight.detach())
        if self.backend in ON_GPU:
            return made
        return Quantized(decode_e4m3(made.codes, torch.float64), made.scale)

    def dgrad_operand(self) -> Quantized:
        """The weight as the operand of dgrad's GEMM: the same codes, transposed, or `columns`."""
        if self.backend in _MX_QUANTIZERS:
            if self.columns is not None:
                return self.columns
            assert self.weight is not None, CODES_ARE_FREED
            return self.columns_of(self.weight.detach())
        if self.backend == "emulated":
            return transposed(self.forward_operand())
        if not self.has_codes:
            assert self.weight is not None, CODES_ARE_FREED
            return quantize_weight_transposed(self.weight.detach(), self.power_of_two)
        if self.codes_transposed is None:
            self.codes_transposed = transpose_codes(self.codes)
        return Quantized(self.codes_transposed, self.scale.t())

    def _decoded_codes(self) -> Tensor:
        """The codes' values in float64, renewed when the codes' version counter changes."""
        version = (self.codes.data_ptr(), self.codes._version)
        if self._decoded is None or self._decoded[0] != version:
            self._decoded = version, decode_e4m3(self.codes, torch.float64)
        return self._decoded[1]

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, backend={self.backend}"


class Float8LinearFunction(torch.autograd.Function):
    """The three GEMMs under autograd: y [M, N] from x [M, K]. `linear` holds the codes; the weight is an argument only
    for its gradient.

    The input is saved in BF16, not as codes. The forward's codes have their blocks along K, and wgrad needs blocks
    along tokens. Codes would mean a second quantisation in the forward, computed again wherever activations are
    recomputed. The BF16 tensor may also be saved already, by attention as its output. If it is not, BF16 costs one byte
    more per element.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor | None, bias_N: Tensor | None, linear: Float8Linear
    ) -> Tensor:
        # The weight is saved only so that autograd notices if it changes between forward and backward.
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.linear = linear
        x8 = ACTIVATION_QUANTIZERS[linear.backend](x_MK, linear.power_of_two)
        w8 = linear.forward_operand()
        if linear.backend in ON_GPU:
            y_MN = fp8_gemm_nt(x8, w8, linear.backend, x_MK.dtype)
            return y_MN if bias_N is None else y_MN + bias_N
        y_MN = fp8_gemm_nt(x8, w8, linear.backend, torch.float32 if bias_N is not None else x_MK.dtype)
        return y_MN if bias_N is None else y_MN.add_(bias_N).to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, weight_NK = ctx.saved_tensors
        linear: Float8Linear = ctx.linear
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        dx_MK = dweight_NK = dbias_N = None
        if need_x:
            dy8 = ACTIVATION_QUANTIZERS[linear.backend](dy_MN, linear.power_of_two)
            dx_MK = fp8_gemm_dgrad(dy8, linear.dgrad_operand(), linear.backend, x_MK.dtype)
        if need_weight:
            quantize = _TOKEN_QUANTIZERS[linear.backend]
            dy8_NT = quantize(dy_MN, linear.power_of_two, False)
            x8_KT = quantize(x_MK, linear.power_of_two, linear.square_wgrad)
            dweight_NK = fp8_gemm_wgrad(dy8_NT, x8_KT, linear.backend, weight_NK.dtype)
        if need_bias:
            dbias_N = dy_MN.float().sum(0)
        return dx_MK, dweight_NK, dbias_N, None


Projection = Linear | Float8Linear
