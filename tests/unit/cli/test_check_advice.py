"""What `octetrl check` advises is never refused by `octetrl check`, and "no smaller setting makes it fit" is true."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octetrl.shapes.presets import preset_config
from tests.unit.cli.conftest import Check
from tests.unit.cli.test_fitting import ways

RECIPE = """
precision: fp8_full
model: {path: model, init: random}
environment: {kind: jsonl, dataset: tasks.jsonl, eval_size: 0}
"""
SMALL = (
    "trainer.optimizer.states=8bit",
    "trainer.optimizer.master=stochastic_rounding",
    "trainer.tokens_per_micro_batch=2048",
    "trainer.logprob_chunk=256",
)
OFFLOADED = (*SMALL, "cluster.gradients=sharded", "trainer.optimizer.offload=true")
VLLM = "engine.backend=vllm"
AHEAD = ("cluster.trainer_gpus=8", "cluster.engine_gpus=1", "cluster.max_staleness=1")


@pytest.fixture(autouse=True)
def folder(unrehearsed: None, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with Qwen3-8B's shape, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    shutil.copytree(tokenizer, tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(preset_config("qwen3-8b")))
    return tmp_path


def advice(check: Check, *arguments: str) -> tuple[str, list[list[str]]]:
    """The problem of a recipe that does not fit, and its ways out, each of which `check` has accepted."""
    code, _, text = check(*arguments)
    assert code == 1 and text.count("\n") == 1, text
    text = text.strip()
    found = ways(text) if "it fits with" in text else []
    for changes in found:
        code, _, refused = check(*arguments, *changes)
        assert code == 0, (changes, refused)
    return text, found


@pytest.mark.parametrize("workers", [("cluster.trainer_gpus=2", "cluster.engine_gpus=1"), ("cluster.gpus=2",)])
def test_several_workers_are_not_told_to_remake_codes(workers: tuple[str, ...], check: Check) -> None:
    """Each has only some rows of the weights, so `remade` is refused, although the memory would be enough."""
    given = ("--memory-gib", "40", *workers, *OFFLOADED)
    text, found = advice(check, *given)
    assert found and "weight_codes" not in text
    assert check(*given, "trainer.weight_codes=remade")[0] == 2
    teacher = ("algorithm.name=distill", "algorithm.teacher=model", "algorithm.teacher_precision=fp8")
    code, _, text = check("--memory-gib", "49", *workers, *OFFLOADED, *teacher)
    assert code == 2 and "algorithm.teacher: 'model' has neither model.safetensors" in text, "that alone is refused"
    assert "it fits with trainer.gradients=bfloat16" in text and "weight_codes" not in text


def test_remade_codes_end_with_more_gpus(check: Check) -> None:
    text, found = advice(check, "--memory-gib", "50", "trainer.weight_codes=remade")
    assert ["cluster.gradients=sharded", "cluster.gpus=8", "trainer.weight_codes=kept"] in found, text
    _, out, _ = check("--memory-gib", "50", "trainer.weight_codes=remade")
    assert "more than 1 with trainer.weight_codes=kept" in out
    both = [out.split("each of N GPUs 1: ")[1].split(" GiB")[0].partition(", ")]
    _, kept, _ = check("--memory-gib", "50")
    both.append(kept.split("each of N GPUs 1: ")[1].split(" GiB")[0].partition(", "))
    (alone, _, several), (alone_kept, _, several_kept) = both
    assert several == several_kept and float(alone) < float(alone_kept)


def test_a_second_buffer_that_auto_would_take_can_be_left_out(check: Check) -> None:
    """vLLM's `auto` is always a second buffer; here its memory is missing in the cache."""
    _, found = advice(check, "--memory-gib", "30", *AHEAD, *OFFLOADED, VLLM)
    assert ["cluster.weight_buffer=single"] in found


def test_adapters_are_named_only_where_they_fit(check: Check) -> None:
    text, found = advice(check, "--memory-gib", "20")
    assert "no smaller setting makes it fit while all weights are trained; it fits with model.lora={}" in text
    assert found and all(changes[0] == "model.lora={}" for changes in found)
    none = "no smaller setting makes it fit; use a smaller model, or a device with more memory"
    for refused in ((VLLM, "cluster.gpus=8"), ("algorithm.name=ppo",), ("model.lora={}",)):
        text, found = advice(check, "--memory-gib", "8" if "model.lora={}" in refused else "24", *refused)
        assert text.endswith(none) and "model.lora" not in text and not found, "PPO's critic is trained in full"
    text, found = advice(check, "--memory-gib", "40", "algorithm.name=ppo")
    assert found[0][0] == "model.lora={}" and "cluster.gpus=8" in found[0]


def test_gradients_and_trainers_are_settings_too(check: Check) -> None:
    roles = ("cluster.trainer_gpus=2", "cluster.engine_gpus=1")
    _, found = advice(check, "--memory-gib", "40", *roles, *OFFLOADED)
    assert found == [["trainer.gradients=bfloat16"], ["cluster.trainer_gpus=4"]]
    _, found = advice(check, "--memory-gib", "52", "cluster.gpus=4", *SMALL)
    assert ["cluster.gradients=sharded"] in found


def test_the_memory_left_to_vllm_holds_a_context(check: Check) -> None:
    """It has 10,880 tokens, five times the longest rollout."""
    long = ("--memory-gib", "72", VLLM, "model.context_length=40960", *SMALL, "trainer.optimizer.offload=true")
    text, found = advice(check, *long)
    what = "leave room for 10,880 tokens of the KV cache, less than model.context_length 40,960, without which vLLM"
    assert what in text and ["model.context_length=10240"] in found


def test_one_worker_above_a_device_that_several_share(check: Check) -> None:
    shared = ("cluster.workers_per_gpu=2", "cluster.trainer_gpus=1", "cluster.engine_gpus=1", *SMALL[:2])
    text, found = advice(check, "--memory-gib", "80", *shared)
    said = (
        "memory: 2 workers share the device, and a worker that trains needs 83.70 GiB of 80.00 GiB; in even shares it"
    )
    assert said in text
    assert found and all("cluster.workers_per_gpu=1" in changes for changes in found)
    assert check("--memory-gib", "84", *shared)[0] == 0, "what two need together is not known"


def test_the_memory_of_this_machine_says_nothing_about_runs_on_gpus(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octetrl.cli.check_machine._first_gpu", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 17 if name == "SC_PHYS_PAGES" else 1 << 16)  # 8 GiB
    for on_gpus, problem in ((VLLM, "engine.backend: vllm needs an NVIDIA GPU"), ("cluster.gpus=2", "cluster.gpus: 2")):
        code, out, text = check(on_gpus)
        assert code == 2 and problem in text and text.count("\n") == 1 and "memory:" not in text
        assert "a GPU, and this machine has none" in out and "of 8.00 GiB" not in out
    code, out, _ = check("cluster.gpus=2", "cluster.address=head:6379")
    assert code == 0 and "of 8.00 GiB" not in out
    code, _, text = check()
    assert code == 1 and "of 8.00 GiB; no smaller setting" in text and "(--memory-gib 80 plans for a GPU" in text
    code, _, text = check("cluster.trainer_cpus=1", "cluster.engine_cpus=1")
    assert code == 1 and "GiB of 8.00 GiB; no smaller setting makes it fit in even shares" in text
    assert check("cluster.cpus=2", "cluster.address=head:6379")[0] == 0
