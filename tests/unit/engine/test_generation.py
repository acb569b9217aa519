"""The engine as a whole: what it returns, refuses and counts."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig
from octetrl.engine.engine import Engine
from octetrl.engine.model_runner import ModelRunner
from octetrl.fp8.kv_scales import KVScales, same_bits
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights
from octetrl.models.rollout_forward import rollout_forward
from octetrl.records import Completion, FinishReason, GenerationProgress, GenerationRequest, SamplingParams
from octetrl.system.errors import UserError
from tests.unit.engine.tiny_engine import (
    CONTEXT_LENGTH,
    EOS,
    SCALES,
    SPEC,
    Letters,
    policy_of,
    request,
    tiny_engine,
    tiny_model,
)
from tests.unit.models.tiny_families import hf_model

asked = request  # where `request` is pytest's


def test_completions_come_in_the_order_of_requests_and_siblings() -> None:
    engine = tiny_engine(page_size=16)
    engine.publish(3)
    asked = [request(str(n), prompt_length=30 - 9 * n, num_siblings=2 + n, seed=n) for n in range(3)]
    answers = engine.generate(asked)
    assert [len(siblings) for siblings in answers] == [2, 3, 4]
    for one, siblings in zip(asked, answers, strict=True):
        assert engine.generate([one]) == [siblings]
        assert len({completion.token_ids for completion in siblings}) > 1
        for completion in siblings:
            assert len(completion.token_ids) == len(completion.logprobs) <= one.sampling.max_new_tokens
            assert completion.policy_version == 3
            assert completion.precision_digest == policy_of("bf16").digest
            ended = completion.token_ids[-1] == EOS
            assert completion.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
            assert EOS not in completion.token_ids[:-1]
            letters = completion.token_ids[:-1] if ended else completion.token_ids
            assert completion.text == "".join(chr(65 + token) for token in letters)


def test_a_siblings_answer_does_not_depend_on_how_many_there_are() -> None:
    engine = tiny_engine()
    (many,), (few,) = (engine.generate([request(num_siblings=n)]) for n in (5, 2))
    assert many[:2] == few


def test_a_place_in_the_batch_keeps_nothing_of_who_had_it_before() -> None:
    """One place: the second request decodes in the very step in which it takes the place of the first."""
    first, second = request("a", 1, seed=1), request("b", 1, seed=2, temperature=0.5, max_new_tokens=9)
    together = tiny_engine(max_batch=1).generate([first, second])
    assert together == [*tiny_engine().generate([first]), *tiny_engine().generate([second])]


def test_ignore_eos_and_the_limits() -> None:
    engine = tiny_engine()
    (long,), (full,) = engine.generate(
        [
            request(max_new_tokens=15, ignore_eos=True),
            request(prompt_length=CONTEXT_LENGTH - 5, max_new_tokens=15, ignore_eos=True),
        ]
    )
    assert (len(long.token_ids), long.finish_reason) == (15, FinishReason.LENGTH)
    assert (len(full.token_ids), full.finish_reason) == (5, FinishReason.LENGTH)


def test_stop_strings_and_stop_tokens_end_the_text_before_and_the_tokens_after_them() -> None:
    engine = tiny_engine()
    ((free,),) = engine.generate([request(max_new_tokens=12, ignore_eos=True)])
    stop = free.text[6:9]  # spans three tokens
    first = free.text.index(stop)
    ((cut,),) = engine.generate([request(max_new_tokens=12, ignore_eos=True, stop=("never", stop))])
    assert cut.text == free.text[:first] and cut.finish_reason == FinishReason.STOP
    assert cut.token_ids == free.token_ids[: first + 3] and cut.logprobs == free.logprobs[: first + 3]
    token = free.token_ids[7]
    first = free.token_ids.index(token)
    ((cut,),) = engine.generate([request(max_new_tokens=12, ignore_eos=True, stop_token_ids=(token,))])
    assert cut.token_ids == free.token_ids[: first + 1] and cut.text == free.text[:first]


def test_metrics_and_progress() -> None:
    engine = tiny_engine(page_size=16, max_batch=4)
    seen: list[GenerationProgress] = []
    answers = engine.generate([request(str(n), num_siblings=3, seed=n) for n in range(3)], seen.append)
    metrics = engine.metrics
    assert metrics is not None
    tokens = sum(len(completion.token_ids) for siblings in answers for completion in siblings)
    assert (metrics.completions, metrics.generated_tokens, metrics.prompt_tokens) == (9, tokens, 30)
    assert metrics.prefilled_tokens == 27  # each prompt once, without its last token
    assert metrics.preemptions == 0 and metrics.kv_saturation == 0.0 and metrics.kv_saturation_LS is None
    assert 0 < metrics.batch_occupancy <= 1 and 0 < metrics.cache_occupancy <= 1
    assert metrics.tokens_per_second > 0
    assert len(seen) == metrics.steps and {progress.total for progress in seen} == {9}
    assert (seen[-1].done, seen[-1].running, seen[-1].waiting, seen[-1].generated_tokens) == (9, 0, 0, tokens)
    assert all(progress.running <= 4 for progress in seen)


def test_no_requests_no_work() -> None:
    engine = tiny_engine()
    assert engine.generate([]) == []
    assert engine.metrics is not None and engine.metrics.steps == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request(prompt_length=0), "the prompt has no tokens"),
        (request(prompt_length=CONTEXT_LENGTH), "leaves none to generate"),
        (replace(request(), prompt_token_ids=(3, 50)), "the model knows 0 to 49"),
        (request(num_siblings=0), "num_siblings is 0"),
        (request(max_new_tokens=0), "max_new_tokens is 0"),
        (request(temperature=-1.0), "temperature is -1.0"),
        (request(temperature=float("nan")), "temperature is nan"),
        (request(top_p=0.0), "top_p is 0.0"),
        (request(min_p=1.5), "min_p is 1.5"),
        (request(stop=("",)), "stop is"),
        (request(prompt_length=40, max_new_tokens=26), "raise engine.kv_cache_tokens to 80"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(asked, said: str) -> None:
    engine = tiny_engine(page_size=16, kv_cache_tokens=64)
    with pytest.raises(UserError, match="request 'bad'") as error:
        engine.generate([request("good"), replace(asked, id="bad")])
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_largest_request_that_fits_is_served() -> None:
    engine = tiny_engine(page_size=16, kv_cache_tokens=64)
    ((answer,),) = engine.generate([request(prompt_length=40, max_new_tokens=25, ignore_eos=True)])
    assert len(answer.token_ids) == 25


def test_a_context_beyond_the_models_positions_is_refused() -> None:
    with pytest.raises(UserError, match=r"161 tokens .* has 160 positions"):
        Engine(
            tiny_model("bf16"), spec=SPEC, policy=policy_of("bf16"), tokenizer=Letters(), config=EngineConfig(),
            context_length=161, dtype=torch.bfloat16, device="cpu",
        )  # fmt: skip


def test_a_calibrated_cache_refuses_to_be_written_without_scales_of_this_version() -> None:
    engine = tiny_engine("fp8_full")
    engine.generate([request()])
    engine.publish(1)
    with pytest.raises(RuntimeError, match=r"belong to policy version 0 and the weights to 1"):
        engine.generate([request()])
    fresh = tiny_engine("fp8_full")
    assert fresh._scales is not None
    fresh._scales.policy_version = None
    with pytest.raises(RuntimeError, match=r"has no scales: calibrate .* set_kv_scales"):
        fresh.generate([request()])


def test_scales_are_read_back_as_given_and_bad_ones_refused() -> None:
    engine = tiny_engine("fp8_full")
    assert engine.kv_scales is not None and same_bits(engine.kv_scales, SCALES)
    bad = SCALES.scale_LS.clone()
    bad[1, 2] = torch.nan
    with pytest.raises(ValueError, match="scale of V in layer 1, head 0 is nan"):
        engine.set_kv_scales(KVScales(bad, 0))
    with pytest.raises(ValueError, match=r"got \[layers, scales of a layer\] = \[3, 4\]"):
        engine.set_kv_scales(KVScales(torch.ones(3, 4), 0))
    assert same_bits(engine.kv_scales, SCALES)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of a GPU, through the kernels' references."""

    def forward(runner: ModelRunner, *inputs: Any, counts: bool = True) -> Tensor:
        return rollout_forward(runner.model, *inputs)

    monkeypatch.setattr(ModelRunner, "_forward", forward)


