"""`octetrl doctor --backend vllm` over a double of vLLM: differences by place, where they begin, what they come from.

The double is no model: its log-probs are those of a test. tests/gpu/vllm_doctor.py runs the doctor on vLLM itself.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.cli.main import run_command
from octetrl.config.schema import Recipe
from octetrl.doctor.examine import Examination, ExaminedWorker, samples_of
from octetrl.doctor.other_engine import (
    CACHE,
    LINEARS,
    ONE_SCALE,
    REST,
    Departures,
    Summary,
    _summary,
    by_precision,
    examine_other,
    precision_lines,
    precisions_of,
    replays_of,
    summary_of,
)
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.trainer.forward import KVReplay
from tests.e2e import tiny_run
from tests.unit.backends.vllm_double import Request, VllmDouble, tensors_of

SMALL = Examination(prompts=2, sequences=2, answer_tokens=6)


class SayingDouble(VllmDouble):
    """Its n-th token has the n-th of `logprobs`, counted by request and place; -1 without them."""

    logprobs: Tensor | None = None

    def logprob(self, one: Request, token: int) -> float:
        if self.logprobs is None:
            return -1.0
        prompt, sibling = one.name.removeprefix("prompt ").split("#")
        return float(self.logprobs[int(prompt) * SMALL.sequences + int(sibling), len(one.out) - 1])


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> list[SayingDouble]:
    """The doubles that workers are built with, the last one last. Nothing else of the CPU is refused."""
    built: list[SayingDouble] = []

    def build(recipe: Recipe, spec: ModelSpec, *, policy: PrecisionPolicy, tokenizer: Any, **_: Any) -> VllmBackend:
        shapes = Decoder(spec, policy, "train", device="meta", backend="emulated")
        ours = {name: one.detach() for name, one in shapes.named_parameters()}
        built.append(SayingDouble(tensors_of(spec, policy, ours), vocab_size=spec.vocab_size, num_pages=256))
        context = recipe.model.context_length
        settings: dict[str, Any] = {"config": recipe.engine, "context_length": context, "tokenizer": tokenizer}
        return VllmBackend(built[-1], spec=spec, policy=policy, **settings)

    monkeypatch.setattr("octetrl.workers.build_engine.build_vllm", build)
    monkeypatch.setattr("octetrl.config.rules_shape.BLOCK", 1)
    return built


def recipe_of(model: Path, precision: str) -> Recipe:
    recipe = tiny_run.tiny_recipe(model, model.parent / "run", {"precision": precision})
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "vllm"})})


def logprobs_of(subject: ExaminedWorker, drawn: Any, replay: KVReplay) -> Tensor:
    return subject.logprobs_of(samples_of(subject.prompts, drawn), subject.worker.layout, replay)


def trainer_of(subject: ExaminedWorker, hear: Callable[[Any], Tensor]) -> Tensor:
    """What the trainer computes of the double's tokens, [sequences, tokens]."""
    return hear(subject.worker.engine.generate(subject.requests())).view(-1, SMALL.answer_tokens)


# ---------------------------------------------------------------- numbers against hand-written ones


def test_places_and_the_first_above() -> None:
    difference = torch.zeros(2, 9)
    difference[1, 4], difference[0, 6], difference[0, 0] = 0.5, 1.0, 0.05
    same_place = difference.clone()
    same_place[0, 4] = 0.3
    trainer = torch.full((2, 9), -2.0)
    found = Departures(
        engine_N=(trainer + difference).flatten(),
        trainer_N=trainer.flatten(),
        place_N=torch.arange(9).repeat(2),
        sequence_N=torch.arange(2).repeat_interleave(9),
        token_N=torch.arange(18),
    )
    rows = list(found.by_place())
    assert [(begin, end, count) for begin, end, count, _, _ in rows] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 3, 4),
        (4, 7, 8),
        (8, 8, 2),
    ]
    assert sum(count for _, _, count, _, _ in rows) == 18
    assert [round(mean, 6) for _, _, _, mean, _ in rows] == [0.025, 0, 0, 0.1875, 0]
    assert [round(largest, 6) for *_, largest in rows] == [0.05, 0, 0, 1, 0]
    assert found.first_above(0.1) == 9 + 4, "the earliest place, not the first sequence"
    assert found.first_above(0.6) == 6 and found.first_above(2.0) is None
    # rows of the second sequence come first here
    turned = {name: getattr(found, name).flip(0) for name in ("place_N", "sequence_N", "token_N")}
    both = replace(found, engine_N=(trainer + same_place).flatten().flip(0), **turned)
    assert both.first_above(0.1) == 17 - 4, "of several at one place the first sequence's"
    assert found.mean == pytest.approx(1.55 / 18) and found.largest == 1.0
    error = found.metrics["mismatch/token_mult_prob_error"]
    assert error == pytest.approx((14 + 1 + math.exp(0.05) + math.exp(0.5) + math.e) / 18, rel=1e-6)


# ---------------------------------------------------------------- a worker with the double


def test_a_difference_is_found_where_it_begins(model: Path, doubles: list[SayingDouble]) -> None:
    subject = ExaminedWorker(recipe_of(model, "fp8_full"), SMALL)
    own = trainer_of(subject, lambda drawn: subject.trainer_ends(drawn)[0].logprobs_N)
    doubles[0].logprobs = own.clone()
    near = examine_other(subject, bound=0.1)
    assert near.departures.largest == 0 and near.is_near and near.replays["as it trains"] == 0
    assert "no difference is above 0.1" in list(near.lines())
    assert near.replays["not quantised"] > 0 and near.replays[ONE_SCALE] > 0
    doubles[0].logprobs[2, 3] += 0.25
    doubles[0].logprobs[1, 4] -= 0.5
    far = examine_other(subject, bound=0.1)
    assert far.departures.largest == pytest.approx(0.5, abs=1e-6)
    (line,) = [line for line in far.lines() if line.startswith("first above 0.1: ")]
    assert "sequence 2, place 3 of the answer" in line and line.endswith("; 2 tokens")
    assert not far.is_near and "(a run warns at 1.03)" in list(far.lines())[-1]


