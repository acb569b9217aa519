"""The adapter of vLLM against a double of vLLM. What it shares with every backend is in test_contract.py.

The double answers vLLM's calls and is no model (vllm_double.py). tests/gpu/test_vllm.py runs the adapter on
vLLM itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.backends.vllm.names import attention_name, model_config, vllm_name
from octetrl.backends.vllm.session import sibling_seed
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig
from octetrl.engine.weights import put_weights, share_weights, weight_set, weights_digest
from octetrl.fp8.kv_scales import split_scales
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import LogitOptions
from octetrl.system.errors import UserError
from tests.parity.sides import PRECISIONS, Sides
from tests.unit.backends.setting import SPEC, Letters, Setting, request
from tests.unit.backends.vllm_double import VllmDouble, tensors_of


@pytest.fixture
def fp8_full() -> Setting:
    return Setting("fp8_full")


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_full"])
def test_vllm_holds_our_bytes_and_has_our_digest(precision: str) -> None:
    setting = Setting(precision)
    for covers_all in (False, True):
        expected = setting.own.weights_digest(covers_all=covers_all)
        assert setting.adapter.weights_digest(covers_all=covers_all) == expected
    held = dict(setting.double.model.named_parameters())
    assert not held["lm_head.weight"][90:].any() and held["lm_head.weight"].shape[0] == 128
    for name, linear in setting.sides.trainer_model.float8_linears():
        assert torch.equal(held[f"{vllm_name(name)}.weight_scale_inv"], linear.scale)


def test_a_rollout_in_fp8_alone_gets_the_codes_of_our_quantiser() -> None:
    policy = precision_policy(SPEC, Fp8Config(rollout=True))
    trained = Sides(SPEC, "bf16").trainer_model
    ours = {name: one.detach() for name, one in trained.named_parameters()}
    double = VllmDouble(tensors_of(SPEC, policy, ours), vocab_size=90)
    config = EngineConfig(page_size=16, max_batch=4)
    adapter = VllmBackend(double, spec=SPEC, policy=policy, tokenizer=Letters(), config=config, context_length=64)
    adapter.put_weights(weight_set(trained, 0))
    fp8 = Sides(SPEC, "fp8")
    assert all(torch.equal(one, ours[name]) for name, one in fp8.trainer_model.named_parameters())
    assert adapter.weights_digest() == weights_digest(fp8.engine_model, weight_set(fp8.trainer_model, 0))
    own = Decoder(SPEC, policy, "rollout", dtype=torch.bfloat16, device="meta", backend="emulated")
    share_weights(own, trained)
    put_weights(own, weight_set(trained, 0))
    expected = weights_digest(own, weight_set(trained, 0), covers_all=True)
    assert adapter.weights_digest(covers_all=True) == expected, "of workers that only train, which have our engine"

    with torch.no_grad():
        trained.layers[1].mlp.down_proj.weight[5, 7] = math.nan  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"layers.1.mlp.down_proj"):
        adapter.put_weights(weight_set(trained, 1))
    with torch.no_grad():
        trained.layers[1].mlp.down_proj.weight[5, 7] = 0.0  # type: ignore[union-attr]
    adapter.put_weights(weight_set(trained, 0))

    held = dict(double.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
    held.data.view(torch.uint8)[5, 7] ^= 1  # not the linear that this version quantises again
    with pytest.raises(RuntimeError, match="are not those of policy version 0 any more"):
        adapter.weights_digest()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda held: held["model.layers.1.mlp.down_proj.weight"].data.view(torch.uint8)[5, 7].add_(1), "down_proj"),
        (
            lambda held: held["model.layers.0.self_attn.o_proj.weight_scale_inv"].data.mul_(2),
            "layers.0.attention.o_proj",
        ),
        (lambda held: held["model.norm.weight"].data.fill_(1), "'norm.weight' differs from the trainer's"),
    ],
)
def test_what_vllm_changed_is_named(damage: Callable[[Any], object], expected: str, fp8_full: Setting) -> None:
    damage(dict(fp8_full.double.model.named_parameters()))
    with pytest.raises(RuntimeError, match=expected):
        fp8_full.adapter.weights_digest()


def test_a_parameter_of_nobody_or_of_another_layout_is_an_error(fp8_full: Setting) -> None:
    place = getattr(fp8_full.double.model.model.layers, "0").mlp.gate_up_proj  # type: ignore[union-attr]
    place.weight_scale_inv = torch.nn.Parameter(place.weight_scale_inv.data.T.contiguous(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"gate_up_proj.weight_scale_inv' is \(1, 2\) in torch.float32, and the"):
        fp8_full.adapter.put_weights(fp8_full.weights)
    fp8_full = Setting("fp8_full")
    model = fp8_full.double.model.model.layers  # type: ignore[union-attr]
    getattr(model, "1").mlp.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(RuntimeError, match=r"'model.layers.1.mlp.extra' is none of ours and would keep its random"):
        fp8_full.adapter.put_weights(fp8_full.weights)
    del getattr(model, "1").mlp.extra
    delattr(getattr(model, "0").self_attn.o_proj, "weight_scale_inv")
    with pytest.raises(RuntimeError, match=r"no parameter 'model.layers.0.self_attn.o_proj.weight_scale_inv'"):
        fp8_full.adapter.put_weights(fp8_full.weights)


# ---------------------------------------------------------------- KV scales, sleep, wake


def held_scales(setting: Setting) -> list[tuple[float, float]]:
    modules = dict(setting.double.model.named_modules())
    layers = [modules[attention_name(layer)] for layer in range(SPEC.num_layers)]
    return [(float(one._k_scale), float(one._v_scale)) for one in layers]


def test_attention_that_may_keep_old_scales_is_refused() -> None:
    """Before anything is generated. In BF16 there are no scales, and any attention will do."""

    class FlashInfer:
        @staticmethod
        def get_name() -> str:
            return "FLASHINFER"

    for precision in ("fp8_full", "bf16"):
        sides = Sides(SPEC, precision, calibrate_on=[[1, 2, 3, 4]])
        model = tensors_of(
            SPEC, sides.policy, {name: one.detach() for name, one in sides.trainer_model.named_parameters()}
        )
        dict(model.named_modules())[attention_name(1)].attn_backend = FlashInfer  # type: ignore[assignment]
        how: dict[str, Any] = {"tokenizer": Letters(), "config": EngineConfig(page_size=16), "context_length": 64}
        if precision == "bf16":
            VllmBackend(VllmDouble(model, vocab_size=90), spec=SPEC, policy=sides.policy, **how)
            continue
        with pytest.raises(
            UserError, match=r"vLLM chose the attention FLASHINFER in layer 1.* only FLASH_ATTN"
        ) as error:
            VllmBackend(VllmDouble(model, vocab_size=90), spec=SPEC, policy=sides.policy, **how)
        assert "\n" not in str(error.value)


def test_a_layer_gets_the_largest_of_its_heads_scales(fp8_full: Setting) -> None:
    fp8_full.adapter.wake()
    assert fp8_full.sides.scales is not None
    for held, row in zip(held_scales(fp8_full), fp8_full.sides.scales.scale_LS, strict=True):
        k_scales, v_scales = (one for one in split_scales(row, SPEC.cached(0)) if one is not None)
        assert held == (float(k_scales.max()), float(v_scales.max())) and len(set(k_scales.tolist())) > 1
    layer = dict(fp8_full.double.model.named_modules())[attention_name(1)]
    assert layer._k_scale_float == float(layer._k_scale) and float(layer._q_scale) == 1.0  # type: ignore[arg-type]


def test_waking_writes_the_scales_again_and_clears_the_cache(fp8_full: Setting) -> None:
    fp8_full.adapter.wake()
    expected = held_scales(fp8_full)
    drawn = fp8_full.adapter.generate([request("a")])
    fp8_full.double.cached[0].fill_(0x7F)
    fp8_full.adapter.sleep()
    assert held_scales(fp8_full) == [(1.0, 1.0)] * SPEC.num_layers
    assert fp8_full.adapter.generate([request("a")]) == drawn
    assert held_scales(fp8_full) == expected and not fp8_full.double.cached[0].any()


def test_a_scale_at_its_default_is_an_error(fp8_full: Setting) -> None:
    fp8_full.adapter.wake()
    attention = dict(fp8_full.double.model.named_modules())[attention_name(1)]
    for letter, wrong in (("k", 1.0), ("v", 1.0), ("q", 0.5)):
        fp8_full.adapter.weights_digest()
        held = getattr(attention, f"_{letter}_scale_float")
        getattr(attention, f"_{letter}_scale").fill_(wrong)
        with pytest.raises(RuntimeError, match=rf"of K, V and Q in layer 1 are \[.*\b{wrong}\b.*\], and \["):
            fp8_full.adapter.weights_digest()
        getattr(attention, f"_{letter}_scale").fill_(held)
        setattr(attention, f"_{letter}_scale_float", wrong)  # what some kernels read in its place
        with pytest.raises(RuntimeError, match=rf"of K, V and Q in layer 1 are \[.*\b{wrong}\b.*\], and \["):
            fp8_full.adapter.weights_digest()
        setattr(attention, f"_{letter}_scale_float", held)


def test_nothing_is_drawn_without_the_scales_of_these_weights(fp8_full: Setting) -> None:
    fp8_full.adapter.put_weights(replace(fp8_full.weights, kv_scales=None))
    with pytest.raises(RuntimeError, match="has no scales"):
        fp8_full.adapter.generate([request("a")])
    fp8_full.adapter.put_weights(replace(fp8_full.weights, policy_version=2))
    with pytest.raises(RuntimeError, match="scales belong to policy version 0 and the weights to 2"):
        fp8_full.adapter.generate([request("a")])


def test_a_publish_after_training_wakes_the_weights_alone(fp8_full: Setting) -> None:
    fp8_full.adapter.generate([request("a")])
    fp8_full.adapter.sleep()
    assert fp8_full.double.awake == set()
    fp8_full.adapter.put_weights(fp8_full.later(1))
    assert fp8_full.double.awake == {"weights"}
    digest = fp8_full.adapter.weights_digest(covers_all=True)
    ((first, _),) = fp8_full.adapter.generate([request("a")])
    assert first.policy_version == 1 and fp8_full.double.awake == {"weights", "kv_cache"}
    resets = fp8_full.double.prefix_resets
    fp8_full.adapter.put_weights(fp8_full.later(2))
    assert fp8_full.double.prefix_resets == resets + 1, "prefixes of old weights are dropped"
    assert fp8_full.adapter.weights_digest(covers_all=True) != digest


def test_a_sleep_half_awake_is_a_whole_one(fp8_full: Setting) -> None:
    """vLLM would log a line and stay awake."""
    fp8_full.adapter.sleep()
    fp8_full.adapter.put_weights(fp8_full.later(1))
    assert fp8_full.double.awake == {"weights"}
    fp8_full.adapter.sleep()
    assert fp8_full.double.awake == set()
    ((first, _),) = fp8_full.adapter.generate([request("a")])
    assert first.policy_version == 1


def test_another_process_may_allocate_while_vllm_falls_asleep(
    fp8_full: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter([3, 2, 1])
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda *_: (next(left), 4))
    sleep = fp8_full.double.sleep

    def asserting(level: int) -> None:  # as vLLM's worker
        before = torch.accelerator.get_memory_info()[0]
        sleep(level)
        assert torch.accelerator.get_memory_info()[0] - before >= 0, "Memory usage increased after sleeping."

    monkeypatch.setattr(fp8_full.double, "sleep", asserting)
    fp8_full.adapter.generate([request("a")])
    fp8_full.adapter.sleep()
    assert fp8_full.double.awake == set() and torch.accelerator.get_memory_info() == (2, 4), "for others as before"


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_weights_that_changed_while_vllm_slept_are_not_taken_for_the_old_ones(precision: str) -> None:
    setting = Setting(precision)
    setting.adapter.generate([request("a")])
    setting.adapter.sleep()
    setting.later(1)
    with pytest.raises(RuntimeError, match="changed while vLLM slept; publish before generate"):
        setting.adapter.generate([request("a")])


# ---------------------------------------------------------------- what vLLM is not asked for, or answers wrongly


def test_requests_that_only_our_engine_serves(fp8_full: Setting) -> None:
    for sampling, expected in (
        ({"logits": LogitOptions(num_top=2)}, "are for engine.backend: octetrl"),
        ({"temperature": 0.001}, "vLLM samples at 0.01 to 2; give one of these, or 0"),
        ({"temperature": 2.5}, "temperature is 2.5, and vLLM samples at 0.01 to 2"),
    ):
        with pytest.raises(UserError, match=expected):
            fp8_full.adapter.generate([request("a", **sampling)])
    with pytest.raises(UserError, match="prompt and answer may take 9 tokens, and vLLM's KV cache has 0"):
        Setting("bf16", num_pages=0).adapter.generate([request("a")])
    with fp8_full.adapter.session() as session, pytest.raises(UserError, match="cannot change weights while it"):
        session.adopt(lambda: 1, keeps_cache=False)


def test_vllm_itself_stops_at_tokens_and_at_limits(fp8_full: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """So no forward is spent on an answer that has ended. Of a stop string vLLM knows nothing."""
    ((whole, _),) = fp8_full.adapter.generate([request("a", max_new_tokens=20)])
    aborted: list[str] = []
    abort = fp8_full.double.abort_request
    monkeypatch.setattr(fp8_full.double, "abort_request", lambda names: (aborted.extend(names), abort(names)))
    for changes in ({"stop_token_ids": whole.token_ids[4:5]}, {"max_new_tokens": 3}):
        fp8_full.adapter.generate([request("a", **{"max_new_tokens": 20, **changes})])
    fp8_full.adapter.generate([replace(request("a"), answer_limits=(2, 5))])
    assert not aborted
    text = whole.text[3:5]
    fp8_full.adapter.generate([request("a", max_new_tokens=20, stop=(text,))])
    assert aborted == ["a#0"]


def test_answers_of_vllm_that_cannot_be_right(fp8_full: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(token_ids: list[int], logprobs: list[float], finished: bool) -> Callable[[], list[Any]]:
        part = SimpleNamespace(token_ids=token_ids, logprobs=SimpleNamespace(logprobs=logprobs))
        return lambda: [SimpleNamespace(request_id="a#0", outputs=[part], finished=finished)]

    for step, kind, expected in (
        (answer([4], [math.nan], False), NonFiniteError, "vLLM's log-prob of token 0 is nan"),
        (answer([4, 5], [-1.0], False), RuntimeError, "1 log-probs for 2 tokens of a#0"),
        (answer([4], [-1.0], True), RuntimeError, "before its limit and without a stop token"),
    ):
        monkeypatch.setattr(fp8_full.double, "step", step)
        with pytest.raises(kind, match=expected):
            fp8_full.adapter.generate([request("a")])
        assert not fp8_full.double.requests, "the requests are cancelled"


def test_names_and_seeds() -> None:
    assert vllm_name("layers.3.attention.qkv_proj") == "model.layers.3.self_attn.qkv_proj"
    assert vllm_name("layers.0.mlp_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    policy = precision_policy(SPEC, Fp8Config(rollout=True, bf16_first_layers=1))
    config = model_config(SPEC, policy)["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    assert set(config["modules_to_not_convert"]) == {
        "lm_head",
        *(f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"),
        *(f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }
    assert "quantization_config" not in model_config(SPEC, precision_policy(SPEC, PRECISIONS["bf16"]))
    seeds = {sibling_seed(seed, sibling) for seed in (0, 1, 2**63 - 1) for sibling in range(8)}
    assert len(seeds) == 24 and all(0 <= seed < 2**63 for seed in seeds)
