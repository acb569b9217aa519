"""Training steps whose rollouts come from vLLM's adapter over a double: conversations, sleep, publish, evaluation.

The double's log-probs are no model's, so nothing is learnt and mismatch is large.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.run.build import build_run
from octetrl.run.evaluate import evaluate
from octetrl.workers.worker import Worker
from tests.e2e.test_turns import TALK
from tests.e2e.tiny_run import make_model, tiny_recipe
from tests.unit.backends.vllm_double import VllmDouble, tensors_of
from tests.unit.workers.many.thread_team import steps_of


class AwakeDouble(VllmDouble):
    """Counts how often it slept."""

    sleeps = 0

    def sleep(self, level: int = 1) -> None:
        self.sleeps += 1
        super().sleep(level)


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> list[AwakeDouble]:
    """The doubles of the workers that are built. A worker on the CPU sleeps while it trains, as one on a GPU does."""
    built: list[AwakeDouble] = []

    def build(recipe: Recipe, spec: ModelSpec, *, policy: PrecisionPolicy, tokenizer: Any, **_: Any) -> VllmBackend:
        shapes = Decoder(spec, policy, "train", device="meta", backend="emulated")
        ours = {name: one.detach() for name, one in shapes.named_parameters()}
        context = recipe.model.context_length
        how = {"vocab_size": spec.vocab_size, "num_pages": 256, "max_model_len": context}
        built.append(AwakeDouble(tensors_of(spec, policy, ours), **how))
        settings: dict[str, Any] = {"config": recipe.engine, "context_length": context, "tokenizer": tokenizer}
        return VllmBackend(built[-1], spec=spec, policy=policy, **settings)

    monkeypatch.setattr("octetrl.workers.build_engine.build_vllm", build)
    monkeypatch.setattr("octetrl.config.validate_backend.BLOCK", 1)  # the tiny model has fewer rows
    monkeypatch.setattr(Worker, "free_cache", lambda worker: worker.engine.sleep())
    return built


@pytest.mark.parametrize("changes", [{}, TALK, {"precision": "fp8_rollout"}], ids=["answers", "turns", "fp8 rollout"])
def test_steps_and_an_evaluation(changes: dict[str, Any], doubles: list[AwakeDouble], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=False)
    recipe = tiny_recipe(model, tmp_path / "run", {"steps": 3, **changes})
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": "vllm"})})
    run = build_run(recipe)
    try:
        drawn, lines = steps_of(run, 2)
        report = evaluate(run)
    finally:
        run.close()
    (double,) = doubles
    for step, groups in enumerate(drawn):
        turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
        assert {turn.completion.policy_version for turn in turns} == {step}
        assert len({turn.completion.token_ids for turn in turns}) > len(turns) // 2, "siblings have seeds of their own"
        if changes is TALK:
            assert any(len(rollout.turns) > 1 for group in groups for rollout in group.rollouts)
    assert all("mismatch/unequal_tokens" not in line and line["mismatch/tokens"] > 0 for line in lines)
    assert lines[-1]["publish/policy_version"] == 2.0
    assert not double.requests and double.sleeps >= 3, "as it starts, and for each update"
    held = {t.completion.policy_version for g in report.groups for r in g.rollouts for t in r.turns}
    assert held == {2}
