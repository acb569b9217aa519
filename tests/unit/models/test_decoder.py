"""The decoder against transformers, family by family, and against itself: packed, paged, checkpointed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import Fp8Config
from octetrl.engine.kv_cache import KVCache, cache_format
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import CacheTreatment, PackedContext, PagedContext
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.models.blocks.block import RolloutInputs
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from tests.unit.models.tiny_families import FAMILIES, decoder_of, hf_logits, hf_model, packed

LENGTHS = [5, 1, 130, 17]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    theirs = hf_model(name)
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path)
    token_ids_T, positions_T, context = packed(LENGTHS)
    hidden_TE = ours(token_ids_T, positions_T, context)
    their_logits_TV = hf_logits(theirs, token_ids_T, LENGTHS)
    assert relative_error(ours.logits(hidden_TE), their_logits_TV) < 1e-5

    targets_T = token_ids_T.roll(-1)
    ours.logprobs(hidden_TE, targets_T, chunk=50)[0].mean().backward()
    torch.log_softmax(their_logits_TV, -1).gather(1, targets_T[:, None]).mean().backward()
    qkv = ours.get_parameter("layers.0.attention.qkv_proj.weight").grad
    attention, mlp = theirs.model.layers[0].self_attn, theirs.model.layers[1].mlp
    expected = torch.cat([getattr(attention, f"{letter}_proj").weight.grad for letter in "qkv"])
    assert qkv is not None and relative_error(qkv, expected) < 1e-4
    for mine, other in (
        (ours.get_parameter("layers.1.mlp.down_proj.weight"), mlp.down_proj.weight),
        (ours.get_parameter("layers.0.mlp_norm.weight"), theirs.model.layers[0].post_attention_layernorm.weight),
        (ours.embedding.weight, theirs.model.embed_tokens.weight),
        (ours.lm_head_weight, theirs.lm_head.weight),
    ):
        assert mine.grad is not None and relative_error(mine.grad, other.grad) < 1e-4


def _tiny(tmp_path: Path, side: str, fp8: Fp8Config, family: str = "qwen3-tied") -> Decoder:
    theirs = hf_model(family)
    theirs.config.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"architectures": null', f'"architectures": ["{type(theirs).__name__}"]')
    )
    spec = load_spec(tmp_path)
    model = Decoder(spec, precision_policy(spec, fp8), side)  # type: ignore[arg-type]
    model.random_init(seed=7)
    return model


FP8_DYNAMIC = Fp8Config(rollout=True, train=True, kv_cache="dynamic")
FP8_FULL = Fp8Config(rollout=True, train=True, kv_cache="calibrated")
PRECISIONS = [Fp8Config(), Fp8Config(rollout=True, train=True), FP8_DYNAMIC, FP8_FULL]


@pytest.mark.parametrize("fp8", PRECISIONS, ids=["bf16", "fp8", "fp8_dynamic", "fp8_full"])
@pytest.mark.parametrize("family", ["qwen3-tied", "qwen2"])
def test_engine_and_trainer_logprobs_are_bit_equal(family: str, fp8: Fp8Config, tmp_path: Path) -> None:
    """A prompt prefilled in two chunks, then decoded token by token, against the packed training forward.

    Qwen2 has no QK-norm: its FP8 cache holds K in BF16.
    """
    trainer, engine = _tiny(tmp_path, "train", fp8, family), _tiny(tmp_path, "rollout", fp8, family)
    length, page_size, steps = 23, 16, [9, 8, 1, 1, 1, 1, 1, 1]
    token_ids_T, positions_T, context = packed([length, 40])
    spec, kv_mode = trainer.spec, trainer.policy.kv_mode
    scale_LS = None
    if kv_mode == "calibrated":
        scale_LS = torch.full((spec.num_layers, 2 * spec.num_kv_heads), 0.003)
    context = PackedContext(context.cu_seqlens_B1, context.max_seqlen, kv_mode, scale_LS)
    with torch.no_grad():
        hidden_TE = trainer(token_ids_T, positions_T, context)
        expected_N, _ = trainer.logprobs(hidden_TE[: length - 1], token_ids_T[1:length])
        page = cache_format(spec, engine.policy, engine.dtype, page_size)
        cache = KVCache(page, 4, torch.device("cpu"), scale_LS)
        rows, start = [], 0
        for count in steps:
            at = torch.arange(start, start + count)
            start += count
            paged = PagedContext(
                layers=cache.layers,
                slot_mapping_T=(3 - at // page_size) * page_size + at % page_size,
                block_table_BP=torch.tensor([[3, 2]], dtype=torch.int32),
                cu_seqlens_q_B1=torch.tensor([0, count], dtype=torch.int32),
                context_lens_B=torch.tensor([start], dtype=torch.int32),
                max_query_len=count,
                max_context_len=start,
            )
            rows.append(engine(token_ids_T[at], at, paged))
        logprobs_N, _ = engine.logprobs(torch.cat(rows)[: length - 1], token_ids_T[1:length])
    assert torch.equal(logprobs_N, expected_N)


def test_packing_changes_no_bit(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "train", PRECISIONS[1])
    token_ids_T, positions_T, context = packed(LENGTHS)
    with torch.no_grad():
        together_TE = model(token_ids_T, positions_T, context)
        start = 0
        for length in LENGTHS:
            alone = PackedContext(torch.tensor([0, length], dtype=torch.int32), length)
            rows = slice(start, start + length)
            assert torch.equal(model(token_ids_T[rows], positions_T[rows], alone), together_TE[rows])
            start += length


def test_kv_amax_is_collected_in_place(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "train", PRECISIONS[0])
    token_ids_T, positions_T, context = packed([6, 3])
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


def test_run_layer_wraps_each_layer(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "train", PRECISIONS[1])
    token_ids_T, positions_T, context = packed([8])

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


def test_formats_follow_the_policy(tmp_path: Path) -> None:
    settings = Fp8Config(rollout=True, train=False, ignore=("layers.0.mlp.*",))
    assert list(_tiny(tmp_path, "train", settings).float8_linears()) == []
    names = [name for name, _ in _tiny(tmp_path, "rollout", settings).float8_linears()]
    assert names[:2] == ["layers.0.attention.qkv_proj", "layers.0.attention.o_proj"]
    assert "layers.0.mlp.down_proj" not in names and "layers.1.mlp.down_proj" in names


def test_random_init_is_told_by_seed_and_name(tmp_path: Path) -> None:
    first, second = _tiny(tmp_path, "train", PRECISIONS[0]), _tiny(tmp_path, "train", PRECISIONS[1])
    for (name, one), (_, two) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    second.random_init(seed=8)
    assert not torch.equal(first.embedding.weight, second.embedding.weight)
    assert first.embedding.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(first.layers[0].mlp.down_proj.weight, first.layers[1].mlp.down_proj.weight)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "train", PRECISIONS[1])
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight"):
        model.requantize()


def test_an_fp8_cache_of_qwen2_replays_v_alone(tmp_path: Path) -> None:
    model = _tiny(tmp_path, "train", FP8_DYNAMIC, "qwen2")
    assert model.policy.cache == (("K", "bf16"), ("V", "fp8"))
    token_ids_T, positions_T, context = packed([20])
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
