"""A recipe that does not fit is a problem with exit code 1, and the changes that `check` names make it fit: on one GPU,
on several, and with workers that train or generate alone."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from octetrl.cli.check_machine import Device, worker_lines
from octetrl.cli.check_memory import MemoryPlan, memory_lines, role_sections, weight_buffer_lines, worker_memory_lines
from octetrl.cli.fitting import Change, fits
from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.config.memory import MemoryEstimate, ScalarModel
from octetrl.config.schema import ClusterConfig, ModelConfig, Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config

RECIPE = """
precision: fp8_full
model: {preset: PRESET, init: random, tokenizer: none}
environment: {kind: jsonl, dataset: tasks.jsonl}
"""


def plan(path: Path, preset: str, gib: float, *overrides: str) -> MemoryPlan:
    path.write_text(RECIPE.replace("PRESET", preset))
    resolved, spec = load_recipe(path, overrides), spec_from_config(preset_config(preset))
    device = Device("a GPU", True, int(gib * 2**30), is_here=False)
    return MemoryPlan.of(resolved, spec, precision_policy(spec, resolved.fp8), device)


def problem(path: Path, preset: str, gib: float, *overrides: str) -> str | None:
    return plan(path, preset, gib, *overrides).problem(lambda changes: True)


def parts(estimate: MemoryEstimate) -> dict[str, int]:
    return {part.name: part.num_bytes for part in estimate.parts}


def ways(text: str) -> list[list[str]]:
    """The sets of overrides that a problem names."""
    return [way.split() for way in text.partition("it fits with ")[2].split("; or with ")]


@pytest.mark.parametrize(("preset", "gib"), [("qwen3-8b", 140), ("qwen3-8b", 80), ("qwen3-0.6b", 8), ("tiny", 0.75)])
def test_each_set_of_changes_makes_it_fit_and_needs_all_of_them(recipe: Path, preset: str, gib: float) -> None:
    given = ("trainer.tokens_per_micro_batch=65536", "engine.kv_cache_tokens=200000")
    text = problem(recipe, preset, gib, *given)
    assert text is not None and re.match(r"memory: it needs [\d.]+ [GM]iB of ", text), text
    for changes in ways(text):
        assert problem(recipe, preset, gib, *given, *changes) is None
        for left_out in changes:
            assert problem(recipe, preset, gib, *given, *(one for one in changes if one != left_out)) is not None


def test_a_number_is_lowered_no_further_than_necessary(recipe: Path) -> None:
    text = problem(recipe, "qwen3-0.6b", 24, "trainer.tokens_per_micro_batch=131072")
    assert text is not None
    (number,) = [int(tokens) for tokens in re.findall(r"tokens_per_micro_batch=(\d+)", text)]
    assert 2048 < number < 131072 and 131072 % number == 0
    base = plan(recipe, "qwen3-0.6b", 24)
    twice = Change("trainer.tokens_per_micro_batch", 2 * number).apply(base.recipe)
    assert not fits(twice, base.estimate(twice), 24 * 2**30, spare=0.9)


def test_what_no_change_helps_says_so(recipe: Path) -> None:
    """Its codes alone need more, so adapters do not help either."""
    text = problem(recipe, "qwen3-30b-a3b", 24)
    assert text is not None and text.endswith("fit; use a smaller model, or a device with more memory")


def test_several_workers_share_the_optimizer(recipe: Path) -> None:
    """8 billion parameters in one process need 16 GiB of weights, 32 of gradients and 96 of optimizer states."""
    assert problem(recipe, "qwen3-8b", 141) is not None
    assert problem(recipe, "qwen3-8b", 141, "cluster.gpus=2") is None


def test_as_many_gpus_are_proposed_as_are_needed(recipe: Path) -> None:
    text = problem(recipe, "qwen3-8b", 80)
    assert text is not None
    (number,) = [int(gpus) for gpus in re.findall(r"cluster\.gpus=(\d+)", text)]
    assert problem(recipe, "qwen3-8b", 80, f"cluster.gpus={number}") is None
    base = plan(recipe, "qwen3-8b", 80)
    half = Change("cluster.gpus", number // 2).apply(base.recipe)
    assert not fits(half, base.estimate(half), 80 * 2**30, spare=0.9)


def test_a_cache_without_room_for_one_rollout_is_a_problem(recipe: Path) -> None:
    tight = (
        0.001 + plan(recipe, "tiny", 1, "engine.kv_cache_tokens=4096").estimate(load_recipe(recipe)).total_bytes / 2**30
    )
    long = ("model.context_length=1000000", "evaluation.max_new_tokens=900000")  # not trained
    text = problem(recipe, "tiny", tight, *long)
    assert text is not None and "tokens of the KV cache, less than one rollout" in text


def test_the_command_ends_with_1_and_the_changed_recipe_with_0(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from octetrl.run.tiny_model import save_tokenizer

    save_tokenizer(["a b"], tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(preset_config("tiny") | {"max_position_embeddings": 4096}))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "b"}\n')
    recipe.write_text(
        "precision: fp8_full\nmodel: {path: model, init: random}\n"
        "environment: {kind: jsonl, dataset: tasks.jsonl, eval_size: 1}\n"
    )
    arguments = ["check", "r.yaml", "--memory-gib", "1", "trainer.tokens_per_micro_batch=200000"]
    assert run_command(arguments) == 1
    shown = capsys.readouterr()
    assert "no problems" not in shown.out and shown.err.count("\n") == 1
    assert run_command([*arguments, *ways(shown.err.strip())[0]]) == 0
    assert run_command([*arguments, "environment.dataset=gone.jsonl"]) == 2
    assert "r.yaml: 2 problems" in capsys.readouterr().err


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


def test_a_cache_of_a_role_without_room_for_one_rollout_is_a_problem(recipe: Path) -> None:
    long = ("model.context_length=1000000", "evaluation.max_new_tokens=900000")
    text = problem(recipe, "tiny", 1, *ROLES, *long)
    assert text is not None and text.startswith("memory: on a worker that generates 1.00 GiB leave room for ")


def test_the_command_prints_both_tables(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(recipe, "tiny", 8)  # writes the recipe
    run_command(["check", "r.yaml", "--memory-gib", "8", *ROLES])
    out = capsys.readouterr().out
    assert out.index("\nmemory of a worker that trains\n") < out.index("\nmemory of a worker that generates\n")
    assert "\nmemory\n" not in out


@pytest.mark.parametrize("gradients", ["local", "sharded"])
def test_each_worker_has_its_rows_and_everything_else(recipe: Path, gradients: str) -> None:
    on = plan(recipe, "qwen3-8b", 140, *NARROW, "cluster.gpus=4", f"cluster.gradients={gradients}")
    whole, each = parts(on.estimate(on.recipe)), parts(on.of_worker(on.recipe))
    spec = on.spec
    linears = sum(linear.num_weights for _, linear in spec.linears())  # all are FP8
    assert each["weights"] == pytest.approx(2 * (spec.num_parameters - linears) + 2 * linears / 4, rel=1e-6)
    assert each["optimizer"] == pytest.approx((2 + 2 / 128) * spec.num_parameters / 4, rel=1e-6)
    assert each["gradients"] == pytest.approx(4 * spec.num_parameters / (4 if gradients == "sharded" else 1), rel=1e-6)
    assert each["KV cache"] > whole["KV cache"], "it takes a share of what the others own"
    shared = {"weights", "optimizer", "gradients", "KV cache"}
    assert {name: size for name, size in each.items() if name not in shared} == {
        name: size for name, size in whole.items() if name not in shared
    }


def test_workers_on_the_cpu_have_the_cache_of_one(recipe: Path) -> None:
    cpu = Device("CPU", False, 64 * 2**30, is_here=False)
    on = replace(plan(recipe, "qwen3-8b", 140, *NARROW, "cluster.cpus=4"), device=cpu)
    whole, each = parts(on.estimate(on.recipe)), parts(on.of_worker(on.recipe))
    assert each["KV cache"] == whole["KV cache"] and each["optimizer"] < whole["optimizer"]


def test_without_fp8_training_every_worker_has_all_weights(recipe: Path) -> None:
    on = plan(recipe, "qwen3-8b", 140, *NARROW, "cluster.gpus=4", "precision=bf16")
    whole, each = parts(on.estimate(on.recipe)), parts(on.of_worker(on.recipe))
    assert each["weights"] == whole["weights"] and each["optimizer"] == pytest.approx(whole["optimizer"] / 4, rel=1e-6)


def lines(on: MemoryPlan) -> list[str]:
    return [f"{name} {value}".strip() for name, value in worker_memory_lines(on)]


def test_numbers_of_gpus_are_listed_if_several_are_used_or_one_is_too_small(recipe: Path) -> None:
    fits = plan(recipe, "qwen3-8b", 140, *NARROW)
    assert lines(fits) == [] and lines(plan(recipe, "qwen3-8b", 140, "cluster.cpus=2")) == []
    (line,) = lines(plan(recipe, "qwen3-8b", 140, *NARROW, "cluster.gpus=6"))
    sizes = {
        int(number): float(size)
        for number, _, size in (
            pair.partition(": ") for pair in line.split(" GiB")[0].removeprefix("each of N GPUs ").split(", ")
        )
    }
    assert list(sizes) == [1, 2, 4, 6, 8] and sorted(sizes.values(), reverse=True) == list(sizes.values())
    assert sizes[1] == pytest.approx(fits.estimate(fits.recipe).training_bytes / 2**30, abs=0.05)
    assert "each of N GPUs" in lines(plan(recipe, "qwen3-8b", 80, *NARROW))[0]


def test_a_model_that_does_not_fit_whole_needs_tensor_parallelism(recipe: Path) -> None:
    """Llama-3.1-70B's shape, instead of a preset: 70 GB of codes, and its local gradient sums, on each of any."""
    on = plan(recipe, "llama-3.1-8b", 140, *NARROW, "cluster.gpus=8")
    spec = replace(on.spec, num_layers=80, hidden_size=8192, intermediate_size=28_672, num_heads=64)
    told = lines(replace(on, spec=spec))
    assert told[1].startswith("tensor parallelism needed: a whole model takes at least ")
    assert [line.split(": ")[0] for line in told[2:5]] == [f"cluster.tensor_parallel={size}" for size in (2, 4, 8)]
    sizes = [float(line.split(": ")[1].split(" GiB on each of 8 GPUs")[0]) for line in told[2:5]]
    assert sizes == sorted(sizes, reverse=True)
    assert ["which fits" in line for line in told[2:5]] == [size <= 140 for size in sizes]
    assert told[5] == "on GPUs its training launches kernel by kernel so far, which is slow (docs/scale.md)"


