"""`octetrl bench train` and `bench step` on a CPU: table, file; a wrong input: one line, exit code 2, no file."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.cli.main import run_command

Capture = pytest.CaptureFixture[str]
SMALL_TRAIN = ("--tokens", "48", "--lengths", "6-20", "--steps", "1", "--rounds", "1")


def bench(verb: str, out: Path, capsys: Capture, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a run prints, and the file it writes. Of one layer, if `arguments` say nothing else."""
    capsys.readouterr()
    layers = () if "--layers" in arguments else ("--layers", "1")
    code = run_command(["bench", verb, "--device", "cpu", "--out", str(out), *layers, *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    (path,) = out.glob("*.json")
    assert str(path) in captured.out
    return captured.out, json.loads(path.read_text())


def test_training_is_measured_beside_bf16(tmp_path: Path, capsys: Capture) -> None:
    text, record = bench("train", tmp_path / "new", capsys, *SMALL_TRAIN, "--layers", "2", "--rounds", "2")
    said = [line.split("  ")[1].split(":")[0] for line in text.splitlines() if line.startswith("round ")]
    assert said == ["bf16", "fp8", "fp8", "bf16"]
    assert (tmp_path / "new" / "train_tiny_2_layers.json").is_file() and record["bench"] == "train"
    plain, fp8 = record["rows"]
    assert plain["train/speedup_over_bf16"] == 1 and fp8["train/layers"] == 2
    assert fp8["train/tokens"] == 96 and fp8["workload"] == "2x48 of 6-20"
    assert record["parts"] == record["kernels"] == [], "times of kernels are for a GPU"
    assert "…" not in text


@pytest.mark.parametrize("mode", ["none", "attention", "layer"])
def test_checkpointing_and_the_optimizer_are_the_recipes(mode: str, tmp_path: Path, capsys: Capture) -> None:
    chosen = ("--checkpointing", mode, "--optimizer-states", "float32", "--master", "float32")
    chosen += ("--gradient-sums", "bfloat16")
    _, record = bench("train", tmp_path, capsys, *SMALL_TRAIN, "--precision", "fp8", *chosen)
    (row,) = record["rows"]
    assert (row["train/checkpointing"], row["train/checkpointed_layers"]) == (mode, 0 if mode == "none" else 1)
    assert (row["train/optimizer_states"], row["train/master"]) == ("float32", "float32")
    assert row["train/gradient_sums"] == "bfloat16"
    _, narrow = bench("train", tmp_path, capsys, *SMALL_TRAIN, "--precision", "fp8")
    (usual,) = narrow["rows"]
    assert (usual["train/optimizer_states"], usual["train/master"]) == ("8bit", "stochastic_rounding")
    assert usual["memory/estimate_gb"] < row["memory/estimate_gb"]


def test_codes_that_are_remade_give_the_same_numbers(tmp_path: Path, capsys: Capture) -> None:
    rows = {}
    for codes in ("kept", "remade"):
        _, record = bench("train", tmp_path, capsys, *SMALL_TRAIN, "--precision", "fp8", "--weight-codes", codes)
        (rows[codes],) = record["rows"]
        assert rows[codes]["train/weight_codes"] == codes
    assert rows["kept"]["train/loss"] == rows["remade"]["train/loss"]


def test_some_layers_are_checkpointed_and_the_file_has_a_name(tmp_path: Path, capsys: Capture) -> None:
    chosen = ("--layers", "4", "--checkpointing", "attention:3", "--name", "three-of.4", "--precision", "bf16")
    _, record = bench("train", tmp_path, capsys, *SMALL_TRAIN, *chosen)
    assert record["rows"][0]["train/checkpointed_layers"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["train_tiny_three-of.4.json"]


def test_lognormal_lengths_without_an_optimizer(tmp_path: Path, capsys: Capture) -> None:
    lengths = ("--tokens", "64", "--lengths", "lognormal", "--mean", "12", "--sigma", "1", "--no-optimizer")
    _, record = bench("train", tmp_path, capsys, *lengths, "--precision", "bf16", "--steps", "1", "--rounds", "1")
    assert record["rows"][0]["workload"] == "2x64 of lognormal 12 1"
    assert "train/optimizer_ms" not in record["rows"][0]


def test_the_whole_step_by_phase(tmp_path: Path, capsys: Capture) -> None:
    text, record = bench("step", tmp_path, capsys, "--precision", "bf16,fp8_full", "--calibration", "fused,off")
    assert record["bench"] == "step" and (tmp_path / "step_tiny_1_layers.json").is_file()
    for row in record["rows"]:
        shares = [row[f"step/{phase}_share"] for phase in ("produce", "learn", "publish")]
        assert sum(shares) == pytest.approx(1) and row["mismatch/token_mult_prob_error"] == 1.0
    assert [row["calibration"] for row in record["calibration"]] == ["fused", "off"]
    assert "extrapolated" not in text


def test_a_step_has_its_own_file(tmp_path: Path, capsys: Capture) -> None:
    short = ("--precision", "bf16", "--warmup", "0", "--name", "both")
    _, record = bench("step", tmp_path, capsys, *short, "--lengths", "lognormal", "--sigma", "0.4")
    assert [row["workload"] for row in record["rows"]] == ["4x8+8 lognormal 0.4 grouped"]
    assert {row["mismatch/token_mult_prob_error"] for row in record["rows"]} == {1}
    assert [path.name for path in tmp_path.iterdir()] == ["step_tiny_1_layers_both.json"]


@pytest.mark.parametrize("verb", ["train", "step"])
def test_on_a_gpu_what_does_not_fit_is_refused_and_the_defaults_do(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """An H200 in name alone: up to where something would be made."""
    planned: list[Any] = []

    def measured(plan: Any, on_turn: object) -> list[Any]:
        planned.append(plan)
        return []

    monkeypatch.setattr(f"octetrl.cli.bench_{verb}.device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(f"octetrl.bench.{verb}.measure", measured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 150_700_000_000))
    wide = ["--optimizer-states", "float32", "--master", "float32"]
    out = tmp_path / "results"
    assert run_command(["bench", verb, "--out", str(out), *wide]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and not out.exists() and not planned
    assert "--precision: bf16 takes about 158 GB and the GPU has 151; take --optimizer-states 8bit" in error
    assert run_command(["bench", verb, "--out", str(out)]) == 0
    (plan,) = planned
    assert plan.model.name == "qwen3-8b" and plan.trainer.tokens_per_micro_batch == 16_384
    optimizer = plan.trainer.optimizer
    assert (optimizer.states, optimizer.master) == ("8bit", "stochastic_rounding")
    assert run_command(["bench", verb, "--out", str(out), *wide, "--layers", "4"]) == 0


def test_a_step_extrapolated_from_a_share_says_so(tmp_path: Path, capsys: Capture) -> None:
    short = ("--precision", "fp8_full", "--learn-share", "0.5", "--calibration", "none", "--warmup", "0")
    text, record = bench("step", tmp_path, capsys, *short)
    assert "learning time extrapolated from 50% of the groups" in text and record["calibration"] == []
    assert record["rows"][0]["step/learnt_groups_share"] == 0.5


WRONG = [
    ("train", ["--model", "qwen3-8"], "--model: 'qwen3-8' is neither a folder nor one of the presets"),
    ("train", ["--precision", "bf16,fp9"], "--precision: 'fp9' is not one of"),
    ("train", ["--precision", "fp8,fp8"], "names a value twice"),
    ("train", ["--lengths", "log-normal"], "--lengths: 'log-normal' is no length"),
    ("train", ["--lengths", "30-10"], "--lengths: '30-10' is no length"),
    ("train", ["--lengths", "1-10"], "give at least 2"),
    ("train", ["--lengths", "100", "--tokens", "64"], "--lengths: 100 tokens do not fit a micro-batch of 64"),
    ("train", ["--lengths", "2000", "--tokens", "4000"], "tiny has 1024 positions"),
    ("train", ["--sigma", "0.5"], "--sigma: lengths are not drawn lognormally"),
    ("train", ["--mean", "9", "--lengths", "5"], "--mean: lengths are not drawn lognormally"),
    ("train", ["--checkpointing", "layers"], "--checkpointing: 'layers' is not one of none, attention, layer"),
    (
        "train",
        ["--checkpointing", "layer:99"],
        "--checkpointing: 'layer:99' is for 99 layers and tiny has 4; give 0 to 4",
    ),
    (
        "step",
        ["--checkpointing", "attention:3", "--layers", "2"],
        "is for 3 layers and tiny_2_layers has 2; give 0 to 2",
    ),
    ("train", ["--checkpointing", "none:3"], "--checkpointing: 'none:3' checkpoints nothing, in no layer; give none"),
    ("step", ["--checkpointing", "none:0"], "--checkpointing: 'none:0' checkpoints nothing"),
    ("train", ["--checkpointing", "layer:"], "--checkpointing: '' is not a number of layers; give one, as in layer:8"),
    ("train", ["--checkpointing", "layer:-1"], "--checkpointing: '-1' is not a number of layers"),
    ("train", ["--checkpointing", "layer:" + "9" * 5000], "--checkpointing: '99999999999999999999' is not a number"),
    ("train", ["--no-optimizer", "--gradient-sums", "bfloat16"], "--gradient-sums: with --no-optimizer gradients are"),
    ("step", ["--sigma", "0.5"], "--sigma: 0.5 spreads log-normal lengths; add --lengths lognormal"),
    ("step", ["--lengths", "lognormal", "--answer-tokens", "4-12"], "--answer-tokens: '4-12' is a span"),
    ("step", ["--gradient-sums", "bf16"], "--gradient-sums: 'bf16' is not one of float32, bfloat16"),
    ("train", ["--no-optimizer", "--offload"], "--offload: with --no-optimizer there is nothing to keep"),
    ("train", ["--name", "a/b"], "--name: 'a/b' cannot be part of a file name; give 1 to 64 letters, digits, '-', '_'"),
    ("train", ["--name", ".."], "--name: '..' cannot be part of a file name"),
    ("train", ["--name", ""], "--name: '' cannot be part of a file name"),
    ("step", ["--name", "a b"], "--name: 'a b' cannot be part of a file name"),
    ("step", ["--name", "é"], "--name: 'é' cannot be part of a file name"),
    ("step", ["--name", "n" * 65], f"--name: '{'n' * 60}' cannot be part of a file name"),
    ("train", ["--optimizer-states", "fp8"], "--optimizer-states: 'fp8' is not one of float32, bfloat16, 8bit"),
    ("train", ["--weight-codes", "none"], "--weight-codes: 'none' is not one of kept, remade"),
    ("train", ["--master", "bf16"], "--master: 'bf16' is not one of float32, stochastic_rounding"),
    ("train", ["--layers", "5"], "--layers: 5 were requested, but tiny has 4"),
    ("train", ["--trained-share", "1.5"], "--trained-share"),
    ("train", ["--tokens", "0"], "--tokens"),
    ("train", ["--profile"], "--profile: it times kernels on a GPU"),
    ("train", ["--out", "/dev/null/results"], "--out: cannot create the folder"),
    ("step", ["--answer-tokens", "8-4"], "--answer-tokens: '8-4' is no length"),
    ("step", ["--prompt-tokens", "1000", "--answer-tokens", "100"], "shorten --prompt-tokens or --answer-tokens"),
    ("step", ["--calibration", "fuse"], "--calibration: 'fuse' is not one of fused, off, exact"),
    ("step", ["--calibration", "off,off"], "--calibration: 'off,off' names a value twice; name each once"),
    ("step", ["--group", "1"], "--group"),
    ("step", ["--address", "auto"], "--address: it is for workers on Ray; add --gpus N or --cpus N"),
    ("step", ["--workers", "1"], "--workers: it is for workers on Ray; add --gpus N or --cpus N"),
    ("step", ["--cpus", "2", "--gpus", "2"], "--cpus: cannot be combined with --gpus; keep one of the two"),
    ("step", ["--gpus", "2"], "--device: cpu is not the device of --gpus; leave one of the two out"),
    ("step", ["--cpus", "2", "--gradients", "x"], "--gradients: 'x' is not one of local, sharded"),
    ("step", ["--cpus", "2", "--workers", "3"], "--workers: '3' is neither embedded nor a number from 1 to 2"),
    (
        "step",
        ["--cpus", "2", "--learn-share", "0.5"],
        "--learn-share: it is for the embedded worker alone; leave it out",
    ),
    (
        "step",
        ["--cpus", "2", "--calibration", "off"],
        "--calibration: it is for the embedded worker alone; leave it out",
    ),
    ("step", ["--cpus", "2", "--weight-codes", "remade"], "--weight-codes: remade needs whole weights"),
    ("step", ["--learn-share", "0"], "--learn-share"),
    ("step", ["--lora", "8:expert"], "--lora: '8:expert' is no rank; give 1 to 1,024, or for example 16:experts"),
    ("step", ["--lora", "0"], "--lora: '0' is no rank"),
    ("step", ["--lora", "8:experts"], "--lora: model.lora.experts: this model has no experts"),
    ("step", ["--lora", "8", "--weight-codes", "remade", "--precision", "fp8"], "so they cannot be 'remade'; use kept"),
    ("step", ["--roles", "1+1"], "--roles: it is for workers on Ray; add --gpus N or --cpus N, or leave it out"),
    ("step", ["--max-staleness", "2"], "--max-staleness: it is for roles on workers of their own; add --roles N+M"),
    ("step", ["--weights-in-flight", "off"], "--weights-in-flight: it is for roles on workers of their own"),
    ("step", ["--cpus", "2", "--roles", "2"], "--roles: '2' is not N+M, workers that train and workers that generate"),
    ("step", ["--cpus", "2", "--roles", "0+2"], "--roles: '0+2' is not N+M"),
    ("step", ["--cpus", "2", "--roles", "1+²"], "--roles: '1+²' is not N+M"),
    ("step", ["--cpus", "2", "--roles", "1+2"], "--roles: 1+2 are 3 workers, and --cpus is 2; all arms use the same"),
    ("step", ["--cpus", "2", "--roles", "1+1", "--workers", "2"], "--workers: --roles compares arms that use all"),
    ("step", ["--cpus", "2", "--roles", "1+1", "--max-staleness", "65"], "--max-staleness"),
    (
        "step",
        ["--cpus", "2", "--roles", "1+1", "--max-staleness", "0", "--weights-in-flight", "recompute_cache"],
        "--weights-in-flight: it needs batches that are generated ahead; give --max-staleness 1 or more",
    ),
    (
        "step",
        ["--cpus", "2", "--roles", "1+1", "--weights-in-flight", "on"],
        "--weights-in-flight: 'on' is not one of off, recompute_cache, keep_cache",
    ),
    (
        "step",
        ["--cpus", "2", "--roles", "1+1", "--weights-in-flight", "keep_cache"],
        "--weights-in-flight: fp8_full has a calibrated KV cache, which keep_cache recomputes; use recompute_cache",
    ),
    (
        "step",
        ["--cpus", "4", "--roles", "2+2", "--tensor-parallel", "2"],
        "--tensor-parallel: workers that only train or only generate have whole models so far; leave it out",
    ),
    (
        "step",
        ["--cpus", "2", "--roles", "1+1", "--learn-beside-tail", "--gradients", "sharded"],
        "--learn-beside-tail: --gradients: sharded adds",
    ),
    (
        "step",
        ["--cpus", "2", "--roles", "1+1", "--weight-codes", "remade"],
        "--weight-codes: remade needs whole weights",
    ),
    ("step", ["--cpus", "2", "--address", "foo"], "--address: 'foo' is not host:port, auto or local"),
    (
        "step",
        ["--cpus", "2", "--address", ""],
        "--address: '' is empty; give host:port, auto or local, or leave it out",
    ),
    ("train", ["--cpus", "2", "--address", " "], "--address: ' ' is empty"),
    ("step", ["--calibration", ""], "--calibration: '' is empty; give some of fused,off,exact, or none"),
    ("step", ["--out", ""], "--out: '' is empty; give a folder"),
    ("rollout", ["--out", ""], "--out: '' is empty; give a folder"),
    (
        "step",
        ["--cpus", "2", "--roles", "1+1", "--weights-in-flight", ""],
        "--weights-in-flight: '' is not one of off,",
    ),
    ("step", ["--steps", "99999999999"], "--steps: '99999999999' is out of range; it must be at most 1000000"),
    ("step", ["--cpus", "2", "--steps", "99999999999"], "--steps: '99999999999' is out of range"),
    ("step", ["--cpus", "2", "--roles", "1+1", "--steps", "1000000000"], "--steps: '1000000000' is out of range"),
    ("step", ["--group", "100001"], "--group: '100001' is out of range; it must be at most 100000"),
    ("step", ["--group", "9999999999"], "--group: '9999999999' is out of range"),
    ("step", ["--prompts", "1000001"], "--prompts: '1000001' is out of range; it must be at most 1000000"),
    ("step", ["--prompts", "99999999999"], "--prompts: '99999999999' is out of range"),
    (
        "step",
        ["--prompts", "1000", "--group", "1001"],
        "workload: 1,001,000 answers were requested, and a bench has at",
    ),
    (
        "step",
        ["--logprob-chunk", "16777217"],
        "--logprob-chunk: '16777217' is out of range; it must be at most 16777216",
    ),
    ("train", ["--logprob-chunk", "16777217"], "--logprob-chunk: '16777217' is out of range"),
    ("train", ["--tokens", "9999999999999"], "--tokens: '9999999999999' is out of range"),
    (
        "train",
        ["--micro-batches", "10001"],
        "--micro-batches: '10001' is out of range; it must be at most 10000",
    ),
    ("train", ["--cpus", "2", "--micro-batches", "99999999999"], "--micro-batches: '99999999999' is out of range"),
    ("rollout", ["--requests", "99999999999"], "workload: 99,999,999,999 answers were requested"),
    ("rollout", ["--max-batch", "99999999999"], "--max-batch: '99999999999' is out of range"),
    ("rollout", ["--model", "llama-3.1-70b"], "--precision: weights in bf16 take at least 1"),
    ("rollout", ["--model", "llama-3.1-70b", "--cpus", "2"], "--precision: weights in bf16 take at least 1"),
    ("step", ["--cpus", "2", "--lora", "8"], "--lora: it is for the embedded worker alone"),
    (
        "step",
        ["--model", "."],
        "--model: '.' is neither a run folder, nor a checkpoint, nor a Hugging Face model folder",
    ),
    ("train", ["--model", "."], "--model: '.' is neither a run folder"),
    ("step", ["--model", ""], "--model: '' names nothing; give one of tiny,"),
    ("train", ["--model", ""], "or a folder with a config.json"),
]


@pytest.mark.parametrize(("verb", "arguments", "said"), WRONG)
def test_a_wrong_input_is_one_line(
    verb: str, arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("octetrl.bench.rollout_memory.available_host_bytes", lambda: 100_000_000_000)
    assert run_command(["bench", verb, "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("octetrl: ") and error.count("\n") == 1
    assert said in error
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_workers_on_the_cpu_are_advised(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_command(["bench", "step", "--gpus", "2"]) == 2
    error = capsys.readouterr().err
    assert "--gpus: 2 GPUs were requested" in error and "use --cpus 2," in error and "--device" not in error


@pytest.mark.parametrize("verb", ["train", "step", "rollout"])
def test_sigterm_ends_it_with_one_line(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def terminated(*_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL, "the test's process would end"
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(f"octetrl.bench.{verb}.measure", terminated)
    assert run_command(["bench", verb, "--device", "cpu", "--out", str(tmp_path), "--layers", "1"]) == 143
    assert capsys.readouterr().err == "octetrl: stopped by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
