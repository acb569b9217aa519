"""Which earlier answers a resumed run reads for its drafts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octetrl.config.schema import SpeculationConfig
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.records import Completion, FinishReason, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.run import earlier_answers
from octetrl.run.batches_ahead import BufferedBatch, DataPlace
from octetrl.run.earlier_answers import remember_answers
from octetrl.run.state import Run
from octetrl.run.step import GenerateThenLearn

STEPS, SIBLINGS = 8, 16


def row(step: int, sibling: int, token: int = 7) -> dict[str, Any]:
    """A long prompt and a short answer."""
    said = {"text": "", "token_ids": [token] * 5, "logprobs": [0.0] * 5, "prompt_token_ids": [step] * 100}
    return {"task_id": str(step), "prompt": "", "sibling": sibling, "status": "completed", "reward": 0.0, **said}


class Resumed:
    """A run that keeps what it is given, with a model of 10 tokens."""

    def __init__(self, memory_tokens: int) -> None:
        self.speculation = SpeculationConfig(name="ngram", memory_tokens=memory_tokens)
        self.drafts, self.steps, self.warnings = NGramDrafts(self.speculation), list[int](), list[str]()
        self.method: Any = GenerateThenLearn()
        self.conversations, self.console, self.workers = None, SimpleNamespace(warn=self.warnings.append), self
        self.config = SimpleNamespace(engine=SimpleNamespace(speculation=self.speculation))

    def remember(self, answers: list[Any]) -> None:
        self.steps += [answer.prompt_token_ids[0] for answer in answers]
        self.drafts.remember(answers)


def resume(folder: Path, monkeypatch: pytest.MonkeyPatch, memory_tokens: int, ahead: Any = None) -> Resumed:
    monkeypatch.setattr(earlier_answers, "model_spec", lambda config: SimpleNamespace(vocab_size=10))
    run = Resumed(memory_tokens)
    run.method = ahead or run.method
    remember_answers(cast(Run, run), folder, STEPS)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rollouts").mkdir()
    for step in range(1, STEPS + 1):
        lines = [json.dumps(row(step, sibling)) + "\n" for sibling in range(SIBLINGS)]
        (tmp_path / f"rollouts/step_{step:06d}.jsonl").write_text("".join(lines))
    return tmp_path


def test_it_keeps_what_a_run_that_was_never_stopped_keeps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory has room for four of eight steps: a prompt counts once and not with each of its siblings."""
    run = resume(folder, monkeypatch, memory_tokens=4 * (100 + SIBLINGS * 5))
    assert run.steps == [step for step in (5, 6, 7, 8) for _ in range(SIBLINGS)], "the newest, and no file too many"
    assert sum(map(len, run.drafts._answers.values())) == 4 * SIBLINGS
    assert not run.warnings


def test_saved_batches_are_the_newest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def batches_after(step: int, *, waits: bool) -> list[BufferedBatch]:
        assert (step, waits) == (STEPS, False)
        task, place = Task("t", "p"), DataPlace({}, {}, None)
        batches = []
        for prompt in (STEPS + 1, STEPS + 2):
            turn = Turn((prompt,) * 100, Completion((7,) * 5, (0.0,) * 5, "", FinishReason.LENGTH, 0, ""))
            group = RolloutGroup(task, (Rollout(task, (turn,), RolloutStatus.SCORED, 1.0),) * SIBLINGS)
            batches.append(BufferedBatch((group,), (group,), {}, {}, place))
        return batches

    ahead = SimpleNamespace(batches_after=batches_after)
    run = resume(folder, monkeypatch, memory_tokens=4 * (100 + SIBLINGS * 5), ahead=ahead)
    assert run.steps == [step for step in (7, 8, 9, 10) for _ in range(SIBLINGS)]


def test_a_token_beyond_the_vocabulary_is_never_a_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "rollouts/step_000008.jsonl").write_text(json.dumps(row(8, 0, token=10)) + "\n")
    run = resume(folder, monkeypatch, memory_tokens=10**6)
    assert set(run.steps) == set(range(1, STEPS))
    assert [line.split("; ")[0] for line in run.warnings] == [
        f"{folder / 'rollouts/step_000008.jsonl'} has the token 10, and the model's tokens are 0 to 9"
    ]
