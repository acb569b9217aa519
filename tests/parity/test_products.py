"""On a CPU every sum and every curve on the way to a log-prob is computed in float64, on both sides.

A processor may multiply another number of rows by another kernel, and BF16 by special units (AMX), and add in another
order each time. In float64 such a difference is lost when the result is rounded; in float32 or BF16 it would not be.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octetrl.config.schema import LoraConfig
from octetrl.kernels.gemm.linear_logprobs import linear_logprobs
from tests.parity.shapes import MODELS
from tests.parity.sides import Sides, random_requests, random_sequences

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "einsum", "convolution"}
SUMS = {"sum", "mean", "cumsum", "logsumexp", "prod", "var", "std", "softmax", "log_softmax"}
CURVES = {"exp", "exp2", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "pow", "rsqrt"}
SIDES = pytest.mark.parametrize(
    ("model", "precision", "lora"),
    [
        ("llama", "bf16", None),
        ("qwen2.5", "fp8_full", None),
        ("qwen3", "fp8_int8", None),
        ("direct", "bf16", None),
        ("low_rank", "fp8_full", None),
        ("softmax", "bf16", None),
        ("sigmoid", "fp8", None),
        ("gated", "fp8", None),
        ("qwen3", "fp8", LoraConfig(rank=4)),
    ],
)


class Recorder(TorchDispatchMode):
    """Counts products, sums and curves by the dtype of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name in PRODUCTS | SUMS | CURVES and isinstance(result, Tensor) and result.is_floating_point():
            self.found.add((name, result.dtype))
        return result


class OtherOrder(TorchDispatchMode):
    """Adds each float64 product along K in two parts of random sizes, like a processor with many kernels."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw, self.count = random.Random(seed), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if (
            name not in ("mm", "bmm", "baddbmm_")
            or args[-1].dtype != torch.float64
            or (depth := args[-1].shape[-2]) < 2
        ):
            return func(*args, **(kwargs or {}))
        self.count += 1
        cut = self.draw.randrange(1, depth)
        *start, a, b = args
        last = func(*start, a[..., cut:], b[..., cut:, :])
        first = func(*start, a[..., :cut], b[..., :cut, :])
        return last if start else last + first  # `baddbmm_` has added both to its first argument


@SIDES
def test_log_probs_are_equal_where_every_product_has_an_order_of_its_own(
    model: str, precision: str, lora: LoraConfig | None
) -> None:
    made, draw = Sides(MODELS[model], precision, lora=lora), random.Random(1)
    asked = random_requests(draw, made.spec, 2, prompts=(3, 30), answers=(4, 6), siblings=(2, 2))
    with OtherOrder(2) as orders:
        engine_N, trainer_N = made.logprobs(asked, made.engine().generate(asked))
    assert orders.count > 100 and torch.equal(engine_N, trainer_N)


@SIDES
def test_log_probs_are_added_up_in_float64(model: str, precision: str, lora: LoraConfig | None) -> None:
    made, draw = Sides(MODELS[model], precision, lora=lora), random.Random(0)
    asked = random_requests(draw, made.spec, 2, prompts=(3, 20), answers=(2, 3), siblings=(1, 2))
    with Recorder() as engine:
        made.engine().generate(asked)
    with Recorder() as trainer, torch.no_grad():
        hidden_TE = torch.cat(made.packed(random_sequences(draw, made.spec, [17, 40])))
        linear_logprobs(hidden_TE, made.trainer_model.lm_head_weight, torch.zeros(len(hidden_TE), dtype=torch.long))
    for side in (engine, trainer):
        assert {name for name, _ in side.found} >= {"mm", "bmm", "baddbmm", "sum", "exp2", "logsumexp"}
        assert {dtype for _, dtype in side.found} == {torch.float64}, side.found
