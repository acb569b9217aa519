"""What a recipe with vLLM as its rollout backend must not ask for, and what `octetrl check` then says."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any, get_args

import pytest

from octetrl.cli.check_machine import Device, backend_lines, backend_problems_here
from octetrl.cli.check_memory import MemoryPlan, weight_buffer_lines
from octetrl.config.backends import TRAITS, VLLM_VERSION, vllm_weight_bytes, why_no_vllm
from octetrl.config.memory import estimate_memory
from octetrl.config.rules_shape import spec_problems, vllm_problems
from octetrl.config.schema import EngineConfig, Recipe
from octetrl.config.worker_memory import choose_buffer
from octetrl.fp8.parity import refused_gate, why_measured
from octetrl.fp8.policy import precision_policy
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config
from tests.unit.config.test_validate import problem_of, recipe_with

VLLM = ("engine.backend", "vllm")
FULL = ("precision", "fp8_full")
GPU, CPU = Device("H200", True, 140 << 30), Device("CPU", False, 1 << 34)


def texts(recipe: Recipe, **config: Any) -> list[str]:
    spec = spec_from_config(preset_config("qwen3-0.6b") | config)
    return [problem.text for problem in vllm_problems(recipe, spec)] if recipe.engine.backend == "vllm" else []


def test_models_that_the_adapter_does_not_know() -> None:
    recipe = recipe_with(VLLM, FULL)
    assert texts(recipe) == []
    moonlight = spec_from_config(preset_config("moonlight-16b-a3b"))
    (text,) = [problem.text for problem in vllm_problems(recipe_with(VLLM), moonlight)]
    assert text.startswith(
        "engine.backend: vllm has no names for the parameters of deepseek_v3, only for those of llama"
    )
    narrow = texts(recipe, num_attention_heads=3, num_key_value_heads=1, head_dim=64)
    assert narrow[0].startswith("engine.backend: vllm needs multiples of 128 rows for FP8, and q_proj has 192")
    qwen2 = texts(recipe, architectures=["Qwen2ForCausalLM"], model_type="qwen2", head_dim=64)
    assert len(qwen2) == 1 and "stores K and V in one format, and K must stay BF16" in qwen2[0]
    assert texts(recipe_with(FULL), num_attention_heads=3, num_key_value_heads=1, head_dim=64) == []


QWEN2: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {**WINDOWS, "max_window_layers": 3},
            "has sliding windows in all layers of a qwen3 or in none, and this model",
        ),
        (
            {**QWEN2, **WINDOWS, "max_window_layers": 3, "head_dim": 64},
            "has sliding windows in all layers of a qwen2 or",
        ),
        ({**WINDOWS, "max_window_layers": 0}, None),
        ({"attention_bias": True}, "has no bias of o_proj in a qwen3, and this model has one (attention_bias: true)"),
        (
            {**QWEN2, "head_dim": 128},
            "takes hidden_size / num_attention_heads as the head size of a qwen2, 64 here, and",
        ),
        ({**QWEN2, "head_dim": 64}, None),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": True}, None),
    ],
)
def test_what_vllms_model_of_a_family_lacks(config: dict[str, Any], expected: str | None) -> None:
    found = texts(recipe_with(VLLM), **config)
    assert len(found) == (expected is not None) and texts(recipe_with(), **config) == []
    if expected is not None:
        assert found[0].startswith(f"engine.backend: vllm {expected}") and found[0].endswith(
            "use engine.backend: octetrl"
        )


def test_a_local_version_is_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, refused in ((f"{VLLM_VERSION}+cu129", False), (f"{VLLM_VERSION}.post1", True), ("0.26.0+cu129", True)):
        monkeypatch.setattr("octetrl.config.backends.version", lambda _, found=found: found)
        why = why_no_vllm()
        assert (why is not None) == refused and (why is None or f"vllm {found} is installed" in why)


def test_equality_is_not_promised() -> None:
    policy = precision_policy(spec_from_config(preset_config("qwen3-0.6b")), recipe_with(FULL).fp8)
    assert why_measured(recipe_with(FULL), policy, on_gpu=True) is None
    assert "engine.backend: vllm" in str(why_measured(recipe_with(FULL, VLLM), policy, on_gpu=True))
    strict = recipe_with(FULL, VLLM, ("mismatch.fail_on_difference", True))
    assert "cannot stop this run" in str(refused_gate(strict, policy, on_gpu=True))


ROLES = (("cluster.trainer_gpus", 2), ("cluster.engine_gpus", 6))


SHARED = (("cluster.gpus", 4), ("cluster.tensor_parallel", 2))


@pytest.mark.parametrize("workers", [(), ROLES, (("cluster.gpus", 2),), SHARED])
def test_vllms_cache_holds_a_whole_context(workers: tuple[tuple[str, Any], ...]) -> None:
    """It does not start with less; our engine needs one rollout. The tokens count in whole pages."""
    lengths = (("model.context_length", 4096), ("engine.page_size", 128), ("rollout.max_prompt_tokens", 128))
    cache = (*workers, *lengths, ("rollout.max_new_tokens", 128))
    for tokens in (200, 3000, 4095):
        said = problem_of(VLLM, *cache, ("engine.kv_cache_tokens", tokens))
        assert said.startswith(
            f"recipe: engine.kv_cache_tokens: {tokens} cannot hold model.context_length 4,096, without which"
        )
        assert said.endswith("raise it to 4096, or lower model.context_length")
    recipe_with(VLLM, *cache, ("engine.kv_cache_tokens", 4096))
    recipe_with(*cache, ("engine.kv_cache_tokens", 256))
    odd = (*cache, ("model.context_length", 4000), ("engine.kv_cache_tokens", 4000))
    assert "raise it to 4096" in problem_of(VLLM, *odd)


def test_a_shared_gpu_and_a_shared_model_are_one_problem() -> None:
    """More tokens for vLLM's cache would not help: each rank needs a GPU."""
    said = problem_of(VLLM, *SHARED, ("cluster.workers_per_gpu", 2))
    assert said.startswith("recipe: cluster.workers_per_gpu: ") and "problems" not in said


