"""The estimate against sums done by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from octetrl.cli.fitting import fewest_checkpointed_layers
from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.config.memory import (
    MemoryEstimate,
    Precisions,
    ScalarModel,
    estimate_memory,
    logits_bytes,
    micro_batch_tokens,
)
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from tests.house.tree import REPO

TINY = spec_from_config(preset_config("tiny"))
LINEAR_NAMES = [name for name, _ in TINY.linears()]
PLAIN = Precisions([], [], [])
FULL = Precisions(LINEAR_NAMES, LINEAR_NAMES, ["K", "V"])
P, P8 = 1_033_600, 4 * 245_760  # 245,760 = 128 * (256 + 128 + 1024 + 512): qkv, o, gate and up, down


SHORT = {"max_prompt_tokens": 8, "max_new_tokens": 8}
SHORTEST = {"path": "m", "context_length": 16}


def recipe(**sections: Any) -> Recipe:
    """Its samples are shorter than a micro-batch, unless `rollout` says otherwise."""
    short = {"model": SHORTEST, "rollout": SHORT, "environment": {"dataset": "d"}}
    return recipe_from_mapping({**short, **sections})


def test_a_sample_longer_than_a_micro_batch_counts_as_one() -> None:
    rollout = {"max_prompt_tokens": 1000, "max_new_tokens": 3000}
    small = {"tokens_per_micro_batch": 2048}
    model = {"path": "m", "context_length": 9000}
    assert micro_batch_tokens(recipe(trainer=small, rollout=rollout, model=model)) == 4000
    assert micro_batch_tokens(recipe(trainer={"tokens_per_micro_batch": 4096}, rollout=rollout, model=model)) == 4096
    turns = {"kind": "python", "dataset": "m:f"}
    assert micro_batch_tokens(recipe(trainer=small, rollout=rollout, model=model, environment=turns)) == 9000


def test_workers_that_share_a_micro_batch_have_the_activations_of_their_tokens() -> None:
    """1,300 tokens are 11 blocks of 128; one of four workers has three of them."""
    found = {}
    for tokens, together in ((1300, 4), (384, "off")):
        cluster = {"cpus": 4, "context_parallel": together}
        changed = recipe(trainer={"tokens_per_micro_batch": tokens}, cluster=cluster)
        found[together] = parts_of(estimate_memory(changed, TINY, PLAIN, on_gpu=False, device_bytes=None))
    assert found[4].pop("exchanges") == 6 * 2 * 384 * TINY.num_heads * TINY.head_size
    assert found[4] == found["off"]


def parts_of(estimate: MemoryEstimate) -> dict[str, int]:
    return {part.name: part.num_bytes for part in estimate.parts}


def test_parts_in_bf16() -> None:
    assert sum(linear.num_weights for _, linear in TINY.linears()) == P8
    norms, embeddings = 4 * (2 * 128 + 2 * 32) + 128, 384 * 128
    assert P8 + norms + embeddings == P == TINY.num_parameters
    plain = recipe(trainer={"tokens_per_micro_batch": 4096, "logprob_chunk": 100})
    parts = parts_of(estimate_memory(plain, TINY, PLAIN, on_gpu=True, device_bytes=None))
    remade = 3 * 128 + 256 + 2 * 512 + 128  # n1, n2, h1, qkv, gate_up, attention's output
    at_gate = remade + 256 + 128 + 512 + 2 * 512 + 512  # rotated, dh2, dy, dgate_up, y
    assert parts == {
        "weights": 2 * P,
        "gradients": 4 * P,
        "optimizer": 12 * P,
        "CUDA context": 600_000_000,
        "activations": 2 * 4096 * 4 * 128,
        "working set": 4096 * (2 * at_gate + 4 * 4) + 2 * 384 * 128,
    }


def test_gradient_sums_in_bf16() -> None:
    halved = recipe(algorithm={"name": "ppo"}, trainer={"gradients": "bfloat16"})
    critic = ScalarModel(TINY, PLAIN)
    parts = parts_of(estimate_memory(halved, TINY, PLAIN, on_gpu=True, device_bytes=None, critic=critic))
    assert (parts["gradients"], parts["critic"]) == (2 * P, 16 * P)


def backward(tokens: int, precisions: Precisions, checkpointing: str = "layer", chunk: int = 1) -> tuple[int, int]:
    trainer = {"tokens_per_micro_batch": tokens, "logprob_chunk": chunk, "activation_checkpointing": checkpointing}
    parts = parts_of(estimate_memory(recipe(trainer=trainer), TINY, precisions, on_gpu=True, device_bytes=None))
    return parts["activations"], parts["working set"]


def test_what_is_kept_of_a_layer() -> None:
    code = 1 + 4 / 128
    remade = 2 * code * 128 + 2 * (128 + 256 + 2 * 512 + 128) + 4 * 4  # n1, n2; h1, qkv, gate_up, out; lse
    at_gate = remade + 2 * 256 + 2 * 128 + 2 * code * 128 + 2 * 512 + 5 * code * 512
    assert backward(8192, FULL)[1] == int(8192 * at_gate) + 2 * 384 * 128
    layer, attention, everything = (backward(8192, FULL, keep) for keep in ("layer", "attention", "none"))
    assert attention[0] - layer[0] == 4 * 8192 * (2 * 128 + 4 * 4)
    assert everything[0] - attention[0] == 4 * 8192 * (2 * (128 + 256 + 2 * 512) + 2 * 128 * (1 + 4 / 128))
    assert layer[1] > attention[1] > everything[1]


def test_layers_beyond_the_checkpointed_are_kept_whole() -> None:
    def parts(layers: int | None, keep: str = "layer") -> tuple[int, int]:
        trainer = {"tokens_per_micro_batch": 8192, "activation_checkpointing": keep, "checkpointed_layers": layers}
        sized = recipe(trainer=trainer | {"logprob_chunk": 1})
        found = parts_of(estimate_memory(sized, TINY, FULL, on_gpu=True, device_bytes=None))
        return found["activations"], found["working set"]

    layer, none, mixed = parts(None), parts(None, "none"), parts(1)
    assert parts(4) == layer and parts(0) == none
    assert mixed[0] == layer[0] // 4 + none[0] * 3 // 4
    assert mixed[1] == none[1], "when a checkpointed layer's turn comes, what the others kept is gone"


def test_the_fewest_layers_that_need_checkpointing() -> None:
    sized = recipe(trainer={"tokens_per_micro_batch": 8192, "activation_checkpointing": "layer"})

    def estimated(recipe: Recipe) -> MemoryEstimate:
        return estimate_memory(recipe, TINY, FULL, on_gpu=True, device_bytes=None)

    def training(layers: int) -> int:
        trainer = sized.trainer.model_copy(update={"checkpointed_layers": layers})
        estimate = estimated(sized.model_copy(update={"trainer": trainer}))
        return estimate.bytes_when("always") + estimate.bytes_when("training")

    def fewest(device_bytes: int) -> int | None:
        return fewest_checkpointed_layers(sized, 4, device_bytes, estimated)

    for layers in range(5):
        device_bytes = math.ceil(training(layers) / 0.9)
        found = fewest(device_bytes)
        assert found is not None and training(found) <= 0.9 * device_bytes
        assert found == 0 or training(found - 1) > 0.9 * device_bytes
    assert fewest(int(min(map(training, range(5))) / 0.9) - 2) is None


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (32, 4 * 32 + 2 * 128 + 4 * 128),
        (200, 4 * 128 + 2 * 128 + 4 * 128),  # no more rows than tokens
        (1, 6 * 128),  # float32 and BF16 gradient of lm_head, when the logits are gone
    ],
)
def test_logits_of_a_chunk_and_gradients_of_four(chunk: int, expected: int) -> None:
    spec = replace(TINY, vocab_size=100_000)
    sized = recipe(trainer={"tokens_per_micro_batch": 128, "logprob_chunk": chunk})
    parts = parts_of(estimate_memory(sized, spec, PLAIN, on_gpu=True, device_bytes=None))
    assert parts["working set"] == 4 * 2 * 128 * 128 + 100_000 * expected


def test_fp8_adds_codes_and_for_training_the_transposed_ones() -> None:
    def copies(precisions: Precisions, on_gpu: bool = True) -> int:
        return parts_of(estimate_memory(recipe(), TINY, precisions, on_gpu=on_gpu, device_bytes=None))["FP8 copies"]

    scales = 4 * (P8 // 128**2)
    assert copies(FULL) == 2 * P8 + scales
    assert copies(Precisions(LINEAR_NAMES, [], [])) == P8 + scales
    assert copies(FULL, on_gpu=False) == 17 * P8 + scales  # emulated: values for both sides
    assert copies(Precisions(LINEAR_NAMES, [], []), on_gpu=False) == 9 * P8 + scales


@pytest.mark.parametrize(
    ("fp8", "precisions", "expected"),
    [
        ({}, PLAIN, 4 * 64 * 4),
        ({"kv_cache": "calibrated"}, FULL, 4 * 64 * 2),
        ({"kv_cache": "calibrated"}, Precisions([], [], ["V"]), 4 * 64 * 3),
        ({"kv_cache": "dynamic"}, FULL, 4 * (64 * 2 + 2 * 2 * 4)),
        ({"kv_cache": "calibrated"}, Precisions([], [], ["K"]), 4 * 64 * 3),
        ({"kv_cache": "int8"}, Precisions([], [], ["K"]), 4 * (64 * 3 + 2 * 4)),
    ],
)
def test_bytes_of_a_token_in_the_cache(fp8: dict, precisions: Precisions, expected: int) -> None:
    estimate = estimate_memory(recipe(fp8=fp8), TINY, precisions, on_gpu=True, device_bytes=None)
    assert estimate.kv_bytes_per_token == expected


def test_capacity_is_what_was_told_a_share_of_what_is_free_or_a_steps_requests() -> None:
    def tokens(on_gpu: bool, device_bytes: int | None, environment: Any = None, **engine: Any) -> int | None:
        own = {} if environment is None else {"environment": environment}
        rollout = {"max_prompt_tokens": 100, "max_new_tokens": 100}
        sized = recipe(engine=engine, rollout=rollout, model={"path": "m"}, **own)
        return estimate_memory(sized, TINY, PLAIN, on_gpu=on_gpu, device_bytes=device_bytes).kv_cache_tokens

    assert tokens(True, None, kv_cache_tokens=1000) == 896
    assert tokens(True, None) is None
    assert tokens(True, 600_000_000 + 18 * P + 1024 * 2560, kv_memory_fraction=0.5) == 1280
    assert tokens(True, 0) == 0
    assert tokens(False, None, max_batch=10) == 10 * 256
    file = {"kind": "jsonl", "dataset": "a.jsonl", "reward": "a:b"}
    assert tokens(False, None, file, max_batch=1000) == 256 * 256  # a step's answers
    assert tokens(False, None, file | {"columns": {"group_size": "n"}}, max_batch=1000) == 1000 * 256


def test_choices_that_cost_or_save_memory() -> None:
    def parts(**sections: Any) -> dict[str, int]:
        return parts_of(estimate_memory(recipe(**sections), TINY, FULL, on_gpu=True, device_bytes=None))

    def optimizer(**choices: Any) -> int:
        return parts(trainer={"optimizer": choices})["optimizer"]

    base = parts()
    assert optimizer(master="stochastic_rounding") == 8 * P
    assert optimizer(states="bfloat16") == 8 * P
    assert optimizer(states="8bit") == int((6 + 2 / 128) * P)
    assert optimizer(states="8bit", master="stochastic_rounding") == int((2 + 2 / 128) * P)
    assert (
        parts(algorithm={"kl_coefficient": 0.1})["reference model"]
        == base["weights"] - 2 * P8 + base["FP8 copies"] - P8
    )
    assert parts(model={"path": "m", "dtype": "float32"})["optimizer"] == 8 * P


def test_codes_that_are_remade_are_there_while_generating_alone() -> None:
    def estimate(weight_codes: str, on_gpu: bool = True, precisions: Precisions = FULL, **other: Any) -> MemoryEstimate:
        sections = {"trainer": {"weight_codes": weight_codes}, "engine": {"kv_cache_tokens": 4096}} | other
        return estimate_memory(
            recipe(precision="fp8_full", **sections), TINY, precisions, on_gpu=on_gpu, device_bytes=10**9
        )

    kept, remade, bf16 = estimate("kept"), estimate("remade"), estimate("kept", precisions=PLAIN)
    scales = 4 * (P8 // 128**2)
    assert parts_of(kept)["FP8 copies"] == 2 * P8 + scales and parts_of(remade)["FP8 copies"] == scales
    assert remade.bytes_when("always") == bf16.bytes_when("always") + scales
    assert remade.bytes_when("generating") - kept.bytes_when("generating") == P8
    assert remade.bytes_when("training") == kept.bytes_when("training")
    assert remade.training_bytes == kept.training_bytes - 2 * P8
    few = {"weight_codes": "remade", "tokens_per_micro_batch": 16, "logprob_chunk": 1}
    back = estimate("remade", trainer=few)
    assert back.bytes_when("training") < P8 and back.training_bytes == back.bytes_when("always") + P8
    reference = {"kl_coefficient": 0.1}
    assert parts_of(estimate("remade", algorithm=reference))["reference model"] == 2 * (P - P8) + P8 + scales
    emulated = parts_of(estimate("remade", on_gpu=False))
    assert emulated["FP8 copies"] == 8 * P8 + scales and emulated["FP8 codes"] == P8
    shares = [estimate(codes, engine={}) for codes in ("kept", "remade")]
    free = [10**9 - one.bytes_when("always") - codes for one, codes in zip(shares, (0, P8), strict=True)]
    assert free[1] > free[0] and shares[1].kv_cache_tokens == int(free[1] * 0.85) // 512 // 128 * 128
    ppo = recipe(precision="fp8_full", algorithm={"name": "ppo"}, trainer={"weight_codes": "remade"})
    critic = ScalarModel(TINY, Precisions([], LINEAR_NAMES, []))
    found = estimate_memory(ppo, TINY, FULL, on_gpu=True, device_bytes=None, critic=critic)
    codes = next(part for part in found.parts if part.name == "FP8 codes")
    assert (codes.when, codes.num_bytes) == ("always", P8), "the critic is trained when they are there again"
    assert parts_of(found)["critic"] == 18 * P + P8 + 4 * (P8 // 128**2)


def test_offloaded_states_leave_two_pieces_on_a_gpu() -> None:
    offloaded = recipe(trainer={"optimizer": {"offload": True}})
    large = spec_from_config(preset_config("qwen3-0.6b"))
    for on_gpu, expected in ((True, 12 * 2 * 2**24), (False, 12 * large.num_parameters)):
        parts = parts_of(estimate_memory(offloaded, large, PLAIN, on_gpu=on_gpu, device_bytes=None))
        assert parts["optimizer"] == expected


def test_training_and_the_cache_take_turns_where_it_is_given_back() -> None:
    def estimate(release: bool, on_gpu: bool = True) -> MemoryEstimate:
        engine = {"kv_cache_tokens": 4096, "release_for_training": release}
        return estimate_memory(recipe(engine=engine), TINY, PLAIN, on_gpu=on_gpu, device_bytes=None)

    shared, apart = estimate(True), estimate(False)
    training, cache = shared.bytes_when("training"), 4096 * 4 * 64 * 4
    always = 18 * P + 600_000_000
    assert shared.bytes_when("generating") == cache and shared.bytes_when("always") == always
    assert shared.total_bytes == always + max(training, cache)
    assert apart.total_bytes == always + training + cache
    on_cpu = estimate(True, on_gpu=False)
    assert on_cpu.total_bytes == 18 * P + 500_000_000 + on_cpu.bytes_when("training") + cache


def test_full_parameter_fp8_grpo_of_8b_fits_one_h200_at_8k() -> None:
    """141 GB: trainer at 16k tokens a micro-batch, and a cache for dozens of whole answers."""
    path = REPO / "recipes" / "grpo_math_qwen3-8b-8k_1gpu_fp8-full.yaml"
    spec = spec_from_config(preset_config("qwen3-8b"))
    names = [name for name, _ in spec.linears()]
    h200 = 143_771 * 2**20
    estimate = estimate_memory(
        load_recipe(path), spec, Precisions(names, names, ["K", "V"]), on_gpu=True, device_bytes=h200
    )
    assert estimate.total_bytes < 0.9 * h200
    assert estimate.kv_cache_tokens is not None and estimate.kv_cache_tokens > 64 * 8192


ROUNDED = {"states": "8bit", "master": "stochastic_rounding"}
OFFLOADED = {"gradients": "bfloat16", "optimizer": ROUNDED | {"offload": True}}


@pytest.mark.parametrize(
    ("preset", "trainer", "lora", "gigabytes"),
    [
        ("moonlight-16b-a3b", OFFLOADED, None, "measured"),
        ("moonlight-16b-a3b", {"gradients": "bfloat16", "optimizer": ROUNDED}, None, 133.9),
        ("moonlight-16b-a3b", {"optimizer": ROUNDED}, None, 165.8),
        ("qwen3-30b-a3b", {}, {}, 69.6),
        ("qwen3-30b-a3b", {}, {"experts": True}, 84.6),
        ("qwen3-30b-a3b", OFFLOADED, None, 190.7),
    ],
)
def test_mixtures_on_one_h200(preset: str, trainer: Any, lora: Any, gigabytes: float | str) -> None:
    """Moonlight trains all its parameters there, with moments on the device or the host, and Qwen3-30B-A3B adapters."""
    spec = spec_from_config(preset_config(preset))
    trained = recipe(
        model={"path": "m", "lora": lora}, trainer={"tokens_per_micro_batch": 16_384} | trainer, precision="fp8_full"
    )
    precisions = precision_policy(spec, trained.fp8).precisions()
    found = estimate_memory(trained, spec, precisions, on_gpu=True, device_bytes=150 * 10**9).training_bytes
    if isinstance(gigabytes, str):
        result = json.loads((REPO / "lab/results/step_moonlight-16b-a3b.json").read_text())
        gigabytes = result["rows"][0]["memory/learn_peak_gb"]
    assert found / 10**9 == pytest.approx(gigabytes, rel=0.005)


def test_adapters_are_all_that_is_trained() -> None:
    """Rank 8 on q_proj and down_proj of 4 layers. FP8 weights keep no BF16, the reference shares all but adapters."""
    adapters = 4 * 8 * ((128 + 128) + (512 + 128))
    lora = {"path": "m", "lora": {"rank": 8, "targets": ["q_proj", "down_proj"]}}
    sized = recipe(model=lora, algorithm={"kl_coefficient": 0.1}, trainer={"tokens_per_micro_batch": 16})
    scales = 4 * (P8 // 128**2)
    for precisions, weights, copies in ((PLAIN, 2 * P, None), (FULL, 2 * (P - P8), 2 * P8 + scales)):
        parts = parts_of(estimate_memory(sized, TINY, precisions, on_gpu=True, device_bytes=None))
        assert parts.get("FP8 copies") == copies
        assert parts["weights"] == weights
        assert parts["adapters"] == parts["reference model"] == 2 * adapters
        assert (parts["gradients"], parts["optimizer"]) == (4 * adapters, 12 * adapters)


@pytest.mark.parametrize("precisions", [PLAIN, FULL], ids=["bf16", "fp8"])
def test_a_reward_models_head_is_trained_with_its_adapters(precisions: Precisions) -> None:
    """Rank 8 on q_proj of 4 layers, and 128 weights of the head; no lm_head, no cache, no gradient of the trunk."""
    trained = 4 * 8 * (128 + 128) + 128
    algorithm = {"name": "reward_model", "conversations": "pairs.jsonl"}
    sections = {"algorithm": algorithm, "trainer": {"tokens_per_micro_batch": 16}}
    untied = replace(TINY, tied_embeddings=False)
    whole, adapted = (
        estimate_memory(recipe(model=model, **sections), untied, precisions, on_gpu=True, device_bytes=None)
        for model in (SHORTEST, SHORTEST | {"lora": {"rank": 8, "targets": ["q_proj"]}})
    )
    parts = parts_of(adapted)
    assert parts["weights"] == (2 * P if precisions is PLAIN else 2 * (P - P8))
    assert (parts["adapters"], parts["gradients"], parts["optimizer"]) == (2 * trained, 4 * trained, 12 * trained)
    assert "reference model" not in parts and adapted.kv_cache_tokens == 0
    assert parts["working set"] < parts_of(whole)["working set"] / 3, "a layer's weights have no gradient"


def test_a_critic_is_trained_whole_whatever_the_policy_is() -> None:
    """So that beside a policy of adapters it decides what training takes."""
    trainer, adapted = {"tokens_per_micro_batch": 16}, {"path": "m", "lora": {"rank": 8}}
    ppo = recipe(model=adapted, algorithm={"name": "ppo"}, trainer=trainer)
    both = estimate_memory(ppo, TINY, PLAIN, on_gpu=True, device_bytes=None, critic=ScalarModel(TINY, PLAIN))
    whole = recipe(algorithm={"name": "reward_model", "conversations": "pairs.jsonl"}, trainer=trainer)
    alone = estimate_memory(whole, TINY, PLAIN, on_gpu=True, device_bytes=None)
    assert parts_of(both)["critic"] == 18 * P
    assert both.bytes_when("training") == alone.bytes_when("training")


def test_frozen_weights_have_no_gradient_in_the_working_set() -> None:
    spec = replace(TINY, vocab_size=100_000)
    parts = []
    for model in ({"path": "m"}, {"path": "m", "lora": {"rank": 8}}):
        sized = recipe(model=model, trainer={"tokens_per_micro_batch": 128, "logprob_chunk": 1})
        parts.append(parts_of(estimate_memory(sized, spec, PLAIN, on_gpu=True, device_bytes=None))["working set"])
    assert parts[0] == 100_000 * 6 * 128 + 4 * 2 * 128 * 128
    assert parts[1] < parts[0] / 10


def test_a_critic_is_a_second_model_with_its_own_optimizer_and_no_lm_head() -> None:
    untied = replace(TINY, tied_embeddings=False)
    ppo = recipe(algorithm={"name": "ppo"}, critic={"optimizer": {"states": "8bit", "master": "stochastic_rounding"}})
    critic = ScalarModel(untied, Precisions([], LINEAR_NAMES, []))
    base = estimate_memory(ppo, untied, FULL, on_gpu=True, device_bytes=None)
    both = estimate_memory(ppo, untied, FULL, on_gpu=True, device_bytes=None, critic=critic)
    copies = 2 * P8 + 4 * (P8 // 128**2)
    assert parts_of(both)["critic"] == 6 * P + int((2 + 2 / 128) * P) + copies
    assert parts_of(both) == parts_of(base) | {"critic": parts_of(both)["critic"]}  # trained one after the other


def test_a_critic_larger_than_the_policy_decides_what_training_takes() -> None:
    large = spec_from_config(preset_config("qwen3-0.6b"))
    ppo = recipe(algorithm={"name": "ppo"})
    estimate = estimate_memory(ppo, TINY, PLAIN, on_gpu=True, device_bytes=None, critic=ScalarModel(large, PLAIN))
    trunk = recipe(algorithm={"name": "reward_model", "conversations": "pairs.jsonl"})
    alone = estimate_memory(trunk, large, PLAIN, on_gpu=True, device_bytes=None)
    assert estimate.bytes_when("training") == alone.bytes_when("training")


def test_a_reward_model_has_neither_lm_head_nor_cache() -> None:
    trained = recipe(algorithm={"name": "reward_model", "conversations": "pairs.jsonl"})
    estimate = estimate_memory(trained, replace(TINY, tied_embeddings=False), PLAIN, on_gpu=True, device_bytes=None)
    assert parts_of(estimate)["weights"] == 2 * P and estimate.kv_cache_tokens == 0
    assert estimate.parts[0].how == "bfloat16, of the trainer", "there is no engine"
    assert estimate.total_bytes == 18 * P + 600_000_000 + estimate.bytes_when("training")


def test_a_scorer_is_codes_and_what_is_not_fp8() -> None:
    scorer = ScalarModel(replace(TINY, tied_embeddings=False), Precisions([], LINEAR_NAMES, []))
    base = estimate_memory(recipe(), TINY, PLAIN, on_gpu=True, device_bytes=None)
    scored = estimate_memory(recipe(), TINY, PLAIN, on_gpu=True, device_bytes=None, scorer=scorer)
    assert parts_of(scored) == parts_of(base) | {"reward model": 2 * (P - P8) + P8 + 4 * (P8 // 128**2)}


def test_logits_on_a_cpu_are_float64() -> None:
    """A chunk of 1,024 rows; with micro-batches of eight chunks the gradients of four in float32 are more."""
    sizes: dict[str, Any] = {"vocab_size": 32_000, "hidden_size": 512}
    spec = spec_from_config(preset_config("tiny") | sizes)
    for tokens, most in (
        (2048, 37 * 1024 * 32_000),
        (512, 37 * 512 * 32_000),
        (8192, (16 * 1024 + 4 * 4096) * 32_000 + 8 * spec.vocab_rows * 512),
    ):
        found = logits_bytes(spec, tokens, 2, 1024, frozen=False, on_gpu=False)
        assert found == max(most, 37 * min(1024, tokens) * 32_000) + 4 * 2 * tokens * 512
        assert found > logits_bytes(spec, tokens, 2, 1024, frozen=False, on_gpu=True)
    parts = parts_of(estimate_memory(recipe(), spec, PLAIN, on_gpu=False, device_bytes=None))
    assert parts["process"] == 500_000_000 and "CUDA context" not in parts


@pytest.mark.parametrize("name", ["sft", "dpo"])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_only_what_samples_has_a_cache(name: str, on_gpu: bool) -> None:
    given = {"algorithm": {"name": name, "conversations": "rows.jsonl"}}
    estimates = {}
    for every in (0, 5):
        one = recipe(**given, evaluation={"every": every})
        estimates[every] = estimate_memory(one, TINY, PLAIN, on_gpu=on_gpu, device_bytes=2**33)
    assert estimates[0].kv_cache_tokens == 0 and "KV cache" not in parts_of(estimates[0])
    assert estimates[0].total_bytes == estimates[0].bytes_when("always") + estimates[0].bytes_when("training")
    assert (estimates[5].kv_cache_tokens or 0) > 0 and "KV cache" in parts_of(estimates[5])
