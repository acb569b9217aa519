"""The device of this machine as nvidia-smi describes it, and FP8 on a GPU that has none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from octetrl.cli.check_machine import Device, find_device, missing_fp8
from octetrl.cli.main import run_command
from octetrl.shapes.presets import preset_config
from tests.unit.config.test_validate import recipe_with

A100 = "8.0, 81920, NVIDIA A100-SXM4-80GB"
ANSWERS = (
    (A100, ("NVIDIA A100-SXM4-80GB, 80.0 GiB", 80 << 30, "8.0")),
    ("9.0, 143771, NVIDIA H200, odd", ("NVIDIA H200, odd, 140.4 GiB", 143771 << 20, "9.0")),
    ("No devices were found", None),
    ("8.0, [N/A], A GPU", None),
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
    a100 = Device("A100, 80.0 GiB", True, 80 << 30, capability="8.0")
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
        (recipe_with(("precision", "fp8")), Device("H100", True, 80 << 30, capability="9.0")),
        (recipe_with(("precision", "fp8")), Device("a GPU", True, 80 << 30)),
        (recipe_with(("precision", "fp8")), Device("CPU", False, 80 << 30)),
    ):
        assert missing_fp8(recipe, device) == []


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0"])
def test_a_calibrated_cache_of_vllm_needs_hopper(capability: str) -> None:
    """On others vLLM chooses an attention that may keep old scales."""
    vllm, cache = ("engine.backend", "vllm"), ("fp8.kv_cache", "calibrated")
    other = Device("A GPU, 80.0 GiB", True, 80 << 30, capability=capability)
    (text,) = missing_fp8(recipe_with(("precision", "bf16"), vllm, cache), other)
    assert text == (
        "fp8.kv_cache: calibrated with engine.backend: vllm needs a Hopper GPU (compute capability 9.0), and A GPU,"
        f" 80.0 GiB, has {capability}; elsewhere vLLM's attention may keep old scales; use none, or engine.backend:"
        " octetrl"
    )
    hopper = Device("H100", True, 80 << 30, capability="9.0")
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