@pytest.mark.parametrize("is_fused", [False, True], ids=["modules", "fused"])
@pytest.mark.parametrize(("layer", "head"), [(0, 1), (1, 2)], ids=["K", "V"])
def test_saturation_is_counted_by_layer_and_head(
    layer: int, head: int, is_fused: bool, request: pytest.FixtureRequest
) -> None:
    if is_fused:
        request.getfixturevalue("fused")
    engine = tiny_engine("fp8_full")
    engine.generate([asked()])
    assert engine.metrics is not None and engine.metrics.kv_saturation == 0.0
    narrow = SCALES.scale_LS.clone()
    narrow[layer, head] = 1e-6
    engine.set_kv_scales(KVScales(narrow, 0))
    for _ in range(2):  # each call counts from zero
        engine.generate([asked()])
        share = engine.metrics.kv_saturation_LS
        assert share is not None
        assert share[layer, head] > 0.9 and share.count_nonzero() == 1
        assert engine.metrics.kv_saturation == pytest.approx(float(share[layer, head]) / 8)


def test_logits_that_are_not_finite_are_an_error_that_names_the_request() -> None:
    model = tiny_model("bf16")

    class Broken:
        group = model.group

        def __call__(self, *inputs):
            return model(*inputs)

        def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
            logits_NV = model.logits(hidden_NE)
            logits_NV[1, 3] = torch.nan
            return logits_NV

    engine = tiny_engine(model=Broken())
    with pytest.raises(RuntimeError, match=r"request 'b', sibling 0: the logits after 10 tokens are not finite"):
        engine.generate([request("a"), request("b")])


