"""The adapter of vLLM against a double of vLLM, and what it shares with our own engine.

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
from octetrl.config.errors import UserError
from octetrl.config.schema import EngineConfig, Fp8Config
from octetrl.engine.engine import Engine
from octetrl.engine.logit_options import LogitOptions
from octetrl.engine.weights import weight_set, weights_digest
from octetrl.fp8.kv_scales import split_scales
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.policy import precision_policy
from octetrl.records import Completion, FinishReason, GenerationRequest, SamplingParams, SessionEvent, WeightSet
from octetrl.rollout.backend import RolloutBackend
from tests.parity.shapes import TINY
from tests.parity.sides import PRECISIONS, Sides
from tests.unit.backends.vllm_double import VllmDouble, tensors_of

SPEC = replace(TINY["qwen3"], tied_embeddings=False)
SAMPLING = SamplingParams(6, temperature=0.9, ignore_eos=True)


class Letters:
    """Each token is one letter."""

    eos_token_id = 3

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(ord("A") + token % 26) for token in token_ids)


class Setting:
    """Trained weights, an adapter over a double, and our own engine with the same weights."""

    def __init__(self, precision: str, *, num_pages: int = 64) -> None:
        self.sides = Sides(SPEC, precision, calibrate_on=[[1, 2, 3, 4]])
        trained = self.sides.trainer_model
        self.weights = weight_set(trained, 0, self.sides.scales)
        ours = {name: one.detach() for name, one in trained.named_parameters()}
        self.double = VllmDouble(tensors_of(SPEC, self.sides.policy, ours), vocab_size=90, num_pages=num_pages)
        common: dict[str, Any] = {
            "spec": SPEC,
            "policy": self.sides.policy,
            "tokenizer": Letters(),
            "config": EngineConfig(page_size=16, max_batch=4),
            "context_length": 64,
        }
        self.adapter = VllmBackend(self.double, **common)
        self.own = Engine(self.sides.engine_model, dtype=torch.bfloat16, device="cpu", **common)
        for backend in (self.adapter, self.own):
            backend.put_weights(self.weights)

    def later(self, version: int) -> WeightSet:
        """The weights after an update, with scales of that version."""
        with torch.no_grad():
            self.sides.trainer_model.norm.weight.add_(0.25 * version)
        scales = self.sides.scales
        return weight_set(
            self.sides.trainer_model, version, None if scales is None else replace(scales, policy_version=version)
        )


@pytest.fixture
def fp8_full() -> Setting:
    return Setting("fp8_full")


def request(name: str, seed: int = 5, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, seed), replace(SAMPLING, **sampling), 2, seed=seed)


def drain(session: Any) -> list[SessionEvent]:
    events: list[SessionEvent] = []
    while session.has_work:
        events += session.events()
    return events


# ---------------------------------------------------------------- what every backend does


@pytest.fixture(scope="module", params=["own", "adapter"])
def backend(request: pytest.FixtureRequest) -> RolloutBackend:
    chosen: RolloutBackend = getattr(Setting("fp8_full"), request.param)
    return chosen


def test_answers_depend_on_seed_and_sibling_alone(backend: RolloutBackend) -> None:
    asked = [request("a", 5), request("b", 6)]
    together = backend.generate(asked)
    assert [len(group) for group in together] == [2, 2]
    assert backend.generate(asked[::-1]) == together[::-1]
    first, second = together[0]
    assert first.token_ids != second.token_ids and together[0] != together[1]
    lone = replace(asked[0], id="c", num_siblings=1, first_sibling=1)
    assert backend.generate([lone]) == [[second]]
    for one in (first, second):
        assert len(one.token_ids) == len(one.logprobs) == 6 and one.finish_reason is FinishReason.LENGTH
        assert one.policy_version == 0 and all(logprob <= 0 for logprob in one.logprobs)


def test_an_answer_ends_at_a_stop_token_a_stop_string_or_the_context(backend: RolloutBackend) -> None:
    ((whole,),) = backend.generate([replace(request("a", max_new_tokens=20), num_siblings=1)])

    def ended(**sampling: Any) -> Completion:
        asked = replace(request("a", **{"max_new_tokens": 20, **sampling}), num_siblings=1)
        ((found,),) = backend.generate([asked])
        return found

    place = next(at for at in range(3, 20) if whole.token_ids[at] not in whole.token_ids[:at])
    found = ended(stop_token_ids=(whole.token_ids[place],))
    assert found.token_ids == whole.token_ids[: place + 1] and found.finish_reason is FinishReason.STOP
    assert found.text == whole.text[:place] and found.logprobs == whole.logprobs[: place + 1]
    end = next(at for at in range(4, 20) if whole.text.find(whole.text[at - 2 : at]) == at - 2)
    found = ended(stop=(whole.text[end - 2 : end],))
    assert found.token_ids == whole.token_ids[:end] and found.finish_reason is FinishReason.STOP
    assert found.text == whole.text[: end - 2]
    to_the_context = ended(max_new_tokens=500)
    assert len(to_the_context.token_ids) == 61 and to_the_context.token_ids[:20] == whole.token_ids


def test_siblings_may_have_limits_of_their_own(backend: RolloutBackend) -> None:
    whole = backend.generate([request("a")])[0]
    cut = backend.generate([replace(request("a"), answer_limits=(2, 6))])[0]
    assert [one.token_ids for one in cut] == [whole[0].token_ids[:2], whole[1].token_ids]


def test_a_session_streams_and_cancels(backend: RolloutBackend) -> None:
    expected = backend.generate([request("a")])[0]
    with backend.session() as session:
        session.submit(request("a"), streams=True)
        session.submit(request("b", 6))
        with pytest.raises(UserError, match="request with this id is not finished"):
            session.submit(request("b", 7))
        events = [*session.events(), *session.events()]
        session.cancel("b")
        session.cancel("unknown")
        events += drain(session)
        assert session.pages_in_use == 0 and session.progress().done == 2
    assert {event.request_id for event in events} == {"a"}
    for sibling, completion in enumerate(expected):
        parts = [event for event in events if event.sibling == sibling]
        assert len(parts) > 1 and parts[-1].completion == completion
        assert sum((part.token_ids for part in parts), ()) == completion.token_ids
        assert sum((part.logprobs for part in parts), ()) == completion.logprobs


def test_what_cannot_be_served_is_refused_before_any_work(backend: RolloutBackend) -> None:
    for asked, expected in (
        (replace(request("a"), prompt_token_ids=()), "the prompt has no tokens"),
        (replace(request("a"), prompt_token_ids=(90,)), "the model knows 0 to 89"),
        (request("a", temperature=-1.0), "temperature is -1.0"),
    ):
        with pytest.raises(UserError, match=expected):
            backend.generate([request("b"), asked])
    assert len(backend.generate([request("a")])[0]) == 2


def test_weights_are_refused_while_a_session_is_open(backend: RolloutBackend) -> None:
    with backend.session(), pytest.raises(RuntimeError, match="open session"):
        backend.sleep()
    metrics = backend.rollout_metrics()
    assert {"rollout/tokens_per_second", "rollout/batch_occupancy"} <= set(metrics)


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


def test_a_parameter_that_nobody_wrote_is_an_error(fp8_full: Setting) -> None:
    model = fp8_full.double.model.model.layers  # type: ignore[union-attr]
    getattr(model, "1").mlp.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    with pytest.raises(RuntimeError, match=r"'model.layers.1.mlp.extra' is none of ours and would keep its random"):
        fp8_full.adapter.put_weights(fp8_full.weights)
    del getattr(model, "1").mlp.extra
    delattr(getattr(model, "0").self_attn.o_proj, "weight_scale_inv")
    with pytest.raises(RuntimeError, match=r"no parameter 'model.layers.0.self_attn.o_proj.weight_scale_inv'"):
        fp8_full.adapter.put_weights(fp8_full.weights)


def test_another_layout_is_an_error(fp8_full: Setting) -> None:
    place = getattr(fp8_full.double.model.model.layers, "0").mlp.gate_up_proj  # type: ignore[union-attr]
    place.weight_scale_inv = torch.nn.Parameter(place.weight_scale_inv.data.T.contiguous(), requires_grad=False)
    with pytest.raises(RuntimeError, match=r"gate_up_proj.weight_scale_inv' is \(1, 2\) in torch.float32, and the"):
        fp8_full.adapter.put_weights(fp8_full.weights)


# ---------------------------------------------------------------- KV scales, sleep, wake


def held_scales(setting: Setting) -> list[tuple[float, float]]:
    modules = dict(setting.double.model.named_modules())
    layers = [modules[attention_name(layer)] for layer in range(SPEC.num_layers)]
    return [(float(one._k_scale), float(one._v_scale)) for one in layers]


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
    dict(fp8_full.double.model.named_buffers())[f"{attention_name(1)}._v_scale"].fill_(1.0)
    with pytest.raises(RuntimeError, match=r"vLLM's KV scales of layer 1 are \[.*, 1.0\], and \["):
        fp8_full.adapter.weights_digest()


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
        ({"temperature": 0.001}, "vLLM's smallest is 0.01"),
    ):
        with pytest.raises(UserError, match=expected):
            fp8_full.adapter.generate([request("a", **sampling)])
    with pytest.raises(UserError, match="prompt and answer may take 9 tokens, and vLLM's KV cache has 0"):
        Setting("bf16", num_pages=0).adapter.generate([request("a")])
    with fp8_full.adapter.session() as session, pytest.raises(UserError, match="cannot change weights while it"):
        session.adopt(lambda: 1, keeps_cache=False)


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
