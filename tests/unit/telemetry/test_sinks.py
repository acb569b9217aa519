import json
import math
from pathlib import Path

import pytest

from octetrl.config.schema import LoggingConfig
from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.system.errors import UserError
from octetrl.telemetry.curves import TensorBoard
from octetrl.telemetry.sinks import MetricsFile, as_code, open_sinks, said_in, sample_texts


def write(path: Path, steps: range, resumed_step: int = 0) -> None:
    file = MetricsFile(path, resumed_step)
    for step in steps:
        file.write(step, {"reward/mean": step / 3, "loss": -step * 1e-7})


def test_lines_read_back_to_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1] == {"step": 2, "loss": -2e-7, "reward/mean": 2 / 3}
    assert list(lines[0]) == ["step", "loss", "reward/mean"]
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    MetricsFile(path).write(1, {"loss": math.nan})
    assert path.read_text() == '{"step": 1, "loss": null}\n'


def test_a_killed_and_resumed_file_equals_a_never_killed_one(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    write(whole, range(1, 8))
    write(killed, range(1, 6))
    with killed.open("a") as file:
        file.write('{"step": 6, "lo')
    write(killed, range(4, 8), resumed_step=3)
    assert killed.read_bytes() == whole.read_bytes()
    # An editor or a copy took the last newline. The next step's line must not be glued to it.
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    write(whole, range(1, 6))
    write(cut, range(1, 4))
    cut.write_bytes(cut.read_bytes()[:-1])
    write(cut, range(4, 6), resumed_step=3)
    assert cut.read_bytes() == whole.read_bytes()
    write(cut, range(6, 7), resumed_step=5)  # and resumes again
    assert len(cut.read_text().splitlines()) == 6


def test_resume_refuses_a_file_that_lacks_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(UserError, match="is missing"):
        MetricsFile(path, resumed_step=2)
    write(path, range(1, 3))
    with pytest.raises(UserError, match=r"ends at step 2, but the checkpoint is of step 5.* after step 2 to resume"):
        MetricsFile(path, resumed_step=5)
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"line 2.* remove the checkpoints after step 1 to resume before them"):
        MetricsFile(path, resumed_step=3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": 1}\n{"step": 4}\n', "line 2: step 4 instead of step 2"),
        ('{"step": 2}\n{"step": 4}\n', "line 1: step 2 instead of step 1"),
        ('{"step": 1}\n{"step": 1}\n', "line 2: step 1 instead of step 2"),
        ('{"step": 1}\n{"step": 2}{"step": 3}\n', "line 2: not one step's JSON object"),
        ('{"step": 1}\n{"step": "2"}\n', "line 2: not one step's JSON object"),
        pytest.param('{"step": 1}\n' + "[" * 200_000, "line 2: not one step's JSON object", id="deep"),
    ],
)
def test_a_gap_is_named_and_nothing_is_cut(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as refusal:
        MetricsFile(path, resumed_step=4)
    assert "\n" not in str(refusal.value) and path.read_text() == text


def test_tensorboard_has_the_recipe_and_samples_and_no_constant_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    decile = "mismatch/decile_0/token_mult_prob_error"
    with open_sinks(tmp_path, LoggingConfig(), {"steps": 7}) as sinks:
        sinks.write(1, {"reward/mean": 0.5, decile: 1.0})
        sinks.write_text(1, "rollouts", sample_texts(groups()))
        sinks.write_text(1, "evaluation", sample_texts([]))
        sinks.write(2, {decile: 1.5})
    events = EventAccumulator(str(tmp_path)).Reload()
    texts = {
        tag.partition("/")[0]: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in events.Tags()["tensors"]
    }
    assert set(texts) == {"recipe", "rollouts"} and '    {\n      "steps": 7' in texts["recipe"]
    assert [(event.step, event.value) for event in events.Scalars(decile)] == [(2, 1.5)]
    assert len(list(tmp_path.glob("events.*"))) == 1


def groups() -> list[RolloutGroup]:
    tasks = [Task(f"sum/{number}", f"{number} + 1 =\n# a heading", str(number + 1)) for number in range(3)]
    failed = Rollout(tasks[0], (), RolloutStatus.REWARD_ERROR, None)
    rewards = ((0.25, 1.0), (0.0, 0.5), (0.75,))
    found = []
    for task, values in zip(tasks, rewards, strict=True):
        said = [
            Turn((1,), Completion((5, 6), (-1.0, -1.0), f"<b>{value}</b>", FinishReason.STOP, 0, ""))
            for value in values
        ]
        rollouts = [
            Rollout(task, (turn,), RolloutStatus.SCORED, value) for turn, value in zip(said, values, strict=True)
        ]
        found.append(RolloutGroup(task, (*rollouts, failed)))
    return found


def test_samples_are_the_best_the_middle_and_the_worst_turn_by_turn() -> None:
    text = sample_texts(groups())
    rewards = [line.partition("**")[2].partition("**")[0] for line in text.splitlines() if line.startswith("**")]
    assert rewards == ["reward 1.000", "reward 0.500", "reward 0.000"]
    assert "task sum/0" in text and "reference answer:\n\n    1\n" in text and "2 tokens" in text
    assert not [line for line in text.splitlines() if line.lstrip().startswith(("#", "<")) and line[:4] != "    "]
    assert sample_texts([]) == ""
    assert len(as_code("x" * 10_000)) < 2_100 and "8,000 letters" in as_code("x" * 10_000)
    task = Task("guess", "Guess my number.", "3")
    first, second = (Completion((5,), (-1.0,), text, FinishReason.STOP, 0, "") for text in ("2", "3"))
    turns = (Turn((1,), first, (Reply("user", "Higher."), Reply("tool", "41"))), Turn((2,), second))
    rollout = Rollout(task, turns, RolloutStatus.SCORED, 1.0)
    assert said_in(rollout) == [("answer", "2"), ("user", "Higher."), ("tool", "41"), ("answer", "3")]
    text = sample_texts([RolloutGroup(task, (rollout,))])
    assert (
        "answer:\n\n    2\n\nuser:\n\n    Higher.\n\ntool:\n\n    41\n\nanswer:\n\n    3\n" in text
        and "2 tokens" in text
    )


def test_a_run_that_begins_again_hides_the_first_steps_of_before(tmp_path: Path) -> None:
    """It was killed before its first checkpoint."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (range(1, 3), range(1, 4)):
        board = TensorBoard(tmp_path, recipe={"steps": 3})
        for step in steps:
            board.write(step, {"loss": 1.0})
        board.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
