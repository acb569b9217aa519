"""Files of rollouts: each is written whole and read back, filtered by group; files that no run wrote are refused."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from octetrl.algorithms.table import build_algorithm
from octetrl.config.algorithm import GrpoConfig
from octetrl.records import RolloutGroup, RolloutStatus
from octetrl.rollout.samples import to_samples
from octetrl.system.errors import UserError
from octetrl.telemetry.rollouts import Filter, Interval, RolloutFiles, RolloutLine, matching_rows, select
from tests.house.tree import REPO
from tests.unit.telemetry.sampled_rows import FLAT, GROUP, TASK, line, rollout, turn, write_run

# ---------------------------------------------------------------- writing


def test_file_holds_every_rollout_whole(tmp_path: Path) -> None:
    path = RolloutFiles(tmp_path / "rollouts").write(3, [GROUP])
    assert path.name == "step_000003.jsonl" and list(path.parent.iterdir()) == [path]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["status"] for line in lines] == ["scored", "truncated", "reward_error", "prompt_too_long"]
    assert [line["sibling"] for line in lines] == [0, 1, 2, 3]
    first = lines[0]
    assert (first["task_id"], first["prompt"], first["answer"]) == ("chain_sum/17", "3 + 4 =", "7")
    assert (first["token_ids"], first["logprobs"], first["reward"]) == ([7, 9], [-0.1, -0.1], 1.0)
    assert (first["policy_version"], first["finish_reason"], first["text"]) == (5, "stop", "79")
    assert "turns" not in first
    assert lines[2]["text"] == "\n".join(part["text"] for part in lines[2]["turns"]), "without the replies"
    assert [part["replies"] for part in lines[2]["turns"]] == [[{"role": "user", "text": "go on"}], []]
    assert lines[3]["reward"] is None and lines[3]["token_ids"] == [] and lines[3]["policy_version"] is None
    first, second = turn((7, 8, 9), reply="go on"), turn((5, 6))
    changed = replace(second, completion=replace(second.completion, updates=((1, 6),)))
    group = RolloutGroup(TASK, (rollout(RolloutStatus.SCORED, 1.0, first, changed),))
    (line,) = RolloutFiles(tmp_path).write(3, [group]).read_text().splitlines()
    assert json.loads(line)["policy_versions"] == [[0, 5], [4, 6]]


def test_the_page_has_every_field_that_is_written_and_the_advantages_are_those_of_the_samples(tmp_path: Path) -> None:
    first, second = turn((7, 8, 9), reply="go on"), replace(turn((5, 6)), is_fork=True)
    changed = replace(first, completion=replace(first.completion, updates=((1, 6),)))
    whole = replace(
        rollout(RolloutStatus.SCORED, 1.0, changed, second),
        task=replace(TASK, environment="sums"),
        components={"right": 1.0},
        metrics={"length": 2.0, "agent/stragglers": 0.0},
        result="789",
        calls=[
            {"parent": None, "messages": [{"role": "user", "text": "?"}], "turn": 0},
            {"parent": 0, "messages": [], "constrained": 3, "text": "{}"},
            {"parent": None, "messages": [], "discarded": 2, "text": "so"},
            {"parent": 0, "messages": [{"role": "tool", "text": "15"}], "turn": 1},
        ],
    )
    group = RolloutGroup(TASK, (whole, rollout(RolloutStatus.SCORED, 0.0, turn((1,)))))
    (line, other) = RolloutFiles(tmp_path).write(3, [group], {id(whole): 0.25}).read_text().splitlines()
    written = json.loads(line)
    names = {*written, *(f"{field}.{name}" for field in ("turns", "calls") for part in written[field] for name in part)}
    text = (REPO / "docs/evaluation.md").read_text().split("### The fields of the file")[1].split("\n## ")[0]
    cells = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
    assert documented == {*names, "trainer_logprobs"} >= set(RolloutLine.__annotations__)
    assert set(written["turns"][0]["replies"][0]) == {"role", "text"}
    assert (written["advantage"], json.loads(other)["advantage"]) == (0.25, None)
    (row, _) = (row for *_, row in matching_rows(tmp_path, Filter()))
    assert row.metrics == {"length": 2.0}
    assert [(part.depth, part.by, part.text) for part in row.said] == [
        (0, "call 1", "3 tokens, trained"), (0, "user", "?"), (0, "model", "789"),
        (0, "call 2", "after call 1, 3 tokens, constrained"), (0, "answer", "{}"),
        (1, "call 4", "after call 1, 2 tokens, trained"), (1, "tool", "15"), (1, "model", "56"),
        (1, "call 3", "2 tokens, discarded"), (1, "answer", "so"),
    ]  # fmt: skip
    assert [part.by for part in row.said if part.is_call] == ["call 1", "call 2", "call 4", "call 3"]
    assert [list(row.token_ids[part.tokens]) for part in row.said if part.by == "model"] == [[7, 8, 9], [5, 6]]
    by_sample = [[(trained, token) for trained, ids in sequence for token in ids] for sequence in row.sequences]
    samples = to_samples([RolloutGroup(TASK, (whole,))], build_algorithm(GrpoConfig()))
    of_samples = [list(zip(sample.loss_mask, sample.token_ids, strict=True)) for sample in samples]
    assert sorted(by_sample) == sorted(of_samples)  # an agent's samples are in the order of their tokens


def test_resume_removes_later_steps_and_torn_files(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path)
    for step in (1, 2, 3):
        files.write(step, [FLAT])
    (tmp_path / "step_000004.jsonl.partial").write_text("{")
    of_the_user = ["step_000001.jsonl.gz", "step_000003 (copy).jsonl", "step_000003.jsonl~", "step_9_mine.jsonl"]
    for name in of_the_user:
        (tmp_path / name).write_text("")
    RolloutFiles(tmp_path, resumed_step=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step_000001.jsonl", "step_000002.jsonl", *of_the_user}


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, "no space left"), (errno.EIO, r"can't write '.*' \(Input/output error\)")]
)
def test_a_full_or_broken_disk_is_one_line_and_leaves_nothing(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    files = RolloutFiles(tmp_path)
    monkeypatch.setattr("octetrl.system.files.os.fsync", fail)
    with pytest.raises(UserError, match=said) as raised:
        files.write(1, [FLAT])
    assert list(tmp_path.iterdir()) == [] and raised.value.__cause__ is not raised.value


def test_a_folder_that_was_moved_is_one_line(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path / "rollouts")
    (tmp_path / "rollouts").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"can't write '.*rollouts' \(No such file or directory\): see that the folder"):
        files.write(1, [FLAT])


# ---------------------------------------------------------------- reading


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def shown(run: Path, wanted: Filter, limit: int | None = None) -> list[tuple[int, str]]:
    return [(group.step, group.rows[0].task_id) for group in select(run, wanted, limit).groups]


def test_rows_of_a_run_by_group_turn_and_version(run: Path) -> None:
    assert shown(run, Filter()) == [
        *((1, "sum/easy"), (1, "sum/1"), (2, "sum/easy"), (2, "sum/2")),
        *((3, "sum/easy"), (3, "sum/3"), (3, "talk")),
    ]
    group = select(run, Filter(task="easy"), None).groups[0]
    assert [row.reward for row in group.rows] == group.rewards == [1.0, 0.5]
    selection = select(run, Filter(), 3)
    assert (selection.found, selection.steps) == (7, 3)
    assert [(group.step, group.place) for group in selection.groups] == [(1, 0), (2, 0), (3, 0)]
    row = select(run, Filter(task="talk"), None).groups[0].rows[0]
    assert [(part.by, part.text, row.token_ids[part.tokens]) for part in row.said] == [
        ("model", "ask!", [0, 1, 2, 3]),
        ("tool", "told you", []),
        ("model", "so 3", [4, 5, 6]),
    ]
    assert row.components == {"right": 1.0, "brevity": -0.25}
    assert row.trainer_logprobs == () and row.versions_text == ""
    first, other = select(run, Filter(steps=Interval(low=3), task="easy"), None).groups[0].rows
    assert first.versions_text == "policy version 2, 3 from token 4" and other.versions_text == ""


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
