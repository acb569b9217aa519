"""A run in every precision and with every option: what it leaves in its folder, and what its metrics must say.

On a CPU the forward rounds where the GPU does and sums without loss, so an engine and a trainer with the same numerics
agree to the last bit: a mismatch other than 0 under `bf16`, `fp8` or `fp8_full` is a bug, however small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.fp8.quantize import quantize_weight_reference
from octetrl.layers.linear import Float8Linear
from octetrl.run import loop
from octetrl.run.build import build_run
from octetrl.run.loop import one_step, train
from octetrl.run.state import Run
from octetrl.system.errors import RunFailed
from octetrl.telemetry.glossary import explained
from octetrl.telemetry.metrics import MISMATCH
from octetrl.telemetry.mismatch import MismatchError
from octetrl.telemetry.report import report_page
from octetrl.telemetry.report_data import read_run
from octetrl.trainer import checkpoint
from octetrl.workers.team import WorkerLost
from tests.e2e.tiny_run import make_model, read_lines, run, timeless, tiny_recipe

PRECISIONS = ("bf16", "fp8_rollout", "fp8", "fp8_full")
METRICS = {
    "reward/mean",
    "reward/std",
    "rollout/tokens_per_second",
    "rollout/mean_length",
    "train/tokens_per_second",
    "time/step",
    "time/rollout",
    "time/train",
    "time/publish",
    "loss",
    "grad_norm",
    "entropy",
    "correction/clip_fraction",
    "correction/mean_weight",
    "mismatch/token_mult_prob_error",
    "mismatch/gen_kl",
    "mismatch/max_abs_diff",
    "mismatch/importance_ratio",
}
Finished = Callable[[str], Path]
Lines = list[dict[str, Any]]


def of(lines: Lines, name: str) -> list[float]:
    return [line[name] for line in lines]


# --- the run folder -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_run_leaves_a_whole_folder(precision: str, finished: Finished, model: Path) -> None:
    folder = finished(precision)
    saved = load_recipe(folder / "config.yaml")
    assert saved == tiny_recipe(
        model, folder, {"precision": precision, "checkpoint.every": 1, "logging.tensorboard": True}
    )
    parity = json.loads((folder / "run.json").read_bytes())["parity"]
    assert parity == ("measured" if precision == "fp8_rollout" else "promised")
    lines = read_lines(folder / "metrics.jsonl")
    assert of(lines, "step") == [1, 2, 3]
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == [f"step_00000{n}.jsonl" for n in (1, 2, 3)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step_000002", "step_000003"]
    assert checkpoint.load(folder / "checkpoints" / "step_000003").step == 3
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_step_has_the_metrics_that_are_promised(precision: str, finished: Finished) -> None:
    promised = METRICS | ({"fp8/kv_saturation", "time/calibrate"} if precision == "fp8_full" else set())
    for line in read_lines(finished(precision) / "metrics.jsonl"):
        assert [name for name in line if name != "step" and explained(name) is None] == [], "not in docs/metrics.md"
        assert promised | {"time/checkpoint"} <= line.keys()  # of the step itself: every step is saved
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in line.values()), line
    assert line["checkpoint/write_seconds"] > 0 and line["checkpoint/gb_per_second"] > 0


def test_rollouts_say_what_was_sampled(finished: Finished) -> None:
    folder = finished("fp8_full")
    metrics = read_lines(folder / "metrics.jsonl")
    for step in (1, 2, 3):
        rows = read_lines(folder / "rollouts" / f"step_{step:06d}.jsonl")
        assert [row["sibling"] for row in rows] == [0, 1, 2, 3] * 2
        assert {row["policy_version"] for row in rows} == {step - 1}
        assert sum(row["reward"] for row in rows) / 8 == pytest.approx(metrics[step - 1]["reward/mean"])
        for row in rows:
            assert row["prompt"] and row["answer"] and row["prompt_token_ids"]
            assert len(row["token_ids"]) == len(row["logprobs"]) <= 12
            assert all(logprob < 0 for logprob in row["logprobs"])
            assert row["status"] == ("truncated" if row["finish_reason"] == "length" else "scored")
        assert len({row["task_id"] for row in rows}) == 2
        assert len({row["text"] for row in rows}) == 8


# --- both sides see one policy ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_full"])
def test_equal_numerics_have_no_mismatch(precision: str, finished: Finished) -> None:
    lines = read_lines(finished(precision) / "metrics.jsonl")
    assert of(lines, "mismatch/max_abs_diff") == [0.0] * 3
    assert of(lines, "mismatch/equal_fraction") == [1.0] * 3
    assert of(lines, "correction/mean_weight") == [1.0] * 3


def test_fp8_in_the_rollout_alone_has_a_mismatch(finished: Finished) -> None:
    lines = read_lines(finished("fp8_rollout") / "metrics.jsonl")
    assert all(0.001 < value < 0.1 for value in of(lines, "mismatch/max_abs_diff"))
    assert all(1.0005 < value < 1.03 for value in of(lines, "mismatch/token_mult_prob_error"))


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("two") / "model", num_hidden_layers=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp8", "fp8.kv_cache": "dynamic"},
        {"fp8.calibration": "exact", "rollout.temperature": 0.7},
        {"fp8.power_of_two": True, "trainer.logprob_chunk": 5, "trainer.tokens_per_micro_batch": 100},
        {"fp8.bf16_first_layers": 1, "fp8.ignore": ["*.down_proj"]},
        {"engine.prefill_chunk": 16, "engine.max_batch": 3, "engine.kv_cache_tokens": 256},
    ],
)
def test_no_mismatch_whatever_the_options(changes: dict[str, Any], two_layers: Path, tmp_path: Path) -> None:
    lines = run(two_layers, tmp_path / "run", {"steps": 2, **changes})
    assert of(lines, "mismatch/max_abs_diff") == [0.0] * 2
    assert all(value > 0 for value in of(lines, "grad_norm"))


def test_a_trainer_that_does_not_replay_the_cache_has_a_mismatch(model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", {"fp8.kv_replay": False, "steps": 2})
    assert all(0 < value < 0.1 for value in of(lines, "mismatch/max_abs_diff"))


QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": False}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.mark.parametrize("config", [QWEN2, LLAMA], ids=["qwen2", "llama"])
def test_the_other_families(config: dict[str, Any], tmp_path: Path) -> None:
    """Qwen2's K stays BF16 in an FP8 cache."""
    model = make_model(tmp_path / "model", **config)
    lines = run(model, tmp_path / "run", {"steps": 2})
    assert of(lines, "mismatch/max_abs_diff") == [0.0] * 2
    assert len(set(of(lines, "grad_norm"))) == 2


