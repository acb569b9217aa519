"""How many earlier answers a resumed run reads for its drafts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from octetrl.config.speculation import SpeculationConfig
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.run.build import Run
from octetrl.run.earlier_answers import remember_answers

STEPS, SIBLINGS = 8, 16


def row(step: int, sibling: int) -> dict[str, Any]:
    """A long prompt and a short answer."""
    said = {"text": "", "token_ids": [7] * 5, "logprobs": [0.0] * 5, "prompt_token_ids": [step] * 100}
    return {"task_id": str(step), "prompt": "", "sibling": sibling, "status": "completed", "reward": 0.0, **said}


def test_a_resumed_run_keeps_what_a_run_that_was_never_stopped_keeps(tmp_path: Path) -> None:
    """The memory has room for four of eight steps: a prompt counts once and not with each of its siblings."""
    config = SpeculationConfig(name="ngram", memory_tokens=4 * (100 + SIBLINGS * 5))
    (tmp_path / "rollouts").mkdir()
    for step in range(1, STEPS + 1):
        lines = [json.dumps(row(step, sibling)) + "\n" for sibling in range(SIBLINGS)]
        (tmp_path / f"rollouts/step_{step:06d}.jsonl").write_text("".join(lines))
    memory, warnings, given = NGramDrafts(config), list[str](), list[int]()

    def remember(answers: list[Any]) -> None:
        given.extend(answer.prompt_token_ids[0] for answer in answers)
        memory.remember(answers)

    parts = {"console": SimpleNamespace(warn=warnings.append), "rollout_workers": SimpleNamespace(remember=remember)}
    run = SimpleNamespace(
        config=SimpleNamespace(engine=SimpleNamespace(speculation=config)), conversations=None, **parts
    )
    remember_answers(cast(Run, run), tmp_path, STEPS)
    assert given == [step for step in (5, 6, 7, 8) for _ in range(SIBLINGS)], "the newest, and no file more than needed"
    assert sum(map(len, memory._answers.values())) == 4 * SIBLINGS
    assert not warnings
