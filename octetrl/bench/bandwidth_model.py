"""The rates of an H200, and the memory-bandwidth model of decoding: what a step reads, and its time at 4.3 TB/s.

    time of a step = (bytes of weights + live tokens * bytes that a token caches) / 4.3 TB/s

Weights are those of linears, with scales and biases, of a router and of latent attention's `kv_a` and `kv_b`, and of
lm_head; each is read once. Of a mixture, only experts that have a row are read. A step with B rows reads an expert with
probability 1 - (1 - q)^B, where q is the share of all tokens that it has: with 128 experts of which a token takes 8,
98% of them at 64 rows. It is computed at the mean number of rows of a step.

It is a model and not a lower bound: the L2 cache serves some reads of a shared prompt. The rows of results call its
values `rollout/floor_*`. The rates are measured, not from a data sheet. No torch.
"""

from __future__ import annotations

from octetrl.fp8.format import BLOCK
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.shapes.blocks import PLACES, LinearLayout, MatrixLayout, StackedLinearLayout
from octetrl.shapes.spec import ModelSpec

MEMORY_BYTES_PER_SECOND = 4.3e12  # most kernels; a few reach 4.54e12 (docs/results.md)
BF16_FLOPS = 790e12  # per second, of a large GEMM
VALUE = 2  # bytes of BF16


def weight_bytes(spec: ModelSpec, policy: PrecisionPolicy, rows: float) -> float:
    """Bytes of weights that a decode step with `rows` sequences reads."""
    total = float(VALUE * spec.vocab_rows * spec.hidden_size)
    formats = {linear.name: linear.rollout for linear in policy.linears}
    for layer in range(spec.num_layers):
        for place, block in zip(PLACES, spec.blocks_of(layer), strict=True):
            for tensor in block.tensors(spec):
                if isinstance(tensor, LinearLayout):
                    is_fp8 = formats[f"layers.{layer}.{place.name}.{tensor.name}"] == "fp8"
                    total += _matrix_bytes(tensor, is_fp8) * _matrices_read(tensor, rows)
                elif isinstance(tensor, MatrixLayout):
                    total += VALUE * tensor.num_parameters
    return total


def modelled_seconds(num_weight_bytes: float, cached_bytes: float) -> float:
    """The model's time for one decode step."""
    return (num_weight_bytes + cached_bytes) / MEMORY_BYTES_PER_SECOND


def _matrix_bytes(linear: LinearLayout, is_fp8: bool) -> int:
    """Of one matrix, which a stacked linear has `count` times."""
    rows, columns = linear.out_features, linear.in_features
    scales = 4 * -(-rows // BLOCK) * -(-columns // BLOCK)
    of_bias = VALUE * rows if linear.bias else 0
    return (rows * columns + scales if is_fp8 else VALUE * rows * columns) + of_bias


def _matrices_read(linear: LinearLayout, rows: float) -> float:
    if not isinstance(linear, StackedLinearLayout):
        return 1.0
    return linear.count * (1.0 - (1.0 - linear.per_token / linear.count) ** rows)
