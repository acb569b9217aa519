"""`octetrl check`: what it shows of a recipe, the device, and the headers of weight files that no loader would take."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.cli.check_files import file_problems
from octetrl.cli.check_machine import Device, find_device, missing_fp8
from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.weight_files import SCORE, SINGLE, pieces
from octetrl.run.tiny_model import TOOL_TEMPLATE, save_tokenizer
from octetrl.shapes.presets import preset_config
from tests.unit.cli.conftest import Check
from tests.unit.config.test_validate import recipe_with

RECIPE = """
precision: fp8_full
model: {path: model, init: random}
environment: {kind: jsonl, dataset: tasks.jsonl, eval_size: 0}
cluster: {device: cpu}
"""


@pytest.fixture
def rehearsed(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, the config.json of a tiny model with a tokenizer, and a file of tasks, in the working directory.
    The model has no weights: `model` below has them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    shutil.copytree(tokenizer, tmp_path / "model")
    write_config(tmp_path, max_position_embeddings=4096)
    return tmp_path


@pytest.fixture
def folder(rehearsed: Path, unrehearsed: None) -> Path:
    return rehearsed


def write_config(folder: Path, **fields: object) -> None:
    (folder / "model/config.json").write_text(json.dumps(preset_config("tiny") | fields))


def test_it_shows_essentials_parameters_precision_and_memory(folder: Path, check: Check) -> None:
    settings = ("engine.speculation.name=ngram", "logging.rollouts=false")
    code, out, err = check("fp8.bf16_last_layers=1", "fp8.ignore=['*.o_proj']", *settings)
    assert (code, err) == (0, "")
    for shown in (
        "grpo, 32 prompts x 8 siblings a step",
        "GiB, FP8 is emulated",
        "parameters 1,033,600",
        "attention.qkv_proj fp8 in 3 of 4 fp8 in 3 of 4",
        "attention.o_proj bf16 bf16",
        "K fp8, V fp8, calibrated scales (fused), replayed in training",
        "KV cache 0.25 GiB 524,288 tokens of 512 bytes",
        "logging.rollouts is false, so a resumed run makes no drafts from the answers of earlier steps",
        "no problems",
    ):
        assert shown in out


def test_it_says_whether_the_host_has_room_for_a_checkpoints_copy(
    folder: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 bytes a parameter of weights, 8 of moments, 4 of masters. A run that saves at its end alone needs none."""
    parameters = spec_from_config(preset_config("tiny")).num_parameters
    _, out, _ = check("checkpoint.every=5", "steps=10")
    assert f"checkpoint copy {14 * parameters / 2**20:.2f} MiB of the host's memory" in out
    assert "will stop the run" not in out
    monkeypatch.setattr("octetrl.cli.check_memory.available_host_bytes", lambda: 2**20)
    code, out, _ = check("checkpoint.every=5", "steps=10")
    assert code == 0 and "the host has room for 0.00 MiB: each checkpoint will stop the run while written" in out
    for silent in (("checkpoint.every=0",), ("checkpoint.every=10", "steps=10")):
        assert "checkpoint copy" not in check(*silent)[1]
    assert "will stop the run" not in check("checkpoint.every=5", "--memory-gib", "80")[1]


def test_the_room_for_the_cache_is_beside_the_codes_that_the_engine_reads(folder: Path, check: Check) -> None:
    tokens = []
    for codes in ("kept", "remade"):
        _, out, _ = check("--memory-gib", "8", f"trainer.weight_codes={codes}")
        tokens.append(int(out.split("room for KV cache")[1].split()[2].replace(",", "")))
    transposed = sum(linear.num_weights for _, linear in spec_from_config(preset_config("tiny")).linears())
    assert tokens[1] - tokens[0] == pytest.approx(transposed / 512, abs=1)  # bytes a token, in E4M3


