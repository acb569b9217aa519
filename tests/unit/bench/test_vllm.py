"""`octetrl bench rollout --backend vllm`: our requests, a fresh process for each turn, rows that the picture reads."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.picture import VLLM, draw
from octetrl.backends.vllm.measure import AskedRequest, Measured
from octetrl.bench.model import find_model
from octetrl.bench.rollout import Bench
from octetrl.bench.vllm import VllmTurn, asked_of, measure_beside, precision_in_vllm, vllm_rows
from octetrl.bench.workload import Shape, Workload, fixed_lengths, lognormal_lengths
from octetrl.cli.bench_vllm import backends_of, measure_backends
from octetrl.cli.main import run_command
from octetrl.system.errors import RunFailed, UserError

WORKLOAD = fixed_lengths(Shape(256, 8, 4), 8, 300, seed=1)
BENCH = Bench(find_model("tiny"), ("bf16", "fp8_full"), (WORKLOAD,), torch.device("cpu"), rounds=2, warmup_tokens=2)


def test_vllm_gets_our_requests(tmp_path: Path) -> None:
    asked = asked_of(BENCH, "fp8_full", WORKLOAD, tmp_path)
    assert asked.kv_cache_dtype == "fp8_e4m3" and asked.context_length == 12 and len(asked.requests) == 32
    for theirs, ours in zip(asked.requests, WORKLOAD.requests, strict=True):
        assert theirs == AskedRequest(list(ours.prompt_token_ids), 4, 8, ours.seed, ours.sampling.temperature)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert asked_of(BENCH, "fp8_rollout", WORKLOAD, tmp_path).kv_cache_dtype == "auto"
    assert asked_of(BENCH, "bf16", WORKLOAD, tmp_path).kv_cache_dtype == "auto"
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_siblings_of_different_lengths(tmp_path: Path) -> None:
    workload = lognormal_lengths(Shape(8, 8, 16), 4, 300, 1, sigma=0.5, max_positions=200)
    asked = asked_of(BENCH, "bf16", workload, tmp_path)
    assert [(len(one.prompt), one.answer) for one in asked.requests] == workload.siblings
    assert {one.siblings for one in asked.requests} == {1} and len({one.seed for one in asked.requests[:4]}) == 4


def test_each_turn_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> Any:
        commands.append(command)
        asked = json.loads(Path(command[-2]).read_text())
        seconds = 2.0 if asked["kv_cache_dtype"] == "auto" else 1.0
        Path(command[-1]).write_text(json.dumps(vars_of(Measured(9.0, 0.1, seconds, 1024, 4096))))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("octetrl.bench.vllm.subprocess.run", run)
    turns = measure_beside(BENCH, ("vllm",))
    assert [turn.precision for turn in turns] == ["bf16", "fp8_full", "fp8_full", "bf16"] and len(commands) == 4
    rows = vllm_rows([turn for turn in turns if isinstance(turn, VllmTurn)])
    assert [(row["precision"], row["rollout/tokens_per_second"]) for row in rows] == [
        ("bf16", 512.0),
        ("fp8_kv", 1024.0),
    ]
    assert rows[0]["rounds"] == 2 and rows[0]["rollout/max_batch"] == 256

    monkeypatch.setattr("octetrl.bench.vllm.subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 3))
    with pytest.raises(RunFailed, match=r"bench: vLLM's process for bf16 at 256x8\+4 ended with code 3; its messages"):
        measure_beside(BENCH, ("vllm",))


def test_our_process_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Dead:
            return self

        def __exit__(self, *_: object) -> None: ...

        def submit(self, *_: Any) -> Any:
            raise BrokenProcessPool

    monkeypatch.setattr("octetrl.bench.vllm.ProcessPoolExecutor", Dead)
    with pytest.raises(RunFailed, match=r"bench: the process for bf16 at 256x8\+4 died"):
        measure_beside(BENCH, ("octetrl",))


def test_a_turn_that_fails_leaves_the_results_of_those_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def turn(_: Bench, precision: str, workload: Workload) -> VllmTurn:
        if precision != "bf16":
            raise RuntimeError("out of time")
        return VllmTurn(precision, workload, 256, Measured(9.0, 0.1, 2.0, 1024, 4096))

    monkeypatch.setattr("octetrl.bench.vllm.vllm_turn", turn)
    with pytest.raises(RuntimeError, match="out of time"):
        measure_backends(BENCH, ("vllm",), tmp_path, "tiny")
    (row,) = json.loads((tmp_path / "vllm_tiny.json").read_text())["rows"]
    assert row["precision"] == "bf16" and row["rollout/tokens_per_second"] == 512


def vars_of(measured: Measured) -> dict[str, Any]:
    return {name: getattr(measured, name) for name in Measured.__dataclass_fields__}


def test_the_picture_reads_the_rows(tmp_path: Path) -> None:
    workload = replace(WORKLOAD, name="256x512+1024")
    (row,) = vllm_rows([VllmTurn("fp8_full", workload, 256, Measured(9.0, 0.1, 1.0, 16_838, 4096))])
    ours = {"precision": "bf16", "workload": "256x512+1024", "rollout/tokens_per_second": 17_000.0}
    (tmp_path / "rollout_qwen3-8b.json").write_text(json.dumps({"rows": [ours]}))
    (tmp_path / f"{VLLM}.json").write_text(json.dumps({"rows": [row]}))
    svg = draw(tmp_path)
    assert "vLLM fp8_kv" in svg and "16,838" in svg


def test_options() -> None:
    nothing: dict[str, Any] = {"warmup": None, "hints": False}
    assert backends_of("octetrl", on_gpu=False, refused=True, **nothing) == ("octetrl",)
    assert [precision_in_vllm(name) for name in ("bf16", "fp8_rollout", "fp8", "fp8_full")] == [
        *("bf16", "fp8", "fp8", "fp8_kv"),
    ]
    for text, on_gpu, refused, expected in (
        ("sglang", True, False, "is not octetrl, vllm or octetrl,vllm"),
        ("vllm,vllm", True, False, "is not octetrl, vllm or octetrl,vllm"),
        ("vllm", True, True, "vLLM has no --profile"),
        ("octetrl,vllm", False, False, "vLLM needs an NVIDIA GPU"),
    ):
        with pytest.raises(UserError, match=expected):
            backends_of(text, on_gpu=on_gpu, refused=refused, **nothing)


@pytest.mark.parametrize("words", [["--warmup", "8"], ["--hints", "--lengths", "lognormal"]])
def test_an_option_without_effect_on_vllm_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "rollout", "--backend", "vllm", *words]) == 2
    error = capsys.readouterr().err
    assert f"{words[0]}: it has no effect with --backend vllm" in error and error.count("\n") == 1
    assert run_command(["bench", "rollout", "--backend", "octetrl,vllm", *words]) == 2
    assert "vLLM needs an NVIDIA GPU" in capsys.readouterr().err, "ours has it"