def test_an_engine_with_one_scale_a_layer_is_recognised(model: Path, doubles: list[SayingDouble]) -> None:
    subject = ExaminedWorker(recipe_of(model, "fp8_full"), SMALL)
    replay = dict(replays_of(subject.kv, subject.worker.kv_scales, subject))[ONE_SCALE]
    scale_LS, own_LS = replay.kv_scale_LS, subject.kv.kv_scale_LS
    assert scale_LS is not None and own_LS is not None
    half = scale_LS.shape[1] // 2
    for part in (slice(None, half), slice(half, None)):
        assert torch.equal(scale_LS[:, part], own_LS[:, part].amax(1, keepdim=True).expand(-1, half))
    doubles[0].logprobs = trainer_of(subject, lambda drawn: logprobs_of(subject, drawn, replay))
    found = examine_other(subject, bound=0.1)
    assert found.replays[ONE_SCALE] == 0 < min(found.replays["as it trains"], found.replays["not quantised"])


def test_the_other_engine_sleeps_while_the_trainer_computes(
    model: Path, doubles: list[SayingDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the trainer would have no memory otherwise."""
    subject = ExaminedWorker(recipe_of(model, "bf16"), SMALL)
    ends, awake = subject.trainer_ends, []

    def noted(drawn: Any) -> Any:
        awake.append(set(doubles[0].awake))
        return ends(drawn)

    monkeypatch.setattr(subject, "trainer_ends", noted)
    examine_other(subject, bound=0.1)
    assert awake == [set()]


def test_in_bf16_there_is_no_cache_to_replay(model: Path, doubles: list[SayingDouble]) -> None:
    assert examine_other(ExaminedWorker(recipe_of(model, "bf16"), SMALL), bound=0.1).replays == {}


# ---------------------------------------------------------------- other precisions


def summary(mean: float, largest: float) -> Summary:
    return Summary("title", ("a line",), True, mean, largest)


def test_precisions_are_built_up_from_bf16(model: Path, doubles: list[SayingDouble]) -> None:
    def fp8_of(precision: str) -> list[tuple[str, bool, bool, str]]:
        steps = precisions_of(recipe_of(model, precision))
        return [(name, one.fp8.rollout, one.fp8.train, one.fp8.kv_cache) for name, one in steps]

    assert fp8_of("bf16") == [(REST, False, False, "none")]
    assert fp8_of("fp8_rollout") == [(REST, False, False, "none"), (LINEARS, True, False, "none")]
    full = [(REST, False, False, "none"), (LINEARS, True, True, "none"), (CACHE, True, True, "calibrated")]
    assert fp8_of("fp8_full") == full
    whole = summary(0.5, 1.0)
    found = by_precision(recipe_of(model, "fp8_full"), whole, lambda recipe: summary_of(recipe, SMALL, 0.1))
    assert [name for name, _ in found] == [REST, LINEARS, CACHE] and found[-1][1] == whole
    assert [bool(double.cached[0].any()) for double in doubles] == [True, True], "neither has an FP8 cache to clear"


def test_what_travels_between_processes_arrives(model: Path) -> None:
    """The processes themselves run in tests/gpu/vllm_doctor.py: each costs seconds of imports."""
    recipe = recipe_of(model, "fp8_full")
    sent = (_summary, "r.yaml", recipe, SMALL, 0.1, summary(0.5, 1.0))
    assert pickle.loads(pickle.dumps(sent)) == sent
    refused = pickle.loads(pickle.dumps(UserError("engine.backend: no room")))
    assert isinstance(refused, UserError) and str(refused) == "engine.backend: no room"


def test_shares_add_up() -> None:
    steps = [(REST, summary(0.01, 0.2)), (LINEARS, summary(0.03, 0.3)), (CACHE, summary(0.04, 0.3))]
    lines = list(precision_lines(steps))[1:]
    assert [line.split("of the recipe")[0].split()[-1] for line in lines] == ["25.0%", "50.0%", "25.0%"]
    assert "0.0% of" in list(precision_lines([(REST, summary(0.0, 0.0))]))[1]


# ---------------------------------------------------------------- the command


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    tree = tiny_run.recipe_tree(model, tmp_path / "run", {"precision": "bf16", "cluster.device": "auto"})
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_the_command(
    recipe: str, doubles: list[SayingDouble], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("octetrl.cli.doctor.backend_problems_here", lambda *_: [])
    size = ["--prompts", "2", "--sequences", "2", "--answer-tokens", "6"]
    assert run_command(["doctor", recipe, "--backend", "vllm", "--bound", "0.5", *size]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("; vllm, of which equality is not promised")
    assert lines[1] == "log-probs of 24 drawn tokens, engine against trainer"
    assert [line.split()[0] for line in lines[3:6]] == ["0", "1", "2"] and lines[-1].startswith("mean ")
    assert any(line.startswith("first above 0.5: sequence 0, place 0") for line in lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--backend", "vllm"], "engine.backend: vllm needs an NVIDIA GPU, and this machine has none"),
        (["--backend", "vllm", "cluster.device=cpu"], "cluster.device: cpu"),
        (["engine.backend=openai", "engine.openai.base_url=http://h/v1", "engine.openai.model=m"], "openai answers"),
    ],
)
def test_what_cannot_be_examined_here(
    recipe: str, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert run_command(["doctor", recipe, *words]) == 2
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1
