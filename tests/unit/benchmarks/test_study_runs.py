"""The study's runner and table: killed jobs lose nothing, a resumed job has the same line, pairing and coverage."""

from __future__ import annotations

import json
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from benchmarks.study import arms, job, pairs, probe, runs, table
from benchmarks.study.arms import ARMS, TABLES
from octetrl.config.load import load_recipe
from octetrl.config.shipped import shipped_path
from octetrl.fp8.policy import precision_policy
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from octetrl.workers.model_shape import model_spec
from tests.e2e.tiny_run import make_model
from tests.house.figures import check_table
from tests.house.markdown import tables

SMALL = [
    *("cluster.device=cpu", "cluster.cpu_threads=1", "rollout.prompts_per_step=2", "rollout.group_size=2"),
    *("rollout.max_prompt_tokens=100", "rollout.max_new_tokens=4", "engine.kv_cache_tokens=2048"),
    *("environment.kind=jsonl", "environment.parameters={}", "environment.answer_marker=null"),
    *("environment.reward=tests.e2e.tiny_rewards:by_text", "environment.train_size=16", "environment.eval_size=4"),
    *("evaluation.every=2", "trainer.tokens_per_micro_batch=512", "failures.max_empty_steps=0", "steps=4"),
    f"environment.dataset={Path(__file__).parents[2] / 'e2e' / 'sums.jsonl'}",
]
FAKE = """
import json, os, pathlib, signal, sys, time
state, name, steps, what = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
if what != "runs":
    print("it broke")
    sys.exit(1 if what == "fails" else 2)
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
done = state / "runs" / name
done.mkdir(parents=True, exist_ok=True)
count = int((done / "step").read_text()) if (done / "step").exists() else 0
for count in range(count + 1, min(count + 8, steps) + 1):  # as many as fit into a call
    (done / "step").write_text(str(count))
if count < steps:
    (done / "waits.part").write_text(str(os.getpid()))
    (done / "waits.part").rename(done / "waits")
    while not asked:
        time.sleep(0.01)
    (done / "waits").unlink()
    sys.exit(3)
line = {"table": name.rsplit("-", 2)[0], "arm": sys.argv[5], "seed": int(sys.argv[6])}
line |= {"status": "complete", "seconds": 0.1}
(state / "lines").mkdir(exist_ok=True)
(state / "lines" / (name + ".json")).write_text(json.dumps(line))
"""


def fake_jobs(monkeypatch: pytest.MonkeyPatch, steps: int, broken: str = "", ends: str = "fails") -> None:
    """Jobs that only count, 8 steps in a call."""

    def command(one: runs.Job, arguments: Any) -> list[str]:
        what = ends if one.arm == broken else "runs"
        return [sys.executable, "-c", FAKE, str(arguments.state), one.name, str(steps), what, one.arm, str(one.seed)]

    monkeypatch.setattr(runs, "command_of", command)
    monkeypatch.setattr(runs, "WARNING_SECONDS", 0.4)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.02)


def test_calls_cut_short_complete_every_job_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_jobs(monkeypatch, steps=20)
    is_over = False

    def clock() -> float:
        """Stands still until both jobs have done what fits into the call; then the warning is due."""
        nonlocal is_over
        is_over = is_over or len(list(tmp_path.glob("runs/*/waits"))) == 2
        return 1.0 if is_over else 0.0

    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
    words = f"smollm2-sums --model m --arms bf16,fp8 --seeds 2 --jobs 2 --seconds 1.3 --state {tmp_path}".split()
    seen: list[set[str]] = []
    for _ in range(8):
        runs.main(words)
        is_over = False
        seen.append({path.name for path in (tmp_path / "lines").glob("*.json")})
        if len(seen[-1]) == 4:
            break
    assert len(seen) > 1, "one call was enough: nothing was cut off"
    assert all(before <= after for before, after in pairwise(seen))
    assert seen[-1] == {f"smollm2-sums-{arm}-{seed}.json" for arm in ("bf16", "fp8") for seed in (0, 1)}