def test_workers_that_share_a_model() -> None:
    """By vLLM's own tensor parallelism. What is not cut at whole blocks is refused, and so are separate roles."""
    assert texts(recipe_with(VLLM, FULL, *SHARED)) == []
    lines = dict(backend_lines(recipe_with(VLLM, FULL, *SHARED)))
    assert lines["rollout backend"].endswith("one for each group of 2 workers, with weights of its own")
    assert lines["tensor parallelism"].startswith("by vLLM itself, 2 ranks")
    spec = spec_from_config(preset_config("qwen3-0.6b"))
    (text,) = [one.text for one in spec_problems(recipe_with(VLLM, *SHARED), replace(spec, intermediate_size=3200))]
    assert text.startswith("cluster.tensor_parallel: 2, but 2 parts of the intermediate size 3,200 are not multiples")
    thirds = recipe_with(VLLM, ("cluster.gpus", 3), ("cluster.tensor_parallel", 3))
    (text,) = [one.text for one in vllm_problems(thirds, spec)]
    assert text.startswith(
        "cluster.tensor_parallel: engine.backend: vllm cuts the vocabulary in equal parts, and 3 does"
    )
    assert "whole models so far" in problem_of(VLLM, *ROLES, ("cluster.tensor_parallel", 2))


def test_each_of_several_workers_has_a_vllm_and_a_part_of_the_optimizer() -> None:
    spec = spec_from_config(preset_config("qwen3-8b"))

    def parts(*changes: tuple[str, Any]) -> dict[str, int]:
        recipe = recipe_with(VLLM, FULL, *changes)
        plan = MemoryPlan.of(recipe, spec, precision_policy(spec, recipe.fp8), GPU)
        return {part.name: part.num_bytes for part in plan.of_worker(recipe).parts}

    alone, several = parts(), parts(("cluster.gpus", 4), ("cluster.address", "auto"))
    assert several["vLLM"] == alone["vLLM"] and several["optimizer"] < alone["optimizer"] // 3


