"""What `eval`, `generate` and `export` print, and what they hand over."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from octetrl.cli.eval import report_text
from octetrl.cli.generate import completions_text
from octetrl.cli.main import run_command
from octetrl.records import Completion, FinishReason, RolloutStatus, SamplingParams


@dataclass(frozen=True)
class Report:
    """The fields of octetrl.run.evaluate.EvalReport, which needs torch."""

    accuracy: float | None
    tasks: int = 4
    mean_length: float = 12.34
    tokens_per_second: float = 1234.5

    @property
    def counts(self) -> dict[RolloutStatus, int]:
        return {RolloutStatus.SCORED: 3, RolloutStatus.REWARD_ERROR: 1}


def completion(text: str) -> Completion:
    return Completion((1, 2), (-0.5, -0.5), text, FinishReason.STOP, 0, "digest")


def replace_function(monkeypatch: pytest.MonkeyPatch, module: str, name: str, function: Any) -> None:
    package, stand_in = ModuleType("octetrl.run"), ModuleType(module)
    setattr(stand_in, name, function)
    monkeypatch.setitem(sys.modules, "octetrl.run", package)
    monkeypatch.setitem(sys.modules, module, stand_in)


def test_a_report_shows_accuracy_and_every_status() -> None:
    text = report_text(Report(0.75))  # type: ignore[arg-type]
    rows = dict(line.split(maxsplit=1) for line in text.splitlines())
    assert rows["accuracy"] == "0.7500"
    assert (rows["scored"], rows["reward_error"], rows["tokens/s"]) == ("3", "1", "1,234")
    assert "no completion could be scored" in report_text(Report(None))  # type: ignore[arg-type]


def test_eval_hands_over_target_and_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("model: {path: m}\nenvironment: {dataset: chain_sum}\n")
    seen: list[Any] = []

    def evaluate_checkpoint(target: str, resolved: Any) -> Report:
        seen.append((target, resolved.rollout.top_p))
        return Report(0.5)

    replace_function(monkeypatch, "octetrl.run.evaluate", "evaluate_checkpoint", evaluate_checkpoint)
    assert run_command(["eval", "runs/x", "--recipe", str(recipe), "rollout.top_p=0.9"]) == 0
    assert seen == [("runs/x", 0.9)]
    assert "accuracy        0.5000" in capsys.readouterr().out
    assert run_command(["eval", "runs/x", "--recipe", str(recipe), "environment.eval_size=0"]) == 2
    assert "no task is held out" in capsys.readouterr().err


def test_one_completion_is_bare_text_and_several_say_whose_they_are() -> None:
    assert completions_text([[completion("hello")]]) == "hello"
    text = completions_text([[completion("a"), completion("b")], [completion("c"), completion("d")]])
    assert text.splitlines()[2:4] == ["--- prompt 1, completion 2: 2 tokens, stop", "b"]


def test_generate_hands_over_its_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def generate_text(*arguments: Any, **options: Any) -> list[list[Completion]]:
        seen.append((arguments, options))
        return [[completion("x"), completion("y")]]

    replace_function(monkeypatch, "octetrl.run.generate", "generate_text", generate_text)
    words = (
        "generate m -p a -p b --max-new-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 4 --min-p 0.1 --stop s --stop t"
    )
    assert run_command([*words.split(), "--seed", "3", "--n", "2", "--precision", "fp8_full", "--device", "cpu"]) == 0
    sampling = SamplingParams(9, 0.5, 4, 0.9, 0.1, ("s", "t"))
    assert seen == [(("m", ["a", "b"], sampling), {"precision": "fp8_full", "device": "cpu", "seed": 3, "n": 2})]
    assert "completion 2" in capsys.readouterr().out


def test_export_says_what_it_wrote(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    replace_function(
        monkeypatch, "octetrl.run.export", "export_run", lambda run, to, adapter: f"{to} of {run} {adapter}"
    )
    for flags, asked in (([], False), (["--adapter"], True)):
        assert run_command(["export", "runs/x", "--to", "out", *flags]) == 0
        assert capsys.readouterr().out == f"wrote out of runs/x {asked}\n"
