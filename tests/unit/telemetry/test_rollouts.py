import errno
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.system.errors import UserError
from octetrl.telemetry.rollout_metrics import environment_metrics, rollout_metrics
from octetrl.telemetry.rollouts import RolloutFiles

TASK = Task(id="chain_sum/17", prompt="3 + 4 =", answer="7")


def turn(tokens: tuple[int, ...], reply: str | None = None) -> Turn:
    text = "".join(str(token) for token in tokens)
    completion = Completion(tokens, (-0.1,) * len(tokens), text, FinishReason.STOP, 5, "digest")
    return Turn((1, 2), completion, () if reply is None else (Reply("user", reply),))


def rollout(status: RolloutStatus, reward: float | None, *turns: Turn) -> Rollout:
    return Rollout(TASK, turns, status, reward)


GROUP = RolloutGroup(
    TASK,
    (
        rollout(RolloutStatus.SCORED, 1.0, turn((7, 9))),
        rollout(RolloutStatus.TRUNCATED, 0.0, turn((8, 8, 8, 8))),
        rollout(RolloutStatus.REWARD_ERROR, None, turn((6, 9, 9), reply="go on"), turn((5, 9, 9))),
        rollout(RolloutStatus.PROMPT_TOO_LONG, None),
    ),
)
FLAT = RolloutGroup(TASK, (rollout(RolloutStatus.SCORED, 1.0, turn((7, 9))),) * 2)


def test_metrics_leave_rollouts_without_reward_out_and_count_them() -> None:
    metrics = rollout_metrics([GROUP, FLAT])
    assert metrics["reward/mean"] == 0.75 and metrics["reward/count"] == 4
    assert metrics["reward/zero_variance_fraction"] == 0.5
    assert metrics["rollout/mean_length"] == pytest.approx((2 + 4 + 6 + 2 + 2) / 5)
    assert metrics["rollout/max_length"] == 6
    assert metrics["rollout/reward_error"] == 1 and metrics["rollout/truncated"] == 1
    assert metrics["rollout/truncated_share"] == 1 / 6 and metrics["rollout/unfinished_share"] == 0
    assert metrics["rollout/prompt_too_long"] == 1 and metrics["rollout/reward_timeout"] == 0
    assert "reward/mean" not in rollout_metrics([])


def test_the_error_of_a_mean_is_that_of_independent_prompts() -> None:
    """Siblings that are all alike are no more evidence than one; those of a prompt that has more weigh more."""

    def of(*groups: list[float]) -> float | None:
        found = [RolloutGroup(TASK, tuple(rollout(RolloutStatus.SCORED, one, turn((7,))) for one in rewards))
                 for rewards in groups]  # fmt: skip
        return rollout_metrics(found).get("reward/mean_error")

    means = [0.0, 1.0, 1.0, 0.25]
    expected = statistics.stdev(means) / 2
    assert of(*([mean] * 8 for mean in means)) == pytest.approx(expected) == of(*([mean] for mean in means))
    assert of([0.0, 0.5], [1.0], []) == pytest.approx((2 * (0.5**2 + 0.5**2)) ** 0.5 / 3)
    assert of([0.0, 1.0]) is None, "one prompt has no spread"


def test_equal_rewards_are_counted_over_groups_that_have_two() -> None:
    def group(*rewards: float) -> RolloutGroup:
        return RolloutGroup(TASK, tuple(rollout(RolloutStatus.SCORED, reward, turn((7,))) for reward in rewards))

    name = "reward/zero_variance_fraction"
    assert name not in rollout_metrics([group(0.0), group(1.0)]), "groups of one answer have no siblings"
    assert rollout_metrics([group(0.1 + 0.2, 0.3), group(1.0), group(0.0, 1.0)])[name] == 0.5, "by more than rounding"


def test_an_environment_fails_by_the_rule_of_the_run() -> None:
    def group(status: RolloutStatus) -> RolloutGroup:
        return RolloutGroup(replace(TASK, environment="y"), (rollout(status, None),))

    groups = [*(group(RolloutStatus.REWARD_ERROR) for _ in range(3)), group(RolloutStatus.PROMPT_TOO_LONG)]
    assert rollout_metrics(groups)["rollout/failure_share"] == 1.0
    assert environment_metrics(groups, ["y"], 1.0)["environments/y/failure_share"] == 1.0


def test_policy_versions_begin_at_tokens_of_all_turns(tmp_path: Path) -> None:
    first, second = turn((7, 8, 9), reply="go on"), turn((5, 6))
    changed = replace(second, completion=replace(second.completion, updates=((1, 6),)))
    group = RolloutGroup(TASK, (rollout(RolloutStatus.SCORED, 1.0, first, changed),))
    (line,) = RolloutFiles(tmp_path).write(3, [group]).read_text().splitlines()
    assert json.loads(line)["policy_versions"] == [[0, 5], [4, 6]]


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