def test_no_job_starts_that_would_not_end(tmp_path: Path) -> None:
    plan = runs.Plan(tmp_path, runs.jobs_of("smollm2-sums", ["bf16"], [0]), guess=50.0)
    (only,) = plan.ready([])
    assert plan.seconds(only) == 50.0
    plan.note_seconds(only, 70.0)
    plan.note_seconds(only, 60.0)
    assert plan.seconds(only) == 70.0
    (tmp_path / "runs" / only.name).mkdir(parents=True)
    (tmp_path / "runs" / only.name / "seconds").write_text("30.0")
    assert plan.seconds(only) == 40.0
    plan.expected = 35.0
    assert plan.seconds(only) == 5.0
    assert plan.seconds(runs.Job("tiny-sums", job.START, 0)) == 50.0, "the option is about arms"


def test_arms_wait_for_their_start(tmp_path: Path) -> None:
    plan = runs.Plan(tmp_path, runs.jobs_of("tiny-sums", ["bf16", "fp8"], [0, 1]), guess=1.0)
    assert [one.name for one in plan.ready([])] == ["tiny-sums-start-0", "tiny-sums-start-1"]
    job.start_folder(tmp_path, "tiny-sums", 0).mkdir(parents=True)
    assert [one.name for one in plan.ready([])] == ["tiny-sums-bf16-0", "tiny-sums-fp8-0", "tiny-sums-start-1"]


def test_jobs_are_spread_over_the_gpus_that_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import json, os, pathlib, sys; state, arm, seed = sys.argv[1:]; place = pathlib.Path(state, 'lines');"
    said += "place.mkdir(exist_ok=True); gpu = os.environ.get('CUDA_VISIBLE_DEVICES');"
    said += "text = json.dumps(dict(seconds=0.1, gpu=gpu));"
    said += "(place / f'smollm2-sums-{arm}-{seed}.json').write_text(text)"

    def command(one: runs.Job, arguments: Any) -> list[str]:
        return [sys.executable, "-c", said, str(arguments.state), one.arm, str(one.seed)]

    monkeypatch.setattr(runs, "command_of", command)
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.02)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a")
    words = f"smollm2-sums --model m --arms bf16,fp8 --seeds 1 --jobs 1 --seconds 90 --state {tmp_path}".split()
    runs.main([*words, "--then", "bf16:1:2"])
    found = {path.stem: json.loads(path.read_text())["gpu"] for path in (tmp_path / "lines").iterdir()}
    assert set(found) == {f"smollm2-sums-{one}" for one in ("bf16-0", "fp8-0", "bf16-1", "bf16-2")}
    assert (found["smollm2-sums-bf16-0"], found["smollm2-sums-fp8-0"]) == ("3", "GPU-a")
    assert set(found.values()) == {"3", "GPU-a"}


