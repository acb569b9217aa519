"""Adapters on a Hopper GPU: the branch's products have one order of sums at any number of rows, the fused forwards are
the modules, the trainer's log-probs are the engine's, graphs included, and a run repeats its bits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import LoraConfig
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_reference, bf16_gemm_straight
from octetrl.kernels.gemm.lora_up import lora_up, lora_up_reference
from octetrl.layers.context import PackedContext
from octetrl.models.training_forward import Keep, fused_layer_runner
from tests.gpu.test_parity import SMALL
from tests.parity.shapes import FULL
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.parity.sides import Sides, random_requests, random_tokens
from tests.parity.situations import check_situations

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 100, 128, 129, 257, 511, 512, 513, 2000)
LORAS = {
    "all": LoraConfig(rank=16, alpha=32.0),
    "odd": LoraConfig(rank=12, alpha=8.0, targets=("q_proj", "v_proj", "up_proj", "down_proj")),
    "one": LoraConfig(rank=1, alpha=1.0, targets=("k_proj", "o_proj", "gate_proj")),
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize(("n", "k"), [(16, 4096), (48, 4096), (32, 12288), (3, 512), (1, 3584), (192, 2048)])
def test_the_first_products_rows_do_not_depend_on_their_number(n: int, k: int) -> None:
    x_MK, a_NK = draw(4096, k), draw(n, k, seed=1)
    whole = bf16_gemm_straight(x_MK, a_NK)
    assert relative_error(whole, bf16_gemm_reference(x_MK, a_NK)) < 1e-3
    for rows in ROWS:
        assert torch.equal(bf16_gemm_straight(x_MK[:rows], a_NK), whole[:rows]), rows


@pytest.mark.parametrize("rank", [1, 3, 8, 16, 64, 100, 256])
def test_the_second_products_rows_do_not_depend_on_their_number(rank: int) -> None:
    """In the middle of a wider product, as for k of q, k and v."""
    wide, t, b_NR = draw(2000, 700), draw(2000, 3 * rank, seed=1), draw(333, rank, seed=2)
    whole, expected = wide.clone(), wide.clone()
    lora_up(whole[:, 100:433], t[:, rank : 2 * rank], b_NR, 0.3)
    lora_up_reference(expected[:, 100:433], t[:, rank : 2 * rank], b_NR, 0.3)
    assert relative_error(whole[:, 100:433], expected[:, 100:433]) < 1e-3
    assert torch.equal(whole[:, :100], wide[:, :100]) and torch.equal(whole[:, 433:], wide[:, 433:])
    for rows in ROWS:
        some = wide[:rows].clone()
        lora_up(some[:, 100:433], t[:rows, rank : 2 * rank], b_NR, 0.3)
        assert torch.equal(some, whole[:rows]), rows


def trained(sides: Sides, keep: Keep | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and gradients of some 1,200 tokens; by the modules where `keep` is None."""
    lengths = (700, 1, 333, 130, 64)
    model, generator = sides.trainer_model, torch.Generator().manual_seed(1)
    tokens = torch.randint(0, sides.spec.vocab_size, (sum(lengths),), generator=generator).cuda()
    upstream = torch.randn(sum(lengths), sides.spec.hidden_size, generator=generator).cuda().bfloat16()
    positions = torch.cat([torch.arange(length) for length in lengths]).cuda()
    replay = sides.replay
    bounds = torch.tensor((0, *lengths)).cumsum(0).int().cuda()
    context = PackedContext(bounds, max(lengths), replay.kv_mode, replay.kv_scale_LS)
    model.zero_grad()
    hidden_TE = model(tokens, positions, context, None if keep is None else fused_layer_runner(model, keep))
    hidden_TE.backward(upstream)
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
    return hidden_TE.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_full"])
@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
def test_the_layer_as_one_node_is_the_modules(lora: LoraConfig, precision: str) -> None:
    spec = replace(SMALL["qwen3"], max_positions=1024)
    sides = Sides(spec, precision, "cuda", lora=lora, calibrate_on=[random_tokens(random.Random(0), spec, 300)])
    hidden, gradients = trained(sides, None)
    for keep in ("everything", "attention", "layer"):
        fused, fused_gradients = trained(sides, keep)  # type: ignore[arg-type]
        assert torch.equal(fused, hidden), keep
        assert fused_gradients.keys() == gradients.keys()
        for name, want in gradients.items():
            limit = 0.02 if precision == "bf16" else 0.12
            assert relative_error(fused_gradients[name], want) < limit, (keep, name)


@pytest.mark.parametrize(("family", "precision"), [("qwen3", "bf16"), ("qwen3", "fp8_full"), ("qwen2.5", "fp8_full")])
def test_what_happens_in_engine_and_trainer_changes_nothing(family: str, precision: str) -> None:
    rng, sampling = random.Random(4), {"temperature": 0.9}
    spec = FULL[family]
    prompts = [random_tokens(random.Random(0), spec, 1000)]
    sides = Sides(spec, precision, "cuda", lora=LORAS["all"], calibrate_on=prompts)
    asked = random_requests(rng, spec, 1, prompts=(1, 10), answers=(120, 130), siblings=(8, 8), **sampling)
    asked += random_requests(rng, spec, 3, prompts=(1, 250), answers=(20, 60), **sampling)
    asked += random_requests(rng, spec, 1, prompts=(120, 126), answers=(18, 20), **sampling)
    check_situations(sides, asked, context_length=512)


@pytest.mark.parametrize("lora", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize(("family", "precision"), [("qwen3", "bf16"), ("qwen3", "fp8_full"), ("llama", "fp8")])
def test_steps_repeat_their_bits_and_none_has_a_mismatch(family: str, precision: str, lora: LoraConfig) -> None:
    """The engine's graphs outlive the updates: they read the adapters where the optimizer writes them."""
    config = {"activation_checkpointing": "layer", "tokens_per_micro_batch": 1024, "lora": lora}
    runs = [short_run(SMALL[family], precision, "cuda", 6, **config) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert_learned(runs[0])
