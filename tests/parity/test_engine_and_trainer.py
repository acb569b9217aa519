"""The engine's recorded log-prob of every token it draws is the trainer's, bit for bit, whatever happened to either:
for all families and precisions, adapters, mixtures of experts, latent attention and unusual shapes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig, LoraConfig, ModelConfig, Recipe
from octetrl.engine.weights import weight_set, weights_digest
from octetrl.kernels.attention import attention_reference
from tests.objectives import objective
from tests.parity.shapes import DELTA, LATENT, MODELS, TINY, UNUSUAL
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run, worker_of
from tests.parity.sides import ONE_TENSOR, PRECISIONS, Sides, random_requests
from tests.parity.situations import IN_THE_ENGINE, check_trainer, in_the_trainer

LORA = LoraConfig(rank=6, alpha=9.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
ON_EXPERTS = LoraConfig(rank=8, experts=True)
ON_LATENTS = LoraConfig(
    rank=4,
    targets=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"),
)
ON_DELTA = LoraConfig(rank=4, targets=("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "o_proj", "down_proj"))
EVERY, TRAINERS = tuple(IN_THE_ENGINE), tuple(in_the_trainer(1))
PAGES = ("small_chunks", "next_turn", "preempted")  # written, found and computed again; all of them are small
BATCHES = ("one_by_one", "preempted")
SLOTS = ("odd_chunks", "small_batches", "prefix_hit", "next_turn", "preempted")
ONE = ("one sequence a micro-batch",)
FEW = (*ONE, "layers run again", "codes quantised again")
Case = tuple[str, str, LoraConfig | None, tuple[str, ...], tuple[str, ...]]
CASES: list[Case] = [  # model, precision, adapters, situations of the engine, settings of the trainer
    ("qwen3", "bf16", None, EVERY, TRAINERS),
    ("qwen3", "fp8_full", None, EVERY, TRAINERS),
    ("qwen3", "fp8", None, BATCHES, TRAINERS),  # its cache is bf16's
    ("qwen3", "fp8_dynamic", None, (*PAGES, "prompts_the_other_way"), TRAINERS),  # its linears are fp8_full's
    ("qwen3", "fp8_int8", None, (), TRAINERS),
    ("qwen3", "fp8_full_k", None, PAGES, ONE),
    ("qwen3", "fp8_full_v", None, (), ONE),
    ("qwen3", "fp8_int8_k", None, ("next_turn",), ONE),
    ("qwen3", "fp8_int8_v", None, (), ONE),
    ("qwen3", "fp8_dynamic_k", None, (), ONE),
    ("qwen3", "fp8_dynamic_v", None, (), ONE),
    ("qwen3", "mxfp8", None, ("one_by_one", "small_chunks"), TRAINERS),  # its cache is bf16's
    ("qwen2.5", "mxfp8", LORA, (), FEW),
    ("sigmoid", "mxfp8", None, ("one_by_one", "small_chunks"), FEW),
    ("low_rank", "mxfp8", None, (), FEW),
    ("qwen2.5", "fp8_full", None, PAGES, TRAINERS),  # its K and V are of two formats
    ("qwen2.5", "bf16", None, (), FEW),
    ("llama", "bf16", None, BATCHES, FEW),  # its pages are qwen3's
    ("llama", "fp8_full", None, (), TRAINERS),  # an untied head
    ("qwen3", "fp8_full", LORA, ("one_by_one", "prefix_hit"), TRAINERS),  # its pages are those without
    ("qwen2.5", "fp8_dynamic", LORA, ("one_by_one", "next_turn", "preempted"), FEW),
    ("softmax", "bf16", None, ("one_by_one", "small_chunks", "prefix_hit"), FEW),
    ("sigmoid", "fp8_full", None, ("one_by_one", "prompts_the_other_way", "prefix_hit"), FEW),
    ("gated", "fp8_full", None, ("one_by_one", "small_chunks", "prefix_hit"), FEW),
    ("sigmoid", "bf16", ON_EXPERTS, ("one_by_one", "small_chunks"), FEW),
    ("sigmoid", "fp8_full", ON_EXPERTS, ("one_by_one", "small_chunks"), FEW),
    ("direct", "bf16", None, ("small_chunks", "next_turn"), FEW),
    ("low_rank", "fp8_full", None, ("prompts_the_other_way", "prefix_hit", "preempted"), FEW),
    ("low_rank", "fp8_full", ON_LATENTS, (), ONE),
    ("delta", "bf16", None, SLOTS, FEW),
    ("delta", "fp8_full", ON_DELTA, ("one_by_one", "next_turn"), ONE),
    ("grouped delta", "fp8", None, ("prefix_hit", "preempted"), ONE),
    ("heads of 80, YaRN, biases", "bf16", None, ("small_chunks", "prefix_hit"), ONE),
    ("heads of 80, YaRN, biases", "fp8", None, ("small_chunks", "prefix_hit"), ONE),
    ("heads of 96, a window", "bf16", None, ("small_chunks", "prefix_hit"), ONE),
    ("heads of 96, a window", "fp8_full", None, ("prompts_the_other_way", "prefix_hit"), ONE),
    ("heads of 192, windows by layer", "fp8_full", None, ("small_chunks", "prefix_hit"), ONE),
    ("gpt-oss", "fp8_full", None, ("small_chunks", "prompts_the_other_way"), ONE),
    ("gpt-oss", "bf16", ON_EXPERTS, (), ONE),
]


def sides_of(model: str, precision: str, lora: LoraConfig | None = None) -> Sides:
    """Correction biases of a router are not zero."""
    sides = Sides(MODELS[model], precision, lora=lora)
    for name, parameter in sides.trainer_model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return sides


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}{' lora' if case[2] else ''}")
def test_what_happens_to_either_side_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four siblings fill three pages of 16 each, more than the cache of `preempted` has. Unusual shapes: chunks of keys
    have one tile, so that windows leave whole chunks out."""
    model, precision, lora, situations, settings = case
    if model in UNUSUAL:
        monkeypatch.setattr(attention_reference, "KV_CHUNK", 128)
    longest = 150 if model in TINY | UNUSUAL | DELTA else 60
    draw, sides = random.Random(f"{model} {precision}"), sides_of(model, precision, lora)
    asked = random_requests(draw, sides.spec, 1, prompts=(10, 12), answers=(24, 24), siblings=(4, 4), temperature=0.9)
    asked += random_requests(draw, sides.spec, 2, prompts=(1, longest - 24), answers=(6, 12), temperature=0.9)
    prompts = (longest - 30, longest - 24)
    asked += random_requests(draw, sides.spec, 1, prompts=prompts, answers=(18, 20), temperature=0.9)
    answers = sides.engine().generate(asked)
    for name in situations:
        assert IN_THE_ENGINE[name](sides.engine, asked) == answers, name
    for name in settings:
        check_trainer(sides, asked, answers, **in_the_trainer(longest)[name])
    if lora is not None:
        assert sides_of(model, precision).engine().generate(asked) != answers, "the adapters do something"
        assert weights_digest(sides.engine_model, weight_set(sides.trainer_model, 1))
    if precision in ONE_TENSOR:
        both = sides_of(model, precision[:-2])
        assert sides.policy.digest != both.policy.digest and both.engine().generate(asked) != answers
        alone = {"K": "bf16", "V": "bf16"} | {precision[-1].upper(): "fp8"}
        assert {name: stored for name, stored in sides.policy.cache} == alone


