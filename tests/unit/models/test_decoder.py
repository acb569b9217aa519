"""The decoder by itself: formats, initial weights, what a forward observes, and layers that run again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import CacheTreatment, PackedContext
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.models.blocks.attention.module import observe_amax
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.decoder import Decoder
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS
from tests.unit.models.tiny_families import packed

VOCABULARY = TINY["qwen3"].vocab_size


def tiny(fp8: Fp8Config = PRECISIONS["fp8"], side: str = "train", family: str = "qwen3") -> Decoder:
    model = Decoder(TINY[family], precision_policy(TINY[family], fp8), side)  # type: ignore[arg-type]
    model.random_init(seed=7)
    return model


def test_kv_amax_is_collected_in_place() -> None:
    model = tiny(PRECISIONS["bf16"])
    token_ids_T, positions_T, context = packed([6, 3], VOCABULARY)
    amax_LS = torch.zeros(model.spec.num_layers, 2 * model.spec.num_kv_heads)
    seen: dict[str, Tensor] = {}
    model.layers[1].attention.qkv_proj.register_forward_hook(lambda _m, _i, out: seen.update(qkv=out))
    model(token_ids_T, positions_T, PackedContext(context.cu_seqlens_B1, 6, kv_amax_LS=amax_LS))
    v_TKD = seen["qkv"][:, -model.spec.kv_size :].view(9, model.spec.num_kv_heads, -1)
    assert torch.equal(amax_LS[1, model.spec.num_kv_heads :], v_TKD.abs().amax((0, 2)).float())
    assert (amax_LS > 0).all()
    larger_LS = amax_LS + 1
    model(token_ids_T, positions_T, PackedContext(context.cu_seqlens_B1, 6, kv_amax_LS=larger_LS))
    assert torch.equal(larger_LS, amax_LS + 1)


def test_amax_is_raised_per_head_and_keeps_what_was_seen() -> None:
    """A NaN stays too: it must reach the scales, which refuse it."""
    k_TKD = torch.tensor([[[1.0, -3.0], [0.5, 0.25]], [[2.0, 0.0], [-0.75, 0.0]]], dtype=torch.bfloat16)
    amax_2K = torch.tensor([[0.0, 9.0], [0.0, torch.nan]])
    observe_amax(amax_2K, k_TKD, 2 * k_TKD)
    assert amax_2K[0].tolist() == [3.0, 9.0] and amax_2K[1, 0] == 6.0 and amax_2K[1, 1].isnan()
    with_nan_TKD = k_TKD.index_fill(0, torch.tensor([1]), torch.nan)
    for given in (with_nan_TKD, k_TKD):
        observe_amax(amax_2K, given, given)
    assert amax_2K.isnan().all()
    qkv_THD = torch.randn(50, 8, 32).bfloat16()  # views of the fused output are strided
    amax_2K = torch.zeros(2, 2)
    observe_amax(amax_2K, qkv_THD[:, 4:6], qkv_THD[:, 6:])
    assert torch.equal(amax_2K, torch.stack((qkv_THD[:, 4:6], qkv_THD[:, 6:])).abs().amax((1, 3)).float())


def test_run_layer_wraps_each_layer() -> None:
    model = tiny()
    token_ids_T, positions_T, context = packed([8], VOCABULARY)

    def checkpointed(layer: torch.nn.Module, *arguments: object) -> Tensor:
        wrapped: Tensor = torch.utils.checkpoint.checkpoint(layer, *arguments, use_reentrant=False)
        return wrapped

    gradients = []
    for run_layer in (None, checkpointed):
        model.zero_grad()
        model(token_ids_T, positions_T, context, run_layer).float().square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None and torch.equal(plain, again)


def test_formats_follow_the_policy() -> None:
    settings = Fp8Config(rollout=True, train=False, ignore=("layers.0.mlp.*",))
    assert list(tiny(settings).float8_linears()) == []
    names = [name for name, _ in tiny(settings, "rollout").float8_linears()]
    assert names[:2] == ["layers.0.attention.qkv_proj", "layers.0.attention.o_proj"]
    assert "layers.0.mlp.down_proj" not in names and "layers.1.mlp.down_proj" in names


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    first, second = tiny(PRECISIONS["bf16"]), tiny()
    for (name, one), (_, two) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    second.random_init(seed=8)
    assert not torch.equal(first.embedding.weight, second.embedding.weight)
    assert first.embedding.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(first.layers[0].mlp.down_proj.weight, first.layers[1].mlp.down_proj.weight)


def test_a_weight_that_is_not_finite_is_named() -> None:
    model = tiny()
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        model.requantize()


def test_an_fp8_cache_of_qwen2_replays_v_alone() -> None:
    model = tiny(PRECISIONS["fp8_dynamic"], family="qwen2.5")
    assert model.policy.cache == (("K", "bf16"), ("V", "fp8"))
    token_ids_T, positions_T, context = packed([20], VOCABULARY)
    replayed = PackedContext(context.cu_seqlens_B1, 20, kv_mode="dynamic")
    with torch.no_grad():
        plain_TE = model(token_ids_T, positions_T, context)
        v_alone_TE = model(token_ids_T, positions_T, replayed)
        for layer in model.layers:
            layer.attention.treat_as = dict.fromkeys("KV", CacheTreatment("dynamic", None))
        both_TE = model(token_ids_T, positions_T, replayed)
    assert not torch.equal(v_alone_TE, plain_TE) and not torch.equal(v_alone_TE, both_TE)


def test_positions_are_looked_up_once_a_forward() -> None:
    class Counting(RotaryTable):
        calls = 0

        def forward(self, positions_T: Tensor) -> Rotary:
            self.calls += 1
            return super().forward(positions_T)

    table = Counting(16, 1e4, None, 8, device="cpu")
    inputs = RolloutInputs(table, torch.tensor([3, 1]), None)
    assert table.calls == 0 and inputs.angles is inputs.angles and table.calls == 1
    assert torch.equal(inputs.angles.cos_TR, table.cos_SR[[3, 1]])