def test_it_counts_the_workers_and_refuses_gpus_that_are_not_here(
    folder: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    on_gpus = ("cluster.device=auto", "cluster.gpus=2")
    code, out, err = check(*on_gpus)
    assert code == 2 and "cluster 2 workers on 2 GPUs the memory below is that of each worker" in out
    assert "cluster.gpus: 2 GPUs were asked for, this machine has 0; use cluster.cpus=2 instead, remove it, or" in err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "this machine has 1; lower it, or give the cluster.address of" in check(*on_gpus)[2]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check(*on_gpus)[0] == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for elsewhere in (("--memory-gib", "80"), ("cluster.address=head:6379",)):
        code, out, _ = check(*on_gpus, *elsewhere)
        assert code == 0 and "cluster 2 workers on 2 GPUs" in out
    code, out, _ = check("cluster.cpus=64")
    assert code == 0 and "cluster 64 workers on the CPU" in out
    assert "workers on" not in check()[1]


def test_it_warns_below_four_micro_batches_a_worker(folder: Path, check: Check) -> None:
    lengths = ("rollout.max_prompt_tokens=48", "rollout.max_new_tokens=16", "trainer.minibatches=2")
    given = ("cluster.cpus=3", "rollout.prompts_per_step=6", "rollout.group_size=8", *lengths)
    _, out, _ = check(*given, "trainer.tokens_per_micro_batch=192")
    assert "a step's sequences fill 8 micro-batches of an update; 3 workers need 4 each" in out
    assert "micro-batches of an update" not in check(*given, "trainer.tokens_per_micro_batch=128")[1]


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ((), ""),
        (("precision=bf16",), ""),
        (("precision=fp8",), ""),
        (("precision=fp8", "fp8.kv_replay=false"), ""),
        (("precision=fp8_rollout",), "FP8 on one side only"),
        (("fp8.kv_replay=false",), "fp8.kv_replay: false"),
        (("precision=fp8", "engine.prefix_cache=keep"), "engine.prefix_cache: keep"),
        (("precision=bf16", "model.dtype=float32"), "fused kernels of a GPU"),
        (("fp8.emulate=true",), "emulated FP8"),
        (("precision=bf16", "fp8.emulate=true"), ""),
    ],
)
def test_equal_logprobs_are_promised_or_the_reason_is_given(
    overrides: tuple[str, ...], why: str, on_gpu: bool, folder: Path, check: Check
) -> None:
    overrides = (*overrides, *(("--memory-gib", "80") if on_gpu else ()))
    code, out, err = check(*overrides)
    assert (code, err) == (0, "")
    of_gpus_alone = why in ("fused kernels of a GPU", "emulated FP8")
    promised = not why or (of_gpus_alone and not on_gpu)
    assert promised == ("promised: one order of sums on both sides, so equal log-probs" in out)
    assert promised or why in out
    assert ("warning rollouts: a slower forward" in out) == (of_gpus_alone and on_gpu)
    code, _, err = check(*overrides, "mismatch.fail_on_difference=true")
    assert code == (0 if promised else 2)
    assert promised or ("mismatch.fail_on_difference: true" in err and why in err and err.count("\n") == 1)


def test_a_gpu_that_is_not_here_leaves_the_cache_open(folder: Path, check: Check) -> None:
    code, out, err = check("cluster.device=cuda")
    if "this machine has no GPU" in out:
        assert "85% of the memory left, 512 bytes a token" in out
        assert code == 2 and "cluster.device: cuda was asked for, but this machine has no GPU; plan for" in err
    else:
        assert code == 0
    assert check("cluster.device=cuda", "--memory-gib", "80")[0] == 0


def test_everything_that_is_wrong_is_told_at_once(rehearsed: Path, check: Check) -> None:
    write_config(rehearsed, intermediate_size=200)
    wrong = "model.tokenizer=gone environment.dataset=gone.jsonl fp8.ignore=['*.nothing'] model.context_length=4096"
    code, _, err = check(*wrong.split())
    first, *lines = err.splitlines()
    assert code == 2 and first == "octetrl: r.yaml: 5 problems"
    for said in ("gone.jsonl", "model.tokenizer", "size is 200", "1024 positions", "'*.nothing' matches no linear"):
        assert any(said in line for line in lines), said