def test_tokens_that_met_a_non_finite_activation_are_counted() -> None:
    def overflow_in_decode(module: torch.nn.Module, inputs: object, output_TE: torch.Tensor) -> torch.Tensor:
        return output_TE.fill_(torch.inf) if len(output_TE) == 1 else output_TE

    engine = tiny_engine(model=deepcopy(tiny_model("bf16")))
    engine.generate([request()])
    assert engine.metrics is not None and engine.metrics.non_finite_tokens == 0
    engine = tiny_engine(model=(model := deepcopy(tiny_model("bf16"))))
    model.layers[0].mlp.register_forward_hook(overflow_in_decode)
    with pytest.raises(RuntimeError, match=r"\(tokens with non-finite activations so far: 1\)"):
        engine.generate([request(num_siblings=1)])


def test_an_interrupted_call_leaves_nothing_behind() -> None:
    engine = tiny_engine(page_size=16, kv_cache_tokens=320)
    asked = [request(str(n), num_siblings=2, seed=n) for n in range(3)]
    expected = engine.generate(asked)

    def interrupt(progress: GenerationProgress) -> None:
        if progress.generated_tokens > 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(asked, interrupt)
    assert engine.generate(asked) == expected


def test_the_cache_can_be_released_and_taken_again() -> None:
    engine = tiny_engine("fp8_full", page_size=16, kv_cache_tokens=320)
    expected = engine.generate([request()])
    engine.sleep()
    assert engine._cache is None
    engine.wake()
    assert engine._cache is not None
    assert engine.generate([request()]) == expected


# ---------------------------------------------------------------- bits


SAMPLED = [
    request("drawn", prompt_length=21, num_siblings=2, seed=1, max_new_tokens=8),
    request("short", prompt_length=1, num_siblings=2, seed=2, max_new_tokens=6, top_k=20, top_p=0.9),
    request("greedy", prompt_length=33, seed=3, max_new_tokens=4, temperature=0.0),
    request("cool", prompt_length=16, num_siblings=3, seed=4, max_new_tokens=8, temperature=0.7, min_p=0.02),
]


