"""`octetrl check` shows the memory of a worker that trains and of one that generates, and refuses either by its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octetrl.cli.check_machine import Device
from octetrl.cli.check_memory import MemoryPlan, role_sections
from octetrl.cli.main import run_command
from octetrl.config.memory import ScalarModel
from tests.unit.cli.test_fitting import parts, plan, problem, ways

NARROW = ("trainer.optimizer.states=8bit", "trainer.optimizer.master=stochastic_rounding")
ROLES = ("cluster.trainer_gpus=2", "cluster.engine_gpus=1")
GIB = 2**30


def shown(on: MemoryPlan) -> dict[str, dict[str, str]]:
    """The lines of each section, by title and name."""
    return {title: dict(lines) for title, lines in role_sections(on)}


def test_a_table_for_each_role(recipe: Path) -> None:
    on = plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES)
    found = shown(on)
    trains, generates = found["memory of a worker that trains"], found["memory of a worker that generates"]
    assert {"gradients", "optimizer", "activations", "working set", "checkpoint copy"} <= set(trains)
    assert set(generates) == {"weights", "CUDA context", "KV cache", "total", "room for KV cache"}
    assert "KV cache" not in trains and "1/2 of it" in trains["optimizer"]
    assert trains["weights"].endswith("bfloat16, of the trainer; 1/2 of FP8 linears")
    assert f", 2: {on.of_trainer(on.recipe).total_bytes / GIB:.1f}, 4: " in trains["each of N trainers"]


def test_the_parts_are_those_of_a_worker_that_does_both(recipe: Path) -> None:
    on = plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES)
    both, trainer = parts(on.of_worker(on.recipe)), parts(on.of_trainer(on.recipe))
    assert trainer == {name: size for name, size in both.items() if name != "KV cache"}
    engine, spec = parts(on.of_engine(on.recipe)), on.spec
    linears = sum(linear.num_weights for _, linear in spec.linears())  # all are FP8
    assert engine["weights"] == 2 * (spec.num_parameters - linears) + linears + 4 * (linears // 128**2)
    free = 140 * GIB - engine["weights"] - engine["CUDA context"]
    assert engine["KV cache"] == pytest.approx(0.85 * free, rel=1e-4)
    assert on.of_trainer(on.recipe).total_bytes == on.of_worker(on.recipe).training_bytes
    remade = plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES, "trainer.weight_codes=remade")
    trainer_of_remade = remade.of_trainer(remade.recipe)
    assert "FP8 codes" in parts(trainer_of_remade), "which are freed for an update"
    assert trainer_of_remade.total_bytes == trainer_of_remade.training_bytes


def test_a_reward_model_is_beside_the_engine(recipe: Path) -> None:
    on = plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES)
    scored = replace(on, scorer=ScalarModel(on.spec, on.policy.precisions()))
    held = parts(scored.of_worker(on.recipe))["reward model"]
    trainer, engine = parts(scored.of_trainer(on.recipe)), parts(scored.of_engine(on.recipe))
    assert engine["reward model"] == held > GIB and "reward model" not in trainer


def test_with_bf16_training_the_engine_makes_its_own_codes(recipe: Path) -> None:
    on = plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES, "precision=fp8_rollout")
    linears = sum(linear.num_weights for _, linear in on.spec.linears())
    assert parts(on.of_engine(on.recipe))["weights"] == 2 * on.spec.num_parameters + linears
    assert "codes that the engine makes" in shown(on)["memory of a worker that generates"]["weights"]


def test_a_second_buffer_takes_memory_from_the_cache(recipe: Path) -> None:
    ahead = (*NARROW, *ROLES, "cluster.max_staleness=1")
    on = plan(recipe, "qwen3-8b", 140, *ahead)
    single = plan(recipe, "qwen3-8b", 140, *ahead, "cluster.weight_buffer=single")
    doubled, alone = parts(on.of_engine(on.recipe)), parts(single.of_engine(single.recipe))
    assert doubled["second buffer"] == doubled["weights"] and "second buffer" not in alone
    assert alone["KV cache"] - doubled["KV cache"] == pytest.approx(0.85 * doubled["weights"], rel=1e-4)
    unknown = replace(on, device=replace(on.device, num_bytes=None))
    found = shown(unknown)["memory of a worker that generates"]
    assert "second buffer" not in found and found["KV cache"].strip().startswith("?")


def test_the_roles_of_lora_and_vllm(recipe: Path) -> None:
    lora = plan(recipe, "qwen3-8b", 140, *ROLES, "model.lora={}", "cluster.max_staleness=1")
    adapted, full = parts(lora.of_engine(lora.recipe)), plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES)
    assert adapted["second buffer"] == parts(lora.of_trainer(lora.recipe))["adapters"], "only adapters are sent"
    codes = parts(full.of_engine(full.recipe))["weights"]
    assert adapted["weights"] == codes + adapted["second buffer"]
    vllm = plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES, "engine.backend=vllm", "precision=fp8_rollout")
    held = parts(vllm.of_engine(vllm.recipe))
    assert held["weights"] == 2 * vllm.spec.num_parameters, "as the trainers send them; vLLM has its own"
    assert held["vLLM"] == parts(vllm.of_worker(vllm.recipe))["vLLM"]
    assert "vLLM" not in parts(vllm.of_trainer(vllm.recipe))


def test_workers_on_a_cpu_emulate_and_share_the_machine(recipe: Path) -> None:
    cpu = Device("CPU", False, 8 * GIB, is_here=False)
    on = replace(plan(recipe, "tiny", 8, "cluster.trainer_cpus=2", "cluster.engine_cpus=1"), device=cpu)
    linears = sum(linear.num_weights for _, linear in on.spec.linears())
    for precision in ("fp8_full", "fp8_rollout"):
        emulated = plan(recipe, "tiny", 8, "cluster.trainer_cpus=2", "cluster.engine_cpus=1", f"precision={precision}")
        assert parts(replace(emulated, device=cpu).of_engine(emulated.recipe))["FP8 values"] == 8 * linears
    assert all(section["total"].endswith("of 8.00 GiB that 3 workers share") for section in shown(on).values())
    assert on.problem(lambda changes: True) is None
    for emulate in (True, False):
        on_gpu = plan(recipe, "tiny", 8, *ROLES, f"fp8.emulate={emulate}".lower())
        assert ("FP8 values" in parts(on_gpu.of_engine(on_gpu.recipe))) == emulate


def test_beside_vllm_the_trainer_has_no_codes_of_the_rollout(recipe: Path) -> None:
    words = (*NARROW, "engine.backend=vllm")
    narrow, wide = (plan(recipe, "qwen3-8b", 140, *words, f"precision={name}") for name in ("fp8_rollout", "bf16"))
    assert "FP8 copies" not in parts(narrow.of_worker(narrow.recipe))
    assert narrow.of_worker(narrow.recipe).training_bytes == wide.of_worker(wide.recipe).training_bytes


def test_each_role_is_refused_by_its_own_need(recipe: Path) -> None:
    """A worker that does both would need room for a KV cache beside all that training keeps."""
    on = plan(recipe, "qwen3-8b", 140, *NARROW, *ROLES)
    trainer = on.of_trainer(on.recipe).total_bytes / GIB
    assert problem(recipe, "qwen3-8b", trainer + 0.1, *NARROW, *ROLES) is None
    text = problem(recipe, "qwen3-8b", trainer - 0.1, *NARROW, *ROLES)
    assert text is not None and text.startswith(f"memory: a worker that trains needs {trainer:.2f} GiB of ")
    for changes in ways(text):
        changed = plan(recipe, "qwen3-8b", trainer - 0.1, *NARROW, *ROLES, *changes)
        assert changed.problem(lambda changes: True) is None
        assert changed.of_trainer(changed.recipe).training_bytes <= 0.9 * (trainer - 0.1) * GIB, "with some to spare"
    small = ("model.lora={}", "trainer.tokens_per_micro_batch=2048", "trainer.logprob_chunk=256")
    cache = problem(recipe, "qwen3-8b", 80, *small, *ROLES, "engine.kv_cache_tokens=2000000")
    assert cache is not None and cache.startswith("memory: a worker that generates needs ")
    assert "engine.kv_cache_tokens=" in cache


def test_a_second_buffer_that_does_not_fit_can_be_left_out(recipe: Path) -> None:
    ahead = (*NARROW, *ROLES, "cluster.max_staleness=1", "cluster.weight_buffer=double")
    text = problem(recipe, "qwen3-8b", 82, *ahead, "engine.kv_cache_tokens=1000000")
    assert text is not None and ["cluster.weight_buffer=single"] in ways(text)


def test_a_second_buffer_never_crowds_out_a_cache_of_a_fixed_size(recipe: Path) -> None:
    """The buffer of 8.79 GiB is less than a tenth of the memory, and beside it 85.8 GiB of cache do not fit."""
    ahead = (*NARROW, *ROLES, "cluster.max_staleness=1")
    for tokens, doubles in ((900_000, True), (1_250_000, False)):
        on = plan(recipe, "qwen3-8b", 100, *ahead, f"engine.kv_cache_tokens={tokens}")
        assert on.problem(lambda changes: True) is None
        assert ("second buffer" in parts(on.of_engine(on.recipe))) is doubles
        why = shown(on)["memory of a worker that generates"][""]
        assert ("the KV cache of engine.kv_cache_tokens, " in why) is doubles


def test_a_cache_without_room_for_one_rollout_is_a_problem(recipe: Path) -> None:
    long = ("model.context_length=1000000", "rollout.max_new_tokens=900000", "trainer.tokens_per_micro_batch=16")
    text = problem(recipe, "tiny", 1, *ROLES, *long)
    assert text is not None and text.startswith("memory: on a worker that generates 1.00 GiB leave room for ")


def test_the_command_prints_both_tables(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(recipe, "tiny", 8)  # writes the recipe
    run_command(["check", "r.yaml", "--memory-gib", "8", *ROLES])
    out = capsys.readouterr().out
    assert out.index("\nmemory of a worker that trains\n") < out.index("\nmemory of a worker that generates\n")
    assert "\nmemory\n" not in out
