"""Batches that were generated ahead, written as JSON and read back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.environments.tasks import named
from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.run.ahead import Ahead
from octetrl.run.batches_ahead import BufferedBatch, DataPlace, batches_from_json, batches_to_bytes
from octetrl.run.plain_tasks import with_plain_tasks
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
    written = [batch(task), batch(task)]
    assert batches_from_json(json.loads(batches_to_bytes(written))) == written
    assert written[0].oldest_version == 3


def test_a_task_of_several_environments_keeps_its_environment() -> None:
    groups = tuple(with_plain_tasks(batch(named(Task("1", "1 + 2 =", "3", {"x": 0.1}), "sums")).groups))
    written = replace(batch(groups[1].task), groups=groups, kept=groups[1:])
    (read,) = batches_from_json(json.loads(batches_to_bytes([written])))
    expected = Task("sums/1", "1 + 2 =", "3", {"x": 0.1}, environment="sums")
    assert read == batch(expected) and read.kept[0].task.environment == "sums"


def test_metadata_that_json_cannot_hold_is_refused_in_one_line() -> None:
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
