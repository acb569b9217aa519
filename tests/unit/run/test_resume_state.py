"""What a checkpoint and a run's folder give a resumed run: batches generated ahead, and answers for its drafts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from octetrl.config.schema import SpeculationConfig
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.run import resume as resume_module
from octetrl.run.ahead import Ahead
from octetrl.run.resume import batches_from_json, batches_to_bytes, remember_answers
from octetrl.run.state import BufferedBatch, DataPlace, Run
from octetrl.run.step import GenerateThenLearn
from octetrl.system.errors import UserError


def answer(text: str, version: int) -> Completion:
    return Completion((5, 7), (-0.1, -math.pi / 7), text, FinishReason.LENGTH, version, "digest")


def batch(task: Task) -> BufferedBatch:
    changed = replace(answer("c", 4), updates=((1, 5),))
    talk = (Turn((1, 2), answer("a\ud800", 3), (Reply("tool", "ü"), Reply("user", ""))), Turn((9,), changed))
    scored = Rollout(task, talk, RolloutStatus.SCORED, 1 / 3, None, None, "7", -0.5, {"form": 0.1}, {"turns": 2.0})
    failed = Rollout(task, talk[:1], RolloutStatus.REWARD_ERROR, None, "it raised", "Traceback ...")
    unasked = Rollout(Task("t/2", "long"), (), RolloutStatus.PROMPT_TOO_LONG, None, detail="the prompt has 9 tokens")
    groups = (RolloutGroup(unasked.task, (unasked,)), RolloutGroup(task, (scored, failed)))
    return BufferedBatch(
        groups,
        groups[1:],
        {"rollout/groups": 2.0},
        {"time/x": 0.1},
        DataPlace({"position": 4}, {"t": 3}, {"numpy": ["MT19937", [1, 2], 2, 0, 0.1]}),
    )


def test_what_is_read_equals_what_was_written() -> None:
    task = Task("t/1", "1 + 2 =", "3", {"level": [1, {"of": None}], "x": 0.1})
    talk = replace(task, prompt=({"role": "user", "content": "1 + 2 ="},), tools=({"name": "add"},))
    written = [batch(task), batch(talk)]
    assert batches_from_json(json.loads(batches_to_bytes(written))) == written
    assert written[0].oldest_version == 3
    asked = ({"role": "system", "content": "ü"}, {"role": "user", "content": "1 + 2 ="})
    told = [batch(Task("t/1", asked, tools=({"name": "add"},), chat_template_kwargs={"enable_thinking": False}))]
    assert batches_from_json(json.loads(batches_to_bytes(told))) == told
    written = batch(Task("sums/1", "1 + 2 =", "3", {"x": 0.1}, environment="sums"))
    assert batches_from_json(json.loads(batches_to_bytes([written])))[0].kept[0].task.environment == "sums"
    with pytest.raises(
        UserError, match=r"checkpoint.batches_ahead: saved .* set is not JSON .*; use drawn_again"
    ) as no:
        batches_to_bytes([batch(Task("t", "p", metadata={"names": {"a"}}))])
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("how", "pages", "forgets_before"),
    [("saved", "keep", [4, 6]), ("drawn_again", "keep", []), ("saved", "drop_on_publish", [])],
)
def test_kept_pages_are_forgotten_before_the_first_batch_that_a_checkpoint_lacks(
    how: str, pages: str, forgets_before: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one version ahead the checkpoint after step 2 has the batch of step 3, and a resumed run draws that of 4."""
    drawn: list[int] = []
    forgotten: list[int] = []
    checkpoint, engine = SimpleNamespace(every=2, batches_ahead=how), SimpleNamespace(prefix_cache=pages)
    cluster = SimpleNamespace(max_staleness=1)
    config: Any = SimpleNamespace(cluster=cluster, checkpoint=checkpoint, engine=engine, steps=6)
    workers = SimpleNamespace(adopt=lambda: None, forget_prefixes=lambda: forgotten.append(len(drawn) + 1))
    run: Any = SimpleNamespace(config=config)
    ahead = Ahead(config, workers)  # type: ignore[arg-type]
    ahead._learnt = config.steps
    monkeypatch.setattr(ahead, "_draw", lambda run, step, waited: drawn.append(step) or batch(Task("t", "p")))
    ahead._produce(run, 1)
    assert (drawn, forgotten, ahead._error) == ([1, 2, 3, 4, 5, 6], forgets_before, None)


# --- answers of earlier steps

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
    monkeypatch.setattr(resume_module, "model_spec", lambda config: SimpleNamespace(vocab_size=10))
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