@pytest.mark.parametrize("precision", ["bf16", "fp8_dynamic", "fp8_full"])
def test_log_probs_are_the_trainers_whatever_the_sampling_and_the_company(precision: str) -> None:
    """Filters and temperature 0 change the token, not its log-prob. The trainer replays the rollout's cache."""
    answers = tiny_engine(precision, page_size=16).generate(SAMPLED)
    crowded = tiny_engine(precision, page_size=16, prefill_chunk=16, max_batch=3)
    order = [2, 0, 3, 1]
    assert crowded.generate([SAMPLED[n] for n in order]) == [answers[n] for n in order]
    model, kv_mode = tiny_model(precision, "train"), policy_of(precision).kv_mode
    scale_LS = SCALES.scale_LS if kv_mode == "calibrated" else None
    for one, siblings in zip(SAMPLED, answers, strict=True):
        for answer in siblings:
            tokens_T = torch.tensor(one.prompt_token_ids + answer.token_ids)
            count = len(tokens_T)
            context = PackedContext(torch.tensor([0, count], dtype=torch.int32), count, kv_mode, scale_LS)
            hidden_TE = model(tokens_T, torch.arange(count), context)
            logprobs_T, _ = model.logprobs(hidden_TE[:-1], tokens_T[1:], one.sampling.temperature or 1.0)
            assert answer.logprobs == tuple(logprobs_T[len(one.prompt_token_ids) - 1 :].tolist())


@pytest.mark.parametrize(
    "changes",
    [
        *({"ignore": (f"*.{name}",)} for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        {"power_of_two": True},
        {"kv_cache": "calibrated", "kv_cache_tensors": "k"},
        {"kv_cache": "dynamic", "kv_cache_tensors": "v"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_the_fused_rollout_of_layers_that_are_fp8_in_part_draws_what_the_modules_draw(
    changes: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    policy = precision_policy(SPEC, Fp8Config(**({"rollout": True, "train": True} | changes)))
    model = Decoder(SPEC, policy, "rollout")
    model.random_init(0)
    model.requantize()
    how: dict[str, Any] = {"context_length": CONTEXT_LENGTH, "dtype": torch.bfloat16, "device": "cpu"}

    def drawn() -> list[list[Completion]]:
        engine = Engine(model, spec=SPEC, policy=policy, tokenizer=Letters(), config=EngineConfig(), **how)
        if policy.kv_mode == "calibrated":
            engine.set_kv_scales(SCALES)
        return engine.generate([asked(str(n), prompt_length=4 + 9 * n, num_siblings=2, seed=n) for n in range(2)])

    expected = drawn()
    request.getfixturevalue("fused")
    assert drawn() == expected


# ---------------------------------------------------------------- against transformers


NEW_TOKENS = 12


def test_greedy_tokens_equal_transformers(tmp_path: Path) -> None:
    theirs = hf_model("qwen3-tied").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1 if parameter.dim() == 1 else 6)  # far from flat: greedy choices differ along the way
    theirs.save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    policy = precision_policy(spec, Fp8Config())
    model = Decoder(spec, policy, "rollout", dtype=torch.float32)
    load_weights(model, tmp_path)
    engine = Engine(
        model,
        spec=spec,
        policy=policy,
        tokenizer=Letters(),
        config=EngineConfig(page_size=16, prefill_chunk=16),
        context_length=64,
        dtype=torch.float32,
        device="cpu",
    )
    prompts = [tuple((5 * n + 3 * i) % spec.vocab_size for i in range(n)) for n in (1, 7, 30)]
    sampling = SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True)
    answers = engine.generate([GenerationRequest(str(len(p)), p, sampling) for p in prompts])
    seen: set[int] = set()
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.token_ids == tuple(expected[0, len(prompt) :].tolist())
        seen.update(answer.token_ids)
    assert len(seen) > 5