def test_vllms_cache_leaves_room_for_new_weights() -> None:
    """It has its size before the workers meet, so what is free then decides nothing."""
    ahead = (*ROLES, ("cluster.max_staleness", 1))
    for backend, setting, doubles in (("vllm", "auto", True), ("vllm", "single", False), ("octetrl", "auto", False)):
        recipe = recipe_with(*ahead, ("engine.backend", backend), ("cluster.weight_buffer", setting))
        assert choose_buffer(recipe, weights=8, cache=8, free=0).doubles == doubles
    spec = spec_from_config(preset_config("qwen3-8b"))
    recipe = recipe_with(*ahead, VLLM)
    plan = MemoryPlan.of(recipe, spec, precision_policy(spec, recipe.fp8), Device("a GPU", True, None))
    assert dict(weight_buffer_lines(plan))["new weights"] == "in a second buffer, while answers are generated"


def test_vllm_absent_or_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    recipe = recipe_with(VLLM)
    monkeypatch.setattr("octetrl.config.backends.version", absent)
    assert f"vllm {VLLM_VERSION} is not installed; pip install 'octetrl[vllm]'" in str(why_no_vllm())
    assert backend_problems_here(recipe, GPU) == [why_no_vllm()]
    assert backend_problems_here(recipe, Device("a GPU", True, 1, is_here=False)) == []
    (text,) = backend_problems_here(recipe, CPU)
    assert text.startswith("engine.backend: vllm needs an NVIDIA GPU, and this machine has none")
    monkeypatch.setattr("octetrl.config.backends.version", lambda _: "0.26.0")
    assert "vllm 0.26.0 is installed, and only 0.25.1 was tried" in str(why_no_vllm())
    monkeypatch.setattr("octetrl.config.backends.version", lambda _: VLLM_VERSION)
    assert why_no_vllm() is None and backend_problems_here(recipe, GPU) == []


def test_vllms_own_weights_count() -> None:
    spec = spec_from_config(preset_config("qwen3-8b"))
    sizes = {}
    for backend in ("octetrl", "vllm"):
        recipe = recipe_with(FULL, ("engine.backend", backend))
        precisions = precision_policy(spec, recipe.fp8).precisions()
        sizes[backend] = estimate_memory(recipe, spec, precisions, on_gpu=True, device_bytes=200 << 30)
    whose = [next(part.how for part in one.parts if part.name == "weights") for one in sizes.values()]
    assert whose == ["bfloat16, shared by engine and trainer", "bfloat16, of the trainer"]
    held = {part.name: part for part in sizes["vllm"].parts}["vLLM"]
    fp8 = sum(linear.num_weights for _, linear in spec.linears())
    assert vllm_weight_bytes(spec, precisions.fp8_rollout) == 2 * (spec.num_parameters - fp8) + fp8 + fp8 // 4096
    assert held.when == "generating" and held.num_bytes > 8 << 30
    fewer = (sizes["octetrl"].kv_cache_tokens or 0) - (sizes["vllm"].kv_cache_tokens or 0)
    assert fewer * sizes["vllm"].kv_bytes_per_token == pytest.approx(0.85 * held.num_bytes, rel=0.01)
    assert sizes["vllm"].training_bytes == sizes["octetrl"].training_bytes, "vLLM sleeps while the trainer trains"


def test_every_backend_of_a_recipe_says_what_it_holds_and_needs() -> None:
    assert set(TRAITS) == set(get_args(EngineConfig.model_fields["backend"].annotation))
    assert all(bool(traits.holds) == traits.has_weights for traits in TRAITS.values())