def test_sliding_windows_are_shown(folder: Path, check: Check) -> None:
    write_config(folder, use_sliding_window=True, sliding_window=100, max_window_layers=1)
    _, out, _ = check()
    assert "100 keys in 3 of 4 layers; older pages stay in the KV cache" in out


def test_an_integer_cache_differs_from_a_dynamic_one_in_its_codes_alone(folder: Path, check: Check) -> None:
    found = {}
    for cache in ("dynamic", "int8"):
        code, found[cache], err = check(f"fp8.kv_cache={cache}", "engine.kv_cache_tokens=4096")
        assert code == 0, err
    assert "K int8, V int8, a scale for each token, replayed in training" in found["int8"]
    as_dynamic = found["int8"].replace("K int8, V int8, a scale for each token", "K fp8, V fp8, dynamic scales")
    assert as_dynamic == found["dynamic"], "the estimate of memory as well"


def test_latent_attention_is_shown_and_its_sizes_refused_for_a_gpu(folder: Path, check: Check) -> None:
    write_config(folder, **(preset_config("tiny-mla-moe") | {"qk_nope_head_dim": 32, "max_position_embeddings": 4096}))
    code, out, err = check("precision=fp8_full")
    assert "4 of 48 with latent attention; all share latent of 64, rotary key of 16" in out
    assert "latent fp8, rotary key bf16, dynamic scales" in out and "of 400 bytes" in out
    assert "8 of width 256 in 3 of 4 layers, 2 for each token" in out and "hidden 128, MLP 512" in out
    assert code == 0, err
    code, _, err = check("model.lora={}", "trainer.router.bias_rate=0.01")
    assert code == 2 and "trainer.router.bias_rate: 0.01 would move" in err and "which model.lora freezes" in err
    code, _, err = check("precision=fp8_full", "fp8.kv_cache=int8")
    assert code == 2 and "'int8' is not available for latent attention" in err
    code, _, err = check("precision=fp8_full", "--memory-gib", "80")
    assert code == 2 and "qk_nope_head_dim 32" in err and "does not run on a GPU" in err


def test_it_says_what_another_architecture_runs(folder: Path, check: Check) -> None:
    code, out, _ = check("--gpu", "sm_100", "--memory-gib", "80")
    assert code == 0 and "kernels sm_100: compiles, never run or timed" in out
    assert "FP8 products: plain Triton BF16 products: cuBLAS, plain Triton attention, experts: plain Triton" in out
    code, out, _ = check("--gpu", "sm_90")
    assert code == 0 and "sm_90: run and timed FP8 products: cuBLASLt, Gluon and plain Triton" in out
    code, out, err = check("--gpu", "sm_80", "precision=fp8")
    assert code == 2 and "FP8 products: emulated" in out and "compute capability 8.0" in err
    code, out, _ = check("--gpu", "sm_120", "precision=bf16")
    assert code == 0 and "never compiled" in out and "FP8 products" not in out
    assert check("--gpu", "sm_70")[0] == 2


TALKS = """
from octetrl.environments.tools.definition import tool
from octetrl.environments.turns import reward
from octetrl.records import Task
@tool
def look(where: str) -> str: ...
class Agent:
    tasks = (Task("1", "a"),)
    tools = (look,)
    def reply(self, conversation): ...
    @reward(weight=0.5)
    def nice(self, conversation): ...
    @reward
    def right(self, conversation): ...
class Free(Agent):
    right = nice = None
class Broken(Agent):
    tools = ("look",)
"""


def test_an_environment_of_several_turns(rehearsed: Path, check: Check) -> None:
    (rehearsed / "talks_to_check.py").write_text(TALKS)
    python = ("environment.kind=python", "environment.dataset=talks_to_check:Agent")
    code, _, err = check(*python)
    assert code == 2 and "it has tools (look), and the tokenizer's chat template has none" in err
    save_tokenizer(["look where"], rehearsed / "model", chat_template=TOOL_TEMPLATE)
    write_config(rehearsed, max_position_embeddings=4096)
    code, out, err = check(*python)
    assert (code, err) == (0, "") and "turns at most 16, rewarded by 0.5 x nice + 1 x right, tools look" in out
    for name, problem in (("Free", "has no score"), ("Broken", "'look' is a str, not a tool")):
        code, _, err = check(*python, f"environment.dataset=talks_to_check:{name}")
        assert code == 2 and problem in err and err.count("\n") == 1


