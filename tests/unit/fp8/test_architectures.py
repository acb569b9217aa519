"""Which kernels run on five architectures: the table, and the code that asks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octetrl.cli.check_machine import Device, kernel_lines, missing_fp8
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import ModelConfig, Recipe
from octetrl.fp8 import parity
from octetrl.fp8.architectures import Capability, architecture_of
from octetrl.fp8.backends import fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.policy import precision_policy
from octetrl.fp8.quantize import (
    quantize_activation_reference,
    quantize_tokens_reference,
    quantize_weight_reference,
)
from octetrl.kernels import gluon
from octetrl.kernels.gemm import bf16_gemm, fp8_gemm
from octetrl.system.errors import UserError
from tests.tiny_spec import TINY_SPEC
from tests.unit.kernels.interpreting import interpreted  # noqa: F401

NAMES: dict[Capability, tuple[str, str | None, bool]] = {  # by compute capability: name, FP8 products, Gluon
    (8, 0): ("sm_80", None, False),
    (8, 6): ("sm_80", None, False),
    (8, 9): ("sm_89", None, False),
    (9, 0): ("sm_90", "scaled_mm", True),
    (10, 0): ("sm_100", "triton", False),
    (10, 3): ("sm_100", "triton", False),
    (12, 0): ("sm_120", None, False),
    (7, 5): ("an architecture that is not in the table", None, False),
}
FP8 = Recipe(model=ModelConfig(path="m"), fp8=Fp8Config(rollout=True, train=True))
Ran = list[str]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """What is launched, in place of it, over tensors that say that they are on a GPU."""
    found: Ran = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(fp8_gemm, "run_config", lambda config, *_: found.append(config.kernel))
    monkeypatch.setattr(fp8_gemm, "fp8_gemm_nt", lambda x, w, backend: found.append(backend))
    monkeypatch.setattr(bf16_gemm, "bf16_gemm_triton", lambda x, w, config: found.append(config.kernel))
    monkeypatch.setattr(bf16_gemm, "run_few_rows_bf16", lambda config, *_: found.append(config.kernel))
    return found


@pytest.mark.parametrize("capability", NAMES)
def test_every_architecture_has_its_kernels(capability: Capability, ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    name, products, has_gluon = NAMES[capability]
    found = architecture_of(capability)
    assert (found.name, found.fp8, found.gluon, found.was_run) == (name, products, has_gluon, has_gluon)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A GPU")
    gluon.has_gluon.cache_clear()
    if products is None:
        with pytest.raises(UserError, match="emulate=true"):
            choose_backend("cuda")
    else:
        assert choose_backend("cuda") == products
    assert gluon.can_run("some_gluon", torch.zeros(4)) is has_gluon
    x, w = quantize_activation_reference(torch.ones(8, 4096)), quantize_weight_reference(torch.ones(6144, 4096))
    assert fp8_gemm.choose_config(8, 6144, 4096).kernel in fp8_gemm.IN_GLUON
    fp8_gemm.fp8_gemm(x, w)
    assert (ran.pop() in fp8_gemm.IN_GLUON) is has_gluon
    few = fp8_gemm.Config("few_rows", 16, 32)
    monkeypatch.setattr(bf16_gemm, "straight_config", lambda *_: few)
    bf16_gemm.bf16_gemm(torch.zeros(8, 64).bfloat16(), torch.zeros(64, 64).bfloat16())
    assert ran == ["few_rows" if has_gluon else "straight"]
    gluon.has_gluon.cache_clear()


@pytest.mark.parametrize("capability", NAMES)
def test_check_and_the_run_promise_nothing_where_nothing_was_run(capability: Capability) -> None:
    name, products, was_run = NAMES[capability]
    policy = precision_policy(TINY_SPEC, FP8.fp8)
    device = Device("A GPU", True, 80 << 30, capability=capability)
    lines = [text for _, text in kernel_lines(policy, device)]
    emulated, mx_emulated = (
        any("emulated" in text for _, text in kernel_lines(one, device)) for one in (policy, replace(policy, mx=True))
    )
    assert was_run or mx_emulated is (name != "sm_100")
    assert bool(missing_fp8(FP8, device)) is (products is None)
    why = parity.why_measured(FP8, policy, on_gpu=True, capability=capability)
    if was_run:
        assert not lines and why is None
    else:
        assert name in lines[0] and emulated is (products is None)
        assert why is not None and name in why


def test_blocks_of_tokens_have_no_gemm_without_cublas() -> None:
    recipe = FP8.model_copy(update={"fp8": FP8.fp8.model_copy(update={"wgrad_blocks": "tokens"})})
    assert missing_fp8(recipe, Device("B200", True, 80 << 30, capability=(10, 0)))
    assert not missing_fp8(recipe, Device("H200", True, 80 << 30, capability=(9, 0)))
    tokens = quantize_tokens_reference(torch.ones(128, 256))
    with pytest.raises(UserError, match="use 'square'"):
        fp8_gemm_wgrad(tokens, tokens, "triton")


@pytest.mark.parametrize("depth", [128, 200])
def test_plain_triton_is_near_the_emulation_in_all_three_gemms(depth: int, interpreted: Any) -> None:  # noqa: F811
    generator = torch.Generator().manual_seed(1)
    x_MK, w_NK, dy_MN = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((20, depth), (136, depth), (20, 136))
    )
    x, w, dy = (
        quantize_activation_reference(x_MK),
        quantize_weight_reference(w_NK),
        quantize_activation_reference(dy_MN),
    )
    turned = w._replace(codes=w.codes.t().contiguous(), scale=w.scale.t())
    tokens = quantize_tokens_reference(dy_MN), quantize_tokens_reference(x_MK, square=True)
    for multiply, operands in ((fp8_gemm_nt, (x, w)), (fp8_gemm_dgrad, (dy, turned)), (fp8_gemm_wgrad, tokens)):
        got = multiply(*operands, "triton", torch.float32)  # type: ignore[operator]
        want = multiply(*operands, "emulated", torch.float32)  # type: ignore[operator]
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert float((got - want).norm() / want.norm()) < 1e-5
