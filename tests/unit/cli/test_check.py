from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from octetrl.models.families import spec_from_config
from octetrl.run.tiny_model import TOOL_TEMPLATE, save_tokenizer
from octetrl.shapes.presets import preset_config
from tests.unit.cli.conftest import Check

RECIPE = """
precision: fp8_full
model: {path: model, init: random}
environment: {kind: jsonl, dataset: tasks.jsonl, eval_size: 0}
cluster: {device: cpu}
"""


@pytest.fixture
def rehearsed(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe, the config.json of a tiny model with a tokenizer, and a file of tasks, in the working directory.
    The model has no weights: `test_check_weights.py` looks at those."""
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


TALKS = """
from octetrl.environments.tools import tool
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