def test_a_task_that_no_reward_process_can_have(rehearsed: Path, check: Check) -> None:
    (rehearsed / "unsendable_to_check.py").write_text(
        "from octetrl.records import Task\n"
        "class Sums:\n"
        "    tasks = [Task('one', '1 + 1', metadata={'rule': lambda text: 1.0})]\n"
        "    def score(self, task, text): ...\n"
    )
    code, _, err = check("environment.kind=python", "environment.dataset=unsendable_to_check:Sums")
    assert code == 2 and "task 'one' can't be sent to a reward process: metadata['rule']" in err
    assert err.count("\n") == 1


def test_a_critic_and_a_reward_model_are_looked_at(folder: Path, check: Check) -> None:
    code, out, _ = check("algorithm.name=ppo")
    assert code == 0 and "critic" in out and "weights, FP8 copies, gradients; two moments, float32" in out
    code, _, err = check("algorithm.name=ppo", "critic.path=nowhere")
    assert code == 2 and "critic.path: model folder 'nowhere' does not exist" in err
    code, _, err = check("environment.reward_model=model")
    assert code == 2 and "environment.reward_model: 'model' holds a Qwen3ForCausalLM, no reward model" in err


def test_a_model_without_qk_norm_keeps_k_in_bf16(folder: Path, check: Check) -> None:
    write_config(folder, architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=4096)
    code, out, _ = check()
    assert code == 0
    assert "K bf16, V fp8" in out
    assert "K stays BF16" in out


def test_k_or_v_alone_in_fp8(folder: Path, check: Check) -> None:
    """Both leave 3 bytes of 4; a model whose K stays BF16 has no K to choose."""
    code, out, _ = check("precision=fp8_full", "fp8.kv_cache_tensors=k")
    assert code == 0 and "K fp8, V bf16" in out and "V stays BF16: fp8.kv_cache_tensors is k" in out
    code, out, _ = check("precision=fp8_full", "fp8.kv_cache_tensors=v")
    assert code == 0 and "K bf16, V fp8" in out and "K stays BF16: fp8.kv_cache_tensors is v" in out
    write_config(folder, architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=4096)
    code, _, err = check("precision=fp8_full", "fp8.kv_cache_tensors=k")
    assert code == 2 and "'k' would leave nothing in FP8, because K stays BF16" in err and "use 'both'" in err
    code, out, _ = check("precision=fp8_full", "fp8.kv_cache_tensors=v")
    assert code == 0 and "K bf16, V fp8" in out


def test_an_output_folder_that_holds_a_run_is_said_and_none_is_made(folder: Path, check: Check) -> None:
    (folder / "held").mkdir()
    (folder / "held/config.yaml").touch()
    code, out, _ = check("output_dir=held")
    assert code == 0 and "held already holds a run; only --resume continues it" in out
    check("output_dir=new/run")
    assert not (folder / "new").exists()


