"""The memory of a worker by number of GPUs: what is shared out, and when no number of GPUs is enough."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from octetrl.cli.check_machine import Device, worker_lines
from octetrl.cli.check_memory import (
    MemoryPlan,
    memory_lines,
    weight_buffer_lines,
    worker_memory_lines,
)
from octetrl.config.schema import ClusterConfig, ModelConfig, Recipe
from tests.unit.cli.test_fitting import parts, plan

NARROW = ("trainer.optimizer.states=8bit", "trainer.optimizer.master=stochastic_rounding")


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