def test_the_emptiest_gpu_takes_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(gpu: str | None) -> Any:
        return SimpleNamespace(gpu=gpu)

    assert runs.emptiest(["0", "1"], [on("0"), on("0"), on("1")]) == "1"
    assert runs.emptiest(["0", "1"], [on("1"), on("0")]) == "0" and runs.emptiest([], [on(None)]) is None
    for given, seen in (("", []), ("-1", []), ("2,0", ["2", "0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert runs.visible_gpus() == seen
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert runs.visible_gpus() == ["0", "1"]


def test_further_arms_come_behind_and_once(tmp_path: Path) -> None:
    def names(*then: str) -> list[tuple[str, int]]:
        given = SimpleNamespace(table="smollm2-sums", arms="bf16,fp8", seeds=1, first_seed=0, then=then)
        return [(one.arm, one.seed) for one in runs.all_jobs(given)]  # type: ignore[arg-type]

    assert names("bf16,fp8_full:0:2", "fp8:1:1") == [
        *(("bf16", 0), ("fp8", 0), ("fp8_full", 0), ("bf16", 1), ("fp8_full", 1), ("fp8", 1)),
    ]
    for wrong in ("bf16", "bf16:1", "bf16:a:1", "bf16:1:-2"):
        with pytest.raises(UserError, match="is not ARMS:FIRST:COUNT"):
            names(wrong)
    with pytest.raises(UserError, match="--then: 'fp9' is no arm"):
        names("fp9:0:1")
    with pytest.raises(UserError, match="--then: 'bf16:1:0' adds no seed"):
        names("bf16:1:0")


def test_a_job_that_always_fails_has_a_line_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_jobs(monkeypatch, steps=1, broken="fp8")
    runs.main(f"smollm2-sums --model m --arms bf16,fp8 --seeds 1 --jobs 2 --seconds 20 --state {tmp_path}".split())
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "lines").glob("*")}
    assert found["smollm2-sums-fp8-0"]["changes"] == [] and found["smollm2-sums-fp8-0"]["of_steps"] == 40
    assert found["smollm2-sums-fp8-0"]["status"] == "failed" and found["smollm2-sums-fp8-0"]["why"] == "it broke"
    assert found["smollm2-sums-bf16-0"]["status"] == "complete"


def test_a_job_that_refuses_its_input_leaves_no_line_and_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_jobs(monkeypatch, steps=1, broken="bf16", ends="refuses")
    words = f"smollm2-sums --model m --arms bf16,fp8 --seeds 2 --jobs 1 --seconds 20 --state {tmp_path}".split()
    with pytest.raises(UserError, match="smollm2-sums-bf16-0 was refused: it broke; the other jobs were not started"):
        runs.main(words)
    assert not (tmp_path / "lines").exists()
    assert [path.read_text() for path in (tmp_path / "logs").iterdir()] == ["it broke\n"], "no job began after it"
    for change in ("--change", "--start-change"):
        with pytest.raises(UserError, match="-1 is out of range"):
            runs.main(["tiny-sums", "--state", str(tmp_path / "new"), change, "trainer.optimizer.lr=-1"])
    assert not (tmp_path / "new").exists()


def test_the_state_travels_in_pieces(tmp_path: Path) -> None:
    state, other = tmp_path / "state", tmp_path / "other"
    job.write_line(state / "lines" / "a.json", {"seed": 1})
    for name, size in (("one", 3000), ("two", 300_000)):
        (state / "starts" / name).mkdir(parents=True)
        (state / "starts" / name / "weights").write_bytes(numpy.random.default_rng(0).bytes(size))
    left_out = runs.pack(state, tmp_path / "packed", limit_mb=0.1, piece_mb=0.001)
    assert left_out == ["starts/two"] and len(list((tmp_path / "packed").iterdir())) > 1
    job.write_line(other / "lines" / "b.json", {"seed": 2})
    runs.unpack(tmp_path / "packed", other)
    assert sorted(path.name for path in (other / "lines").iterdir()) == ["a.json", "b.json"]
    assert (other / "starts/one/weights").read_bytes() == (state / "starts/one/weights").read_bytes()
    assert not (other / "starts/two").exists()
    with pytest.raises(UserError, match="--unpack"):
        runs.unpack(tmp_path / "nothing", other)


def test_a_resumed_job_has_the_same_line_in_another_folder_too(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    lines = []
    for name in ("whole", "cut"):
        state = tmp_path / name
        start = job.start_folder(state, "tiny-sums", 0)
        start.parent.mkdir(parents=True)
        shutil.copytree(model, start)
        job.write_line(start / job.MADE_WITH, {"start_changes": ["seed=7"]})
        if name == "cut":
            recipe = job.arm_recipe(state, "tiny-sums", "fp8_full", 0, None, [*SMALL, "steps=2"])
            train(recipe)
            assert job.has_checkpoint(recipe) and job.steps_done(recipe) == 2
            runs.pack(state, tmp_path / "packed", limit_mb=50, piece_mb=15)
            shutil.rmtree(state)
            state = tmp_path / "moved"
            runs.unpack(tmp_path / "packed", state)
        job.main([str(state), "tiny-sums", "fp8_full", "0", *SMALL])
        (path,) = (state / "lines").iterdir()
        lines.append(json.loads(path.read_text()))
        assert not list((state / "runs").iterdir())
    for line in lines:
        assert line["start_changes"] == ["seed=7"] and "model" not in line
        assert line["status"] == "complete" and line["steps"] == 4 and len(line["rewards"]) == 4
        assert [step for step, _ in line["curve"]] == [2, 4] and line["curve"][-1][1] == line["end/accuracy"]
        for varies in ("seconds", "from", "time/step"):
            del line[varies]
    assert lines[0] == lines[1]


def test_every_arm_of_every_table_is_a_recipe(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    digests = {}
    for name in TABLES:
        for arm in ARMS:
            recipe = job.arm_recipe(tmp_path, name, arm, 0, str(model), [])
            if TABLES[name].start is None:
                policy = precision_policy(model_spec(recipe), recipe.fp8)
                digests[arm] = (policy, recipe.fp8, recipe.algorithm, recipe.trainer.optimizer)
        start = TABLES[name].start
        if start is not None:
            load_recipe(shipped_path(start), list(TABLES[name].start_changes))
        assert set(TABLES[name].arms) <= ARMS.keys() and "bf16" in TABLES[name].arms
    for one in digests:
        twins = [other for other in digests if other != one and digests[other] == digests[one]]
        assert not twins, f"{one} and {twins} are the same arm"
    assert arms.ARMS["fp8_full_last"].for_layers(30)[-1] == "fp8.bf16_last_layers=4"


def test_pairs_are_of_the_same_seed() -> None:
    hard = {seed: 0.1 * seed for seed in range(8)}  # seeds differ much more than arms
    arm = {seed: value + 0.01 + 0.001 * (-1) ** seed for seed, value in hard.items()} | {99: 5.0}
    found = pairs.paired(arm, hard)
    assert found is not None and found.count == 8
    assert found.mean == pytest.approx(0.01) and found.error < 0.001
    assert found.low is not None and found.high is not None and 0.008 < found.low < 0.01 < found.high < 0.012
    few = pairs.paired({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0})
    assert few is not None and few.low is None and few.mean == 1.5
    assert pairs.paired({0: 1.0}, {1: 1.0}) is None


def line_of(arm: str, seed: int, end: float, status: str = "complete") -> dict[str, Any]:
    head: dict[str, Any] = {"commit": "abc", "source_digest": "0", "benchmarks_digest": "0", "date": "2026-01-01"}
    head |= {"machine": "GPU", "versions": {}}
    said = {"table": "tiny-sums", "arm": arm, "seed": seed, "status": status, "seconds": 10.0, "from": head}
    if status == "failed":
        return said | {"why": "collapse"}
    accuracies = {"start/accuracy": 0.5, "end/accuracy": end, "end/accuracy_bf16": end + 0.01}
    return said | accuracies | {"curve": [[15, 0.6], [30, end]], "steps": 30}


def test_the_table_counts_failures_and_passes_the_check_of_figures(tmp_path: Path) -> None:
    lines = [line_of("bf16", seed, 0.8 + 0.01 * seed) for seed in range(5)]
    lines += [line_of("fp8_full", seed, 0.75 + 0.012 * seed) for seed in range(4)]
    lines += [line_of("fp8_full", 4, 0.0, "failed")]
    for line in lines:
        job.write_line(job.line_path(tmp_path, line["table"], line["arm"], line["seed"]), line)
    document = tmp_path / "study.md"
    document.write_text("# A\n\n<!-- study: tiny-sums -->\nold\n<!-- study: end -->\n\nEnd.\n")
    words = f"tiny-sums --state {tmp_path} --out {tmp_path} --pictures {tmp_path} --document {document}"
    table.main(words.split())
    record = json.loads((tmp_path / "study_tiny-sums.json").read_text())
    plain, full = record["rows"]
    assert (plain["seeds"], full["seeds"], full["failed"]) == (5, 4, 1) and record["machine"] == "GPU"
    assert full["difference"] == pytest.approx(-0.047) and full["difference/seeds"] == 4
    assert len(record["lines"]) == 10 and "difference" not in plain
    text = document.read_text()
    assert "old" not in text and text.endswith("End.\n") and "`fp8_full`" in text
    (shown,) = tables(text)
    check_table(shown, record["rows"])
    assert "| arm | seeds | failed |" in text and "| `fp8_full` | 4 | 1 |" in text
    (one, _) = table.rows_of([line_of("bf16", 0, 0.8), line_of("fp8", 0, 0.7)])
    assert one["end/accuracy"] == 0.8 and "end/error" not in one, "one seed has no standard error"
    assert "| seeds | start |" in table.document_table("tiny-sums", {**record, "rows": [{**plain}]})
    assert (tmp_path / "study_tiny-sums.svg").read_text().count("<polyline") == 5 + 4 + 2
    with pytest.raises(UserError, match="no lines"):
        table.put_table("", "tiny-sums", "")


def test_jobs_of_different_trees_are_marked() -> None:
    lines = [line_of("bf16", 0, 0.8), line_of("bf16", 1, 0.8)]
    assert table.where_measured(lines)["commit"] == "abc"
    lines[1]["from"]["source_digest"] = "1"
    assert table.where_measured(lines)["commit"].endswith("-dirty")


def test_lines_of_some_arms_alone(tmp_path: Path) -> None:
    for line in (line_of("bf16", 0, 0.8), line_of("fp8", 0, 0.7), line_of("fp8_full_k", 0, 0.6)):
        job.write_line(job.line_path(tmp_path, "tiny-sums", line["arm"], 0), line)
    assert [line["arm"] for line in table.read_lines(tmp_path, "tiny-sums")] == ["bf16", "fp8", "fp8_full_k"]
    found = table.read_lines(tmp_path, "tiny-sums", "fp8_full_k,bf16")
    assert [line["arm"] for line in found] == ["bf16", "fp8_full_k"]
    for asked, why in (("fp9", "'fp9' is no arm"), ("fp8_full_v", "no line of table 'tiny-sums' and these arms")):
        with pytest.raises(UserError, match=why):
            table.read_lines(tmp_path, "tiny-sums", asked)


def test_lines_join_a_result_whose_starts_are_equal(tmp_path: Path) -> None:
    path = table.save("x", [line_of("bf16", 0, 0.8), line_of("fp8", 0, 0.7)], tmp_path)
    new = [line_of("bf16", 0, 0.8), line_of("bf16_kv_int8", 0, 0.6), line_of("bf16", 1, 0.9)]
    both = table.joined(new, path)
    found = [(line["arm"], line["seed"]) for line in both]
    assert found == [("bf16", 0), ("bf16", 1), ("fp8", 0), ("bf16_kv_int8", 0)]
    assert table.where_measured(both)["commit"] == "abc"
    assert table.rows_of(both)[2]["difference/seed_0"] == pytest.approx(-0.2)
    for others, why in ((new[1:2], "no arm in common"), ([line_of("bf16", 0, 0.81)], "bf16 learns otherwise")):
        with pytest.raises(UserError, match=f"other starts in seed 0: .*{why}"):
            table.joined(others, path)


def test_lines_of_a_pretrained_model_join_by_its_accuracy_before_training(tmp_path: Path) -> None:
    def pretrained(arm: str, start: float | None) -> dict[str, Any]:
        return line_of(arm, 0, 0.8) | {"table": "smollm2-sums", "start/accuracy_bf16": start}

    path = table.save("x", [pretrained("bf16", 0.5)], tmp_path)
    assert [line["arm"] for line in table.joined([pretrained("fp8", 0.5)], path)] == ["bf16", "fp8"]
    failed = line_of("fp8_rollout", 0, 0.0, "failed") | {"table": "smollm2-sums"}
    assert len(table.joined([pretrained("fp8", 0.5), failed], path)) == 3
    for start in (numpy.nextafter(0.5, 1.0), None):
        with pytest.raises(UserError, match="seed 0: held-out accuracy of the start in BF16 is"):
            table.joined([pretrained("fp8", start)], path)
    with pytest.raises(UserError, match="no arm in common"):
        table.joined([pretrained("fp8", 0.5) | {"table": "tiny-sums"}], path)


@pytest.mark.parametrize("name", probe.CANDIDATES)
def test_candidates_are_tasks_whose_answers_are_numbers(name: str) -> None:
    import reasoning_gym  # only now: two seconds in each process that collects tests

    dataset, parameters = probe.CANDIDATES[name]
    for entry in reasoning_gym.create_dataset(dataset, size=4, seed=0, **parameters):
        assert float(entry["answer"]) == float(entry["answer"])