A100 = "8.0, 81920, NVIDIA A100-SXM4-80GB"
ANSWERS = (
    (A100, ("NVIDIA A100-SXM4-80GB, 80.0 GiB", 80 << 30, (8, 0))),
    ("9.0, 143771, NVIDIA H200, odd", ("NVIDIA H200, odd, 140.4 GiB", 143771 << 20, (9, 0))),
    ("No devices were found", None),
    ("8.0, [N/A], A GPU", None),
    ("[N/A], 81920, A GPU", None),
)


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
def test_a_gpu_is_what_nvidia_smi_says(
    answer: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    device = find_device(recipe_with(), None)
    if expected is None:
        assert not device.on_gpu
    else:
        assert device.on_gpu and (device.name, device.num_bytes, device.capability) == expected


def test_fp8_on_a_gpu_that_has_none() -> None:
    a100 = Device("A100, 80.0 GiB", True, 80 << 30, capability=(8, 0))
    (text,) = missing_fp8(recipe_with(("precision", "fp8")), a100)
    assert text == (
        "fp8: A100, 80.0 GiB, has no block-scaled FP8 GEMM (compute capability 8.0, and a Hopper GPU has 9.0); use"
        " precision=bf16, or fp8.emulate=true for its numbers without its speed"
    )
    (of_vllm,) = missing_fp8(recipe_with(("precision", "fp8_rollout"), ("engine.backend", "vllm")), a100)
    assert of_vllm.endswith("use precision=bf16"), "vLLM does not emulate"
    for recipe, device in (
        (recipe_with(("precision", "bf16")), a100),
        (recipe_with(("precision", "fp8"), ("fp8.emulate", True)), a100),
        (recipe_with(("precision", "fp8"), ("cluster.address", "host:6379")), a100),
        (recipe_with(("precision", "fp8")), Device("H100", True, 80 << 30, capability=(9, 0))),
        (recipe_with(("precision", "fp8")), Device("a GPU", True, 80 << 30)),
        (recipe_with(("precision", "fp8")), Device("CPU", False, 80 << 30)),
    ):
        assert missing_fp8(recipe, device) == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_a_calibrated_cache_of_vllm_needs_hopper(capability: tuple[int, int]) -> None:
    """On others vLLM chooses an attention that may keep old scales."""
    vllm, cache = ("engine.backend", "vllm"), ("fp8.kv_cache", "calibrated")
    other = Device("A GPU, 80.0 GiB", True, 80 << 30, capability=capability)
    (text,) = missing_fp8(recipe_with(("precision", "bf16"), vllm, cache), other)
    assert text == (
        "fp8.kv_cache: calibrated with engine.backend: vllm needs a Hopper GPU (compute capability 9.0), and A GPU,"
        f" 80.0 GiB, has {capability[0]}.{capability[1]}; elsewhere vLLM's attention may keep old scales; use none, or"
        " engine.backend:"
        " octetrl"
    )
    hopper = Device("H100", True, 80 << 30, capability=(9, 0))
    assert missing_fp8(recipe_with(("precision", "bf16"), vllm, cache), hopper) == []
    assert missing_fp8(recipe_with(("precision", "bf16"), vllm), other) == []
    assert missing_fp8(recipe_with(("precision", "bf16"), cache), other) == []


@pytest.mark.parametrize(
    ("model", "assumed"),
    [("models/Qwen3-8B", "qwen3-8b"), ("models/Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("models/Mine", None)],
)
def test_memory_before_the_model_is_downloaded(
    model: str, assumed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    there = ["check", "grpo_math_qwen3-8b_1gpu_fp8-full", "--memory-gib", "80", "model.init=random"]
    assert run_command([*there, f"model.path={model}"]) == 2
    out, err = capsys.readouterr()
    assert f"'{model}'" in err
    assert ("memory: it needs" in err) == ("KV cache" in out) == (assumed is not None)
    if assumed is not None:
        Path(model).mkdir(parents=True)
        (Path(model) / "config.json").write_text(json.dumps(preset_config(assumed)))
        run_command([*there, f"model.path={model}"])
        sections = [
            text[text.index("  parameters") : text.index("rehearsal")] for text in (out, capsys.readouterr().out)
        ]
        assert sections[0] == sections[1] and f"not there; the shape of the preset {assumed} is assumed" in out


PUBLISHED = {  # recipes of models that a method is known for, and where their weights are expected
    "llama-3.1-8b": "Llama-3.1-8B-Instruct",
    "moonlight-16b-a3b": "Moonlight-16B-A3B-Instruct",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-8b-base": "Qwen3-8B-Base",
}


@pytest.mark.parametrize("gpus", [1, 8])
@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_of_published_models_have_no_problem(
    name: str, gpus: int, rehearsed: Path, request: pytest.FixtureRequest
) -> None:
    """With the published shape, a small tokenizer and random weights, on GPUs of 141 GB. The rehearsal, the same for
    all of them, is one recipe's."""
    if (name, gpus) != ("llama-3.1-8b", 1):
        request.getfixturevalue("unrehearsed")
    folder = rehearsed / "models" / PUBLISHED[name]
    shutil.copytree(rehearsed / "model", folder)
    (folder / "config.json").write_text(json.dumps(preset_config(name.removesuffix("-base"))))
    (rehearsed / "data").mkdir()
    rows = (json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) for n in range(600))
    (rehearsed / "data/math_problems.jsonl").write_text("\n".join(rows))
    recipe = f"grpo_math_{name}_{gpus}gpu_fp8-full"
    assert run_command(["check", recipe, "--memory-gib", "131", "model.init=random"]) == 0


OF_WEIGHTS = """
model: {path: model}
environment: {kind: jsonl, dataset: tasks.jsonl}
cluster: {device: cpu}
"""
NORM, UP = "model.norm.weight", "model.layers.3.mlp.up_proj.weight"

Headers = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def headers(folder: Path, *, scalar: bool = False) -> Headers:
    return {piece.name: ("BF16", piece.shape) for piece in pieces(load_spec(folder, scalar=scalar), scalar=scalar)}


def write(file: Path, tensors: Headers) -> None:
    """A safetensors file of these headers, its tensors a hole: nobody may read them."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * 2
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        stream.truncate(stream.tell() + end)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder beside a recipe, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(OF_WEIGHTS)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    folder = tmp_path / "model"
    save_tokenizer(["a b"], folder)
    (folder / "config.json").write_text(json.dumps(preset_config("tiny") | {"max_position_embeddings": 4096}))
    write(folder / SINGLE, headers(folder))
    return folder


def recipe(*overrides: str) -> Recipe:
    return load_recipe("r.yaml", list(overrides))


def the_problem(*overrides: str) -> str:
    (problem,) = file_problems(recipe(*overrides), load_spec("model"))
    assert "\n" not in problem
    return problem


def test_a_tensor_that_is_missing_is_named(model: Path) -> None:
    assert not list(file_problems(recipe(), load_spec("model")))
    tensors = headers(model)
    del tensors[NORM]
    write(model / SINGLE, tensors)
    assert f"1 missing: {NORM}" in the_problem()
    assert not list(file_problems(recipe("model.init=random"), load_spec("model")))
    (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:1000])
    assert f"{SINGLE} can't be read as safetensors" in the_problem()
    (model / SINGLE).unlink()
    assert "has neither model.safetensors nor" in the_problem()


def test_every_model_of_the_run_is_looked_at(model: Path) -> None:
    def folder(name: str, architecture: str, tensors: Headers) -> None:
        (model.parent / name).mkdir()
        config = json.loads((model / "config.json").read_text()) | {"architectures": [architecture]}
        (model.parent / name / "config.json").write_text(json.dumps(config))
        write(model.parent / name / SINGLE, tensors)

    causal, scalar = headers(model), headers(model, scalar=True)
    del causal[UP]
    folder("causal", "Qwen3ForCausalLM", causal)
    folder("headless", "Qwen3ForSequenceClassification", {name: scalar[name] for name in scalar if name != SCORE})
    ppo = "algorithm.name=ppo"
    assert not list(file_problems(recipe(ppo, "critic.path=headless"), load_spec("model")))  # its head begins at zero
    assert the_problem(ppo, "critic.path=causal").startswith("critic.path: 'causal' does not hold")
    judged = the_problem("environment.reward_model=headless")
    assert judged.startswith("environment.reward_model: 'headless'") and f"1 missing: {SCORE}" in judged
    taught = the_problem("algorithm.name=distill", "algorithm.teacher=causal")
    assert taught.startswith("algorithm.teacher: 'causal'") and f"1 missing: {UP}" in taught