def test_the_gate_stops_a_run_and_its_line_is_written(model: Path, tmp_path: Path) -> None:
    changes = {"precision": "fp8_rollout", "mismatch.fail_above": 1.001}
    with pytest.raises(MismatchError, match=r"step 1: .* above mismatch\.fail_above=1\.001"):
        run(model, tmp_path / "run", changes)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1]
    ended = json.loads((tmp_path / "run" / "run.json").read_text())["ended"]
    assert ended["how"] == "failed" and "above mismatch.fail_above=1.001" in ended["why"]
    assert "the run failed: step 1: " in (tmp_path / "run" / "report.html").read_text(), "written after it"


def test_a_finished_run_stays_finished(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes after its last step, also in a resumed run without a step left."""

    def interrupted(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    folder, resumed = tmp_path / "run", tiny_recipe(model, tmp_path / "run", {"steps": 1})
    for name, resume in (("last_screen", False), ("last_screen", True), ("restore", True), ("banner", True)):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(loop, name, interrupted)
            train(resumed, resume=resume)
        assert json.loads((folder / "run.json").read_text())["ended"] == {"how": "finished", "why": ""}, name


def test_an_error_while_lost_workers_are_built_again_is_the_ending(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []

    def read_ending() -> object:
        return json.loads((tmp_path / "run" / "run.json").read_text())["ended"]

    def lose(*_: object) -> NoReturn:
        raise WorkerLost("worker 1 was lost")

    def build(recipe: Recipe, **given: Any) -> Run:
        if (tmp_path / "run" / "run.json").exists():
            ended.append(read_ending())
            raise RunFailed("no worker is left")
        return build_run(recipe, **given)

    recipe = tiny_recipe(model, tmp_path / "run", {"steps": 2})
    recipe = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update={"max_restarts": 1})})
    monkeypatch.setattr(loop, "one_step", lose)
    monkeypatch.setattr(loop, "build_run", build)
    with pytest.raises(RunFailed, match="no worker is left"):
        train(recipe)
    assert ended == [None], "it is live while it is built again"
    assert read_ending() == {"how": "failed", "why": "no worker is left"}


# --- published weights --------------------------------------------------------------------------------------


@pytest.fixture
def live(model: Path, tmp_path: Path) -> Iterator[Run]:
    """A run in FP8 end to end, before its first step."""
    run = build_run(tiny_recipe(model, tmp_path / "run", {"fp8.kv_cache": "dynamic"}))
    yield run
    run.close()


def test_the_engine_reads_what_the_trainer_quantised(live: Run) -> None:
    digests = set()
    for step in (1, 2):
        one_step(live, step)
        worker = live.workers.worker
        trainer_linears = dict(worker.trainer_model.float8_linears())
        for name, linear in worker.engine_model.float8_linears():
            theirs = trainer_linears[name]
            assert linear.codes.data_ptr() == theirs.codes.data_ptr()
            codes, scale = quantize_weight_reference(theirs.weight.detach())
            assert torch.equal(linear.codes.view(torch.uint8), codes.view(torch.uint8))
            assert torch.equal(linear.scale, scale)
        assert worker.engine.policy_version == worker.trainer.policy_version == step
        digests.add(live.workers.publish(step).weights_digest)
    assert len(digests) == 2


def test_a_stale_code_stops_the_run(live: Run) -> None:
    one_step(live, 1)
    linears: list[tuple[str, Float8Linear]] = list(live.workers.worker.engine_model.float8_linears())
    name, linear = linears[2 % len(linears)]
    linear.codes.view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(RuntimeError, match=rf"publish: the engine's '{name}' differs .* policy version 2"):
        live.workers.publish(2)


def test_lost_scales_stop_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build_run(tiny_recipe(model, tmp_path / "run"))
    try:
        worker = run.workers.worker
        worker.calibrate([[1, 2, 3]])
        monkeypatch.setattr(worker.engine, "set_kv_scales", lambda scales: None)
        with pytest.raises(RuntimeError, match="KV scales are not those published with policy version 1"):
            one_step(run, 1)
    finally:
        run.close()


def test_a_checkpoint_holds_the_scales_of_its_weights(finished: Finished) -> None:
    saved = checkpoint.load(finished("fp8_full") / "checkpoints" / "step_000003")
    scales = saved.tensors("kv_scales.safetensors")
    assert int(scales["policy_version"]) == saved.json("cursor.json")["policy_version"] == 3
    assert scales["k_scale"].shape == scales["v_scale"].shape == (1, 2)
    assert bool((scales["k_scale"] > 0).all())


# --- the trainer's options ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """The tiny recipe as it stands."""
    return run(model, tmp_path_factory.mktemp("plain") / "run")


def test_the_same_seed_gives_the_same_run(plain: Lines, finished: Finished, model: Path, tmp_path: Path) -> None:
    assert timeless(read_lines(finished("fp8_full") / "metrics.jsonl")) == timeless(plain)
    other = run(model, tmp_path / "run", {"seed": 4, "steps": 1})
    assert of(other, "reward/mean")[0] != of(plain, "reward/mean")[0]


def test_neither_activation_checkpointing_nor_codes_made_anew_change_anything(
    plain: Lines, model: Path, tmp_path: Path
) -> None:
    changes = {"trainer.activation_checkpointing": "layer", "trainer.weight_codes": "remade"}
    assert timeless(run(model, tmp_path / "run", changes)) == timeless(plain)


def test_several_updates_a_step(plain: Lines, model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", {"trainer.minibatches": 2, "trainer.epochs": 2})
    assert of(lines, "train/updates") == [4.0] * 3
    assert of(lines, "mismatch/max_abs_diff") == [0.0] * 3
    assert of(lines, "publish/policy_version") == [1.0, 2.0, 3.0]
    assert of(lines, "reward/mean")[0] == of(plain, "reward/mean")[0]  # drawn by the same weights
    assert of(lines, "loss")[0] != of(plain, "loss")[0]
    assert any(value > 0 for value in of(lines, "ratio/clip_fraction"))  # the policy moved between the updates
    assert of(plain, "ratio/clip_fraction") == [0.0] * 3


def test_kl_to_the_weights_the_run_began_with(model: Path, tmp_path: Path) -> None:
    changes = {"steps": 2, "precision": "fp8", "algorithm.kl_coefficient": 0.1, "algorithm.kl_estimator": "k3"}
    lines = run(model, tmp_path / "run", changes)
    assert of(lines, "kl")[0] == 0.0
    assert all(value > 0.0 for value in of(lines, "kl")[1:])


def test_stochastic_rounding_keeps_no_masters(plain: Lines, model: Path, tmp_path: Path) -> None:
    changes = {"trainer.optimizer.master": "stochastic_rounding", "steps": 2}
    first, second = (run(model, tmp_path / name, changes) for name in ("first", "second"))
    assert timeless(first) == timeless(second)
    assert of(first, "grad_norm")[0] == of(plain, "grad_norm")[0]
    assert of(first, "grad_norm")[1] != of(plain, "grad_norm")[1]
    saved = tmp_path / "first" / "checkpoints" / "step_000002"
    parameters = load_file(saved / "model.safetensors")
    state = checkpoint.load(saved).tensors("optimizer.safetensors")
    assert not any(name.startswith("master") for name in state)
    assert all(tensor.dtype == torch.bfloat16 for tensor in parameters.values())


def test_evaluation_during_a_run_changes_nothing_else(plain: Lines, model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", {"evaluation.every": 2})
    assert ["eval/accuracy" in line for line in lines] == [False, True, False]
    assert lines[1]["eval/tasks"] == 4
    without = [{name: value for name, value in line.items() if not name.startswith("eval/")} for line in lines]
    assert timeless(without) == timeless(plain)


# --- SFT ----------------------------------------------------------------------------------------------------


def sft_recipe(model: Path, folder: Path, **changes: Any) -> Recipe:
    examples = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(9)]
    (folder / "worked.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    sft = {
        "precision": "fp8",
        "algorithm": {"name": "sft", "conversations": str(folder / "worked.jsonl"), "batch_size": 4},
        "trainer.optimizer.lr": 1e-2,
        "steps": 20,
    }
    return tiny_recipe(model, folder / "run", {**sft, **changes})


def test_sft_learns(model: Path, tmp_path: Path) -> None:
    train(sft_recipe(model, tmp_path))
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 20
    assert of(lines, "loss")[-1] < 0.5 * of(lines, "loss")[0]
    assert not any(name.startswith(("reward/", "rollout/", "mismatch/")) for line in lines for name in line)


def test_a_mismatch_in_every_step_is_told_once(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"precision": "fp8_rollout", "mismatch.warn_above": 1.0001, "steps": 6, "logging.console": "plain"}
    run(model, tmp_path / "run", changes)
    errors = [line[MISMATCH] - 1 for line in read_lines(tmp_path / "run/metrics.jsonl")]
    assert min(errors) > 0.0001, "every step is above the limit"
    said = capsys.readouterr()
    assert said.err.count("above mismatch.warn_above=1.0001.") == 1 and "Raise mismatch.warn_above if" in said.err
    worst, times = errors[0], 0
    for error in errors[1:]:
        if error > 1.1 * worst:
            worst, times = error, times + 1
    assert said.err.count("has risen to") == times < 5
    assert f"{MISMATCH} above mismatch.warn_above=1.0001 in 6 of 6 steps, at most" in said.out
    page = report_page([read_run(tmp_path / "run")])
    assert "engine and trainer disagree by more than 0.01%" in page and "<td>workers</td>" in page
