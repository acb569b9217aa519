"""`octetrl bench rollout` on a CPU: its table, its file, and each wrong input: one line, exit code 2, nothing left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.bench import rollout as bench_rollout
from octetrl.cli import bench_rollout as cli
from octetrl.cli.main import run_command

Capture = pytest.CaptureFixture[str]


def bench(out: Path, capsys: Capture, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What a run prints, and the file it writes."""
    capsys.readouterr()
    code = run_command(["bench", "rollout", "--device", "cpu", "--out", str(out), *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert captured.err == ""
    (path,) = out.glob("*.json")
    assert str(path) in captured.out
    return captured.out, json.loads(path.read_text())


def test_every_precision_is_measured_beside_bf16(tmp_path: Path, capsys: Capture) -> None:
    sizes = ("--requests", "4", "--prompt", "8", "--answer", "6", "--group-size", "2", "--rounds", "2")
    text, record = bench(tmp_path / "results", capsys, *sizes)
    said = [line.split("  ")[2].split(":")[0] for line in text.splitlines() if line.startswith("round ")]
    assert said == ["bf16", "fp8_rollout", "fp8_full", "fp8_full", "fp8_rollout", "bf16"], "forth and back"
    assert {line.split()[1] for line in text.splitlines() if "│" in line} == {"bf16", "fp8_rollout", "fp8_full"}
    assert record["bench"] == "rollout"
    rows = record["rows"]
    assert [row["precision"] for row in rows] == ["bf16", "fp8_rollout", "fp8_full"]
    for row in rows:
        assert row["workload"] == "4x8+6"
        assert row["rollout/generated_tokens"] == 24
        assert row["rollout/batch_occupancy"] == 1
        assert row["rollout/tokens_per_second"] > 0
        assert row["weights"] == "drawn"
    assert rows[0]["rollout/speedup_over_bf16"] == 1
    assert rows[2]["rollout/kv_bytes_per_token"] == rows[0]["rollout/kv_bytes_per_token"] / 2


def test_a_folder_with_several_workloads_of_ragged_answers(model: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["--model", str(model), "--precision", "fp8_rollout", "--lengths", "lognormal", "--group-size", "2"]
    _, record = bench(tmp_path, capsys, *arguments, "--workload", "2x4+6", "--workload", "4x5+3", "--max-batch", "2")
    assert [row["workload"] for row in record["rows"]] == ["2x4+6 lognormal 0.7 grouped", "4x5+3 lognormal 0.7 grouped"]
    assert all("rollout/speedup_over_bf16" not in row for row in record["rows"])
    assert record["rows"][1]["rollout/max_batch"] == 2
    assert all(row["weights"] == "files" for row in record["rows"])


def test_hints_and_chunks(tmp_path: Path, capsys: Capture) -> None:
    sizes = ("--workload", "4x40+6", "--group-size", "2", "--precision", "bf16", "--lengths", "lognormal")
    _, record = bench(tmp_path, capsys, *sizes, "--hints", "--prefill-chunk", "16")
    assert [row["workload"] for row in record["rows"]] == ["4x40+6 lognormal 0.7 grouped hinted"]


def test_the_file_has_the_name_it_is_given(tmp_path: Path, capsys: Capture) -> None:
    sizes = ("--workload", "2x4+3", "--group-size", "2", "--precision", "bf16")
    bench(tmp_path, capsys, *sizes, "--name", "Long_answers-1.5")
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_tiny_Long_answers-1.5.json"]


def test_a_gpu_is_asked_for_the_tables_workloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[bench_rollout.Bench] = []

    def measure(plan: bench_rollout.Bench, *_: object) -> list[bench_rollout.Turn]:
        plans.append(plan)
        return []

    monkeypatch.setattr(bench_rollout, "measure", measure)
    monkeypatch.setattr(cli, "device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 150_700_000_000))
    for sizes in ((), ("--answer", "64"), ("--workload", "8x16+8")):
        assert run_command(["bench", "rollout", "--out", str(tmp_path), *sizes]) == 0
    names = [[workload.name for workload in plan.workloads] for plan in plans]
    assert names == [["128x512+4096", "256x512+1024"], ["128x512+64"], ["8x16+8"]]
    assert plans[0].model.name == "qwen3-8b"


def test_what_a_file_asks_for_is_not_blamed_on_options(tmp_path: Path, capsys: Capture) -> None:
    rollouts = tmp_path / "long.jsonl"
    rollouts.write_text(json.dumps({"task_id": "a", "prompt_token_ids": [1] * 1000, "token_ids": [2] * 30}))
    assert run_command(["bench", "rollout", "--device", "cpu", "--lengths", str(rollouts)]) == 2
    error = capsys.readouterr().err
    assert f"1024 positions; '{rollouts}' says so: give another step's file" in error and "--prompt" not in error
    assert error.count("\n") == 1


def test_lengths_of_a_file(tmp_path: Path, capsys: Capture) -> None:
    lines = [{"task_id": "a", "prompt_token_ids": [1] * 4, "token_ids": [2] * n} for n in (3, 9)]
    rollouts = tmp_path / "step_000003.jsonl"
    rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, record = bench(tmp_path, capsys, "--precision", "bf16", "--lengths", str(rollouts))
    assert record["rows"][0]["rollout/generated_tokens"] == 12
    assert record["rows"][0]["rollout/max_length"] == 9


def test_a_long_name_costs_no_figures(tmp_path: Path, capsys: Capture) -> None:
    lines = [{"task_id": "a", "prompt_token_ids": [1] * 4, "token_ids": [2] * 3}]
    rollouts = tmp_path / f"{'long_' * 12}.jsonl"
    rollouts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text, _ = bench(tmp_path, capsys, "--precision", "bf16", "--lengths", str(rollouts))
    assert "…" not in text
    assert rollouts.stem in text and "warm s" in text, "the last column of a CPU"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "qwen3-8"], "--model: 'qwen3-8' is neither a folder nor one of the presets"),
        (["--precision", "bf16,fp8_ful"], "did you mean 'fp8_full'?"),
        (["--precision", "bf16,bf16"], "names a value twice"),
        (["--requests", "6"], "6 requests are no whole groups of 4"),
        (["--prompt", "1000", "--answer", "100"], "1000 + 100 tokens and tiny has 1024 positions"),
        (["--workload", "4x4"], "'4x4' is not REQUESTSxPROMPT+ANSWER"),
        (["--workload", "4x4+" + "9" * 5000], "is not REQUESTSxPROMPT+ANSWER"),
        (["--workload", "4x1000+100"], "1024 positions; give a shorter --workload"),
        (["--workload", "4x4+4", "--workload", "4x04+4"], "--workload: '4x4+4' is given twice"),
        (["--workload", "4x4+4", "--answer", "3"], "--workload: it replaces"),
        (["--lengths", "log-normal"], "cannot read 'log-normal'"),
        (["--lengths", "step_000001.jsonl", "--answer", "3"], "give with it --requests alone"),
        (["--lengths", "step_000001.jsonl", "--group-size", "4"], "give with it --requests alone"),
        (["--sigma", "0.5"], "add --lengths lognormal"),
        (["--hints"], "--hints: all answers have one length"),
        (["--separate-siblings"], "--separate-siblings: siblings of one length are always one request"),
        (["--prefill-chunk", "8"], "--prefill-chunk"),
        (["--name", "a/b"], "--name: 'a/b' cannot be part of a file name"),
        (["--workload", "4x4+4\n"], "--workload: '4x4+4\\n' is not REQUESTSxPROMPT+ANSWER"),
        (["--name", ""], "--name: '' cannot be part of a file name"),
        (["--name", "x" * 300], "give 1 to 64 letters"),
        (["--profile"], "--profile: it times kernels on a GPU"),
        (["--kv-fraction", "1.5"], "--kv-fraction"),
        (["--model", "."], "config.json"),
        (["--model", ""], "config.json"),
        (["--seed", str(2**63)], "--seed"),
        (["--out", "/dev/null/results"], "--out: cannot create the folder"),
    ],
)
def test_a_wrong_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["bench", "rollout", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("octetrl: ") and error.count("\n") == 1
    assert said in error
    assert not list(tmp_path.iterdir())


def test_the_file_goes_where_results_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    small = ["--precision", "bf16", "--workload", "1x2+2", "--group-size", "1", "--warmup", "0"]
    monkeypatch.chdir(tmp_path)
    assert run_command(["bench", "rollout", "--device", "cpu", *small]) == 0
    assert (tmp_path / "rollout_tiny.json").is_file()
    (tmp_path / "lab/results").mkdir(parents=True)
    assert run_command(["bench", "rollout", "--device", "cpu", *small]) == 0
    assert (tmp_path / "lab/results/rollout_tiny.json").is_file()
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert run_command(["bench", "rollout", "--device", "cpu", "--out", "file", *small]) == 2
    assert capsys.readouterr().err.startswith("octetrl: --out: 'file' is a file")
