"""Row kernels and log-probs on the GPU: near their float64 references, one row's bits whatever its batch, gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm.linear_logprobs import linear_logprobs, lm_head_logits, logprobs_of
from octetrl.kernels.rows.rms_norm import rms_norm, rms_norm_reference
from octetrl.kernels.rows.rope import rope, rope_reference
from octetrl.kernels.rows.silu_mul import silu_mul, silu_mul_reference
from octetrl.layers.embedding import Embedding
from octetrl.layers.rotary import RotaryTable
from octetrl.models.blocks.attention.module import observe_amax

pytestmark = pytest.mark.gpu

EPS = 1e-6
COMPANIES = [1, 3, 64, 127, 256, 1000]


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("shape", [(300, 4096), (300, 1000), (100, 8, 128), (100, 4, 64)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight_C = _normal(*shape), _normal(shape[-1], seed=1)
    ours = rms_norm(x.cuda(), weight_C.cuda(), EPS)
    assert relative_error(ours, rms_norm_reference(x, weight_C, EPS)) < 1e-3
    for count in (1, 3, 64):
        assert torch.equal(rms_norm(x[:count].cuda(), weight_C.cuda(), EPS), ours[:count])
        assert torch.equal(rms_norm(x[-count:].cuda(), weight_C.cuda(), EPS), ours[-count:])


def test_rope_has_the_bits_of_the_cpu() -> None:
    qkv_THD = _normal(300, 48, 128)
    rotary = RotaryTable(128, 1e6, None, 4096, device="cpu")(torch.arange(300) * 13)
    expected_THD = rope_reference(qkv_THD[:, 32:40], *rotary)
    ours_THD = rope(qkv_THD.cuda()[:, 32:40], rotary.cos_TR.cuda(), rotary.sin_TR.cuda())
    assert torch.equal(ours_THD.cpu(), expected_THD)


@pytest.mark.parametrize("size", [3072, 1000])
def test_silu_mul(size: int) -> None:
    gate_up_T2F = _normal(257, 2 * size)
    ours_TF = silu_mul(gate_up_T2F.cuda())
    assert relative_error(ours_TF, silu_mul_reference(gate_up_T2F)) < 1e-3
    assert torch.equal(silu_mul(gate_up_T2F[100:103].cuda()), ours_TF[100:103])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(151_936, 1024), (32_001, 512)])
def test_logprobs_are_right_and_do_not_see_their_batch(vocab_size: int, hidden_size: int, temperature: float) -> None:
    hidden_NE = _normal(1000, hidden_size).cuda()
    weight_VE = (_normal(vocab_size, hidden_size, seed=1) / 8).cuda()
    targets_N = torch.arange(1000).cuda() * 31
    logprobs_N, entropy_N = linear_logprobs(hidden_NE, weight_VE, targets_N, temperature, chunk=300)
    log_p_PV = torch.log_softmax(hidden_NE[:50].double() @ weight_VE.double().t() / temperature, dim=-1)
    exact_P = log_p_PV.gather(1, targets_N[:50, None]).squeeze(1)
    torch.testing.assert_close(logprobs_N[:50].double(), exact_P, rtol=1e-5, atol=1e-4)
    exact_entropy_P = -(log_p_PV.exp() * log_p_PV).sum(-1)
    torch.testing.assert_close(entropy_N[:50].double(), exact_entropy_P, rtol=1e-4, atol=1e-4)
    for count in COMPANIES:
        logits_NV = lm_head_logits(hidden_NE[-count:], weight_VE)
        engine_N, engine_entropy_N = logprobs_of(logits_NV, targets_N[-count:], temperature)
        assert torch.equal(engine_N, logprobs_N[-count:]) and torch.equal(engine_entropy_N, entropy_N[-count:])


def _gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    function(*leaves).backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_gradients_are_those_of_float32() -> None:
    targets_N = torch.arange(500).cuda()
    x_TE, weight_E = _normal(500, 512).cuda(), _normal(512, seed=1).cuda()
    head_VE, up = (_normal(5000, 512, seed=2) / 8).cuda(), _normal(500, 512, seed=3).cuda().float()

    def exact_logprobs(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
        log_p_NV = torch.log_softmax(hidden_NE @ weight_VE.t() / 0.7, dim=-1)
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
        return (log_p_NV.gather(1, targets_N[:, None]).squeeze(1) + 0.1 * entropy_N).mean()

    def our_logprobs(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
        logprobs_N, entropy_N = linear_logprobs(hidden_NE, weight_VE, targets_N, 0.7, chunk=128)
        return (logprobs_N + 0.1 * entropy_N).mean()

    def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight * up).sum()

    def exact_silu(x: Tensor) -> Tensor:
        gate, other = x.chunk(2, -1)
        return (torch.nn.functional.silu(gate) * other * up[:, :256]).sum()

    cases = [
        (our_logprobs, exact_logprobs, (x_TE, head_VE)),
        (lambda x, w: (rms_norm(x, w, EPS) * up).sum(), exact_norm, (x_TE, weight_E)),
        (lambda x: (silu_mul(x) * up[:, :256]).sum(), exact_silu, (x_TE,)),
    ]
    for ours, exact, inputs in cases:
        for mine, other in zip(
            _gradients(ours, *inputs), _gradients(exact, *(tensor.float() for tensor in inputs)), strict=True
        ):
            assert relative_error(mine, other) < 1e-2


def test_memory_of_logprobs_is_one_chunk() -> None:
    hidden_NE, weight_VE = _normal(8192, 256).cuda(), _normal(50_000, 256, seed=1).cuda()
    targets_N = torch.zeros(8192, dtype=torch.int64).cuda()
    hidden_NE.requires_grad_()
    weight_VE.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprobs(hidden_NE, weight_VE, targets_N, chunk=512)[0].sum().backward()
    one_chunk = 512 * 50_000 * 4
    assert torch.cuda.max_memory_allocated() - before < 4 * one_chunk < 8192 * 50_000 * 4


def test_embedding_gradient_is_the_same_every_time() -> None:
    embedding = Embedding(1000, 256, dtype=torch.bfloat16, device="cuda")
    token_ids_T = (torch.arange(20_000) ** 2 % 1000).cuda()
    dy_TE = _normal(20_000, 256).cuda()
    gradients = []
    for _ in range(3):
        embedding.weight.grad = None
        embedding(token_ids_T).backward(dy_TE)
        gradients.append(embedding.weight.grad)
    exact_VE = torch.zeros(1000, 256, dtype=torch.float64).index_add_(0, token_ids_T.cpu(), dy_TE.cpu().double())
    assert gradients[0] is not None and relative_error(gradients[0], exact_VE) < 5e-3
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_amax_keeps_nan_on_the_gpu() -> None:
    k_TKD = _normal(5000, 8, 128).cuda()
    amax_2K = torch.zeros(2, 8, device="cuda")
    observe_amax(amax_2K, k_TKD, 2 * k_TKD)
    assert torch.equal(amax_2K[0], k_TKD.abs().amax((0, 2)).float()) and torch.equal(amax_2K[1], 2 * amax_2K[0])
    k_TKD[4000, 3, 5] = torch.nan
    observe_amax(amax_2K, k_TKD, k_TKD)
    assert amax_2K[0].isnan().tolist() == [head == 3 for head in range(8)]