@pytest.mark.parametrize(("lora", "where", "count"), [(ON_EXPERTS, ".experts.", 2), (ON_LATENTS, ".attention.", 8)])
def test_adapters_are_where_they_are_asked_for(lora: LoraConfig, where: str, count: int) -> None:
    sides = sides_of("sigmoid" if lora is ON_EXPERTS else "low_rank", "bf16", lora)
    adapted = {name for name, adapter in sides.trainer_model.adapters() if where in name and adapter.b.any()}
    assert len(adapted) == count


@pytest.mark.parametrize(
    ("model", "precision", "lora"),
    [
        *(("qwen3", precision, None) for precision in PRECISIONS),
        *(("qwen3", precision, None) for precision in ONE_TENSOR),
        *((family, precision, None) for family in ("llama", "qwen2.5") for precision in ("bf16", "fp8_full")),
        ("qwen3", "fp8_full", LORA),
        ("qwen2.5", "fp8_dynamic", LORA),
        ("sigmoid", "fp8_full", None),
        ("direct", "fp8_full", None),
        ("low_rank", "fp8_full", None),
        ("sigmoid", "mxfp8", None),
        ("gpt-oss", "fp8_full", None),
    ],
)
def test_every_step_of_a_run_says_that_nothing_differs_and_runs_repeat(
    model: str, precision: str, lora: LoraConfig | None
) -> None:
    repeats = 1 if precision in ONE_TENSOR or (model == "llama" and precision != "bf16") else 2
    options: dict[str, Any] = {"answers": 6, "lora": lora, "tokens_per_micro_batch": 256}
    runs = [short_run(MODELS[model], precision, "cpu", 2, **options) for _ in range(repeats)]
    assert_equal_in_every_step(runs[0])
    if repeats > 1:
        assert_same(*runs)
    if model in LATENT:
        assert runs[0].metrics[0]["entropy"] != runs[0].metrics[-1]["entropy"], "nothing was learnt"
    else:
        assert_learned(runs[0])


@pytest.mark.parametrize(
    ("changes", "all_compared"),
    [({}, True), ({"ratio_base": "generator"}, False), ({"name": "rft"}, False)],
    ids=["grpo", "the generator as base", "rft"],
)
def test_several_updates_compare_log_probs_of_before_the_first(changes: dict[str, Any], all_compared: bool) -> None:
    """Objectives that need none from before the updates have them for the first minibatch alone."""
    options = {"answers": 6, "minibatches": 2, "algorithm": objective(**changes)}
    run = short_run(TINY["qwen3"], "fp8_full", "cpu", 2, **options)
    assert_equal_in_every_step(run)
    compared = [metrics["mismatch/tokens"] for metrics in run.metrics]
    drawn = len(run.tokens) * 4 * 6 / len(run.metrics)
    assert all((tokens == drawn) == all_compared and tokens >= drawn / 4 for tokens in compared), compared


@pytest.mark.parametrize(
    ("promised", "changes"),
    [
        (True, {}),
        (True, {"fp8": PRECISIONS["fp8_full"]}),
        (False, {"fp8": Fp8Config(rollout=True)}),
        (False, {"fp8": PRECISIONS["fp8_full"].model_copy(update={"kv_replay": False})}),
        (False, {"fp8": PRECISIONS["fp8_dynamic"], "engine": EngineConfig(prefix_cache="keep")}),
    ],
    ids=["bf16", "fp8_full", "fp8_rollout", "no replay", "pages of older weights"],
)
def test_equality_is_promised_only_where_both_sides_compute_the_same(promised: bool, changes: dict[str, Any]) -> None:
    model = ModelConfig(preset="tiny", init="random", context_length=64)
    worker = worker_of(Recipe(model=model, **changes), TINY["qwen3"], "cpu")
    assert worker.parity == ("promised" if promised else "measured")