def test_an_address_where_nothing_answers_is_a_warning() -> None:
    def lines(address: str) -> list[str]:
        recipe = Recipe(model=ModelConfig(preset="tiny", init="random"), cluster=ClusterConfig(cpus=2, address=address))
        return [text for _, text in worker_lines(recipe) if "answers" in text]

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert lines(address) == lines("auto") == []
        server.shutdown(socket.SHUT_RDWR)  # it listens no more, and nobody else can take the port
        said = f"warning: nothing answers at {address} from this machine; start Ray there before the run"
        assert lines(address) == [said]


def test_where_new_weights_arrive_and_why(recipe: Path) -> None:
    """Two copies of 8.79 GiB of weights, and the KV cache of 256 answers, fit on a GPU or do not."""

    def said(gib: float, *words: str, engines: int = 1) -> list[str]:
        ahead = ("cluster.trainer_gpus=1", f"cluster.engine_gpus={engines}", "cluster.max_staleness=1")
        batch = ("engine.max_batch=256", "rollout.prompts_per_step=64")
        on = plan(recipe, "qwen3-8b", gib, *NARROW, *ahead, *batch, *words)
        return [f"{name} {value}".strip() for name, value in weight_buffer_lines(on)]

    assert list(weight_buffer_lines(plan(recipe, "qwen3-8b", 140, *NARROW, "cluster.gpus=2"))) == []
    where, why = said(140)
    assert where == "new weights in a second buffer, while answers are generated"
    assert re.fullmatch(r"beside its 8.79 GiB the KV cache of a whole batch, [\d.]+ GiB, fits", why)
    crowded = said(140, "engine.max_batch=1024", "rollout.prompts_per_step=512")
    assert crowded[0] == where and crowded[1] == "its 8.79 GiB are 6.7% of the memory for the KV cache"
    where, why = said(24)
    assert where == "new weights in a pause between two batches"
    # 0.85 of 24 GiB less two copies of the weights and 0.6 GB; 256 answers of 2,048 tokens with 73,728 bytes each
    buffer = "beside a second buffer of 8.79 GiB the KV cache has 4.98 GiB, and a whole batch needs"
    assert why == f"{buffer} 36.00 GiB"
    odd = ("rollout.prompts_per_step=31", "rollout.group_size=7")
    assert said(24, *odd, engines=2)[1] == f"{buffer} 15.33 GiB", "109 of 217 answers"
    fixed = said(24, "engine.kv_cache_tokens=100000")
    assert fixed[1] == f"{buffer.removesuffix('a whole batch needs')}engine.kv_cache_tokens needs 6.87 GiB"
    assert said(24, "cluster.weights_in_flight=recompute_cache")[0] == "new weights in a pause between two forwards"
    assert "second buffer" in said(24, "cluster.weight_buffer=double")[0]
    assert said(140, "cluster.weight_buffer=single")[1] == "cluster.weight_buffer: single"
    unknown = plan(recipe, "qwen3-8b", 140, *NARROW, "cluster.trainer_gpus=1", "cluster.engine_gpus=1")
    cluster = unknown.recipe.cluster.model_copy(update={"max_staleness": 1})
    device = replace(unknown.device, num_bytes=None)
    found = replace(unknown, recipe=unknown.recipe.model_copy(update={"cluster": cluster}), device=device)
    assert "if the GPU's memory allows it" in next(weight_buffer_lines(found))[1]


def test_workers_on_one_machine_share_its_memory(recipe: Path) -> None:
    cpu = Device("CPU", False, 8 * 2**30, is_here=False)

    def shown(*words: str) -> dict[str, str]:
        return dict(memory_lines(replace(plan(recipe, "tiny", 140, *words), device=cpu)))

    one, four = shown(), shown("cluster.cpus=4")
    assert one["total"].endswith("of 8.00 GiB") and one["room for KV cache"].endswith("if nothing else uses the memory")
    assert four["total"].endswith("of 8.00 GiB that 4 workers share")
    size, rest = four["room for KV cache"].split(" GiB ")
    assert float(size) < 2.0 and rest.endswith("if the 4 workers share the memory evenly")
    assert re.search(
        r"backward \([\d.]+ [GM]iB\) or logits and lm_head's gradient \([\d.]+ [GM]iB\)", one["working set"]
    )
