"""What the filters take, how groups are put together, and files that no run wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError
from octetrl.telemetry.rollouts import Filter, Interval, matching_rows, select
from tests.unit.telemetry.sampled_rows import line, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def shown(run: Path, wanted: Filter, limit: int | None = None) -> list[tuple[int, str]]:
    return [(group.step, group.rows[0].task_id) for group in select(run, wanted, limit).groups]


def test_groups_are_siblings_in_the_order_of_the_steps(run: Path) -> None:
    assert shown(run, Filter()) == [
        *((1, "sum/easy"), (1, "sum/1"), (2, "sum/easy"), (2, "sum/2")),
        *((3, "sum/easy"), (3, "sum/3"), (3, "talk")),
    ]
    group = select(run, Filter(task="easy"), None).groups[0]
    assert [row.reward for row in group.rows] == group.rewards == [1.0, 0.5]


def test_a_task_drawn_twice_in_a_row_is_two_groups(tmp_path: Path) -> None:
    rows = [line("a", 0, 1.0), line("a", 1, 0.0), line("a", 0, 0.5), line("a", 1, 0.5)]
    file = tmp_path / "step_000007.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = select(file, Filter(), None).groups
    assert [(group.step, group.place, group.rewards) for group in groups] == [(7, 0, [1.0, 0.0]), (7, 1, [0.5, 0.5])]
    file.write_text("".join(json.dumps(line(name, 1, 0.0)) + "\n" for name in "ab"))  # as grep leaves them
    assert [group.rewards for group in select(file, Filter(), None).groups] == [[0.0], [0.0]]


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [
        (Filter(steps=Interval(2, 2)), 4),
        (Filter(rewards=Interval(0.5, 0.5)), 3),
        (Filter(rewards=Interval(high=0.0)), 4),
        (Filter(rewards=Interval()), 11),
        (Filter(statuses=frozenset({RolloutStatus.REWARD_ERROR})), 3),
        (Filter(statuses=frozenset({RolloutStatus.REWARD_ERROR}), rewards=Interval()), 0),
        (Filter(task="sum/2"), 2),
        (Filter(text="four"), 3),
        (Filter(text="told you"), 1),
        (Filter(text="four", task="easy", steps=Interval(low=2)), 2),
    ],
)
def test_all_that_is_asked_must_hold(wanted: Filter, rows: int, run: Path) -> None:
    assert len(list(matching_rows(run, wanted))) == rows
    selection = select(run, wanted, None)
    assert sum(wanted.takes(row) for group in selection.groups for row in group.rows) == rows
    assert all(len(group.rows) == 2 for group in selection.groups)


def test_fewer_are_evenly_spread_and_counted(run: Path) -> None:
    selection = select(run, Filter(), 3)
    assert (selection.found, selection.steps) == (7, 3)
    assert [(group.step, group.place) for group in selection.groups] == [(1, 0), (2, 0), (3, 0)]


def test_turns_have_their_tokens(run: Path) -> None:
    row = select(run, Filter(task="talk"), None).groups[0].rows[0]
    assert [(part.by, part.text, row.token_ids[part.tokens]) for part in row.said] == [
        ("model", "ask!", [0, 1, 2, 3]),
        ("tool", "told you", []),
        ("model", "so 3", [4, 5, 6]),
    ]
    assert row.components == {"right": 1.0, "brevity": -0.25}
    assert row.trainer_logprobs == () and row.versions_text == ""


def test_an_answer_of_several_versions_says_from_which_token_on(run: Path) -> None:
    first, other = select(run, Filter(steps=Interval(low=3), task="easy"), None).groups[0].rows
    assert first.versions_text == "policy version 2, 3 from token 4" and other.versions_text == ""


def _damaged(**changes: object) -> bytes:
    line = {"task_id": "a", "prompt": "p", "sibling": 0, "status": "scored", "reward": 1.0, "text": "t", **changes}
    return json.dumps(line).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{\n", "step_000002.jsonl, line 1: not JSON"),
        (b"[1]\n", "line 1: not a rollout"),
        (b'{"task_id": "a"}\n', "not a rollout, prompt, sibling, status, reward, text is missing"),
        (b"\xff\n", "not UTF-8 text"),
        *((_damaged(reward=value), "line 1: not a rollout, reward is") for value in ("x", {}, float("nan"))),
        *((_damaged(token_ids=value), "line 1: not a rollout, token_ids is") for value in (7, [1 << 31], [0.5])),
        *((_damaged(policy_versions=value), "policy_versions is") for value in ([3], [[1]], [["a", 1]])),
        (_damaged(turns=[{"num_tokens": 1}]), "turns is"),
    ],
)
def test_what_no_run_wrote_is_refused(content: bytes, says: str, run: Path) -> None:
    (run / "rollouts" / "step_000002.jsonl").write_bytes(content)
    with pytest.raises(UserError) as refusal:
        select(run, Filter(), None)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_place_without_rollouts_is_refused(tmp_path: Path) -> None:
    for place, says in [(tmp_path, "has no rollouts"), (tmp_path / "gone", "does not exist")]:
        with pytest.raises(UserError, match=says):
            select(place, Filter(), None)
