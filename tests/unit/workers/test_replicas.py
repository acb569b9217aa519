"""Generating and serving on several workers: the completions of one, and what happens if one of them fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import octetrl
from octetrl.cli.main import run_command
from octetrl.config.schema import ClusterConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.models.weight_files import SINGLE
from octetrl.records import SamplingParams
from octetrl.run import device
from octetrl.run.generate import generate_text
from octetrl.trainer.peers import ALONE
from tests.e2e.live_server import Live, live_server
from tests.unit.workers.thread_team import ThreadTeam

TWO = {"cpus": 2, "cpu_threads": 1}
PROMPTS = ["3 + 1 =", "hello", "a much longer prompt than the other two"]


def submitted_to(team: ThreadTeam) -> set[int]:
    return {worker for worker, verb in team.begun if verb == "submit"}


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_text_and_log_probs_are_those_of_one_worker(precision: str, model: Path, teams: list[ThreadTeam]) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    [one, two] = (
        generate_text(str(model), PROMPTS, sampling, precision=precision, cluster=cluster, seed=3, n=3)
        for cluster in ({"device": "cpu"}, TWO)
    )
    assert one == two
    assert submitted_to(teams[0]) == {0, 1}
    whole = (model / SINGLE).stat().st_size
    for worker in teams[0].workers:
        assert worker._loaded.read_bytes < 0.75 * whole, "the workers load the model together"
        assert worker._policy.peers is ALONE and worker.state().link_gb_per_second == 0.0, "and then go on alone"


def test_the_library_and_a_worker_that_is_lost(model: Path, teams: list[ThreadTeam]) -> None:
    sampling = octetrl.SamplingParams(n=4, max_tokens=6, seed=1)
    expected = octetrl.LLM(model, device="cpu").generate(PROMPTS, sampling)
    llm = octetrl.LLM(model, cluster=TWO)
    assert llm.generate(PROMPTS, sampling) == expected

    def lose(*_: Any) -> None:
        raise teams[0].lose(1, "rollout", 0.0, "its process died")

    teams[0].workers[1].submit = lose  # type: ignore[method-assign]
    with pytest.raises(octetrl.RunFailed, match="worker 1 was lost"):
        llm.generate(PROMPTS, sampling)
    assert llm.generate(PROMPTS, sampling) == expected  # by new workers
    assert len(teams) == 2
    llm.close()


@pytest.fixture
def live(model: Path, teams: list[ThreadTeam]) -> Iterator[Live]:
    with live_server(model, cluster=TWO, max_batch=2, kv_cache_tokens=512) as server:
        yield server


def test_a_server_of_two_replicas(live: Live, model: Path, teams: list[ThreadTeam]) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS, "n": 3, "max_tokens": 12, "seed": 5, "logprobs": 0}
    together = live.client().completions.create(**asked)
    with live_server(model, max_batch=2) as one:
        alone = one.client().completions.create(**asked)
    assert [(choice.text, choice.logprobs) for choice in together.choices] == [
        (choice.text, choice.logprobs) for choice in alone.choices
    ]
    assert submitted_to(teams[0]) == {0, 1}
    streamed = live.client().completions.create(**asked | {"prompt": PROMPTS[0], "n": 1}, stream=True)
    assert "".join(part.choices[0].text for part in streamed) == together.choices[0].text
    live.until(lambda: live.pages_in_use == 0)
    engine = live.intake.engine
    assert engine.num_pages == 8  # of 128 tokens
    session = engine._session
    assert session is not None and session.metrics().completions == 10  # type: ignore[union-attr]


def test_replicas_follow_grammars(live: Live, teams: list[ThreadTeam]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body: dict[str, Any] = {"model": "tiny", "prompt": "1", "n": 4, "max_tokens": 100, "response_format": form}
    answer = httpx.post(f"{live.url}/v1/completions", json=body | {"seed": 5}, timeout=60)
    assert answer.status_code == 200, answer.text
    ended = [choice["text"] for choice in answer.json()["choices"] if choice["finish_reason"] == "stop"]
    assert len(ended) >= 2 and all(json.loads(text)["a"] in (1, 2) for text in ended)
    assert submitted_to(teams[0]) == {0, 1}
    form["json_schema"] = {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "nothing"}}}}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "the schema can't be followed" in answer.text


def test_an_error_of_one_replica_fails_its_requests_and_the_next_ones_are_served(
    live: Live, teams: list[ThreadTeam]
) -> None:
    runner = teams[0].workers[1]._policy.engine._runner
    launch = runner.launch

    def fail(*_: Any) -> None:
        raise NonFiniteError("a logit is not finite")

    runner.launch = fail  # type: ignore[assignment, method-assign]
    body = {"model": "tiny", "prompt": PROMPTS[0], "n": 4, "max_tokens": 4, "seed": 5}
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 500 and "a logit is not finite" in answer.text
    runner.launch = launch  # type: ignore[method-assign]
    answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200 and len(teams) == 1


@pytest.mark.parametrize("verb", [["generate", "-p", "a"], ["serve"]])
def test_gpus_that_are_not_here_are_refused_in_the_options_words(
    verb: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command([verb[0], str(model), *verb[1:], "--gpus", "60000"]) == 2
    error = capsys.readouterr().err
    assert "--gpus: 60000 GPUs were asked for, this machine has" in error and error.count("\n") == 1
    assert "--address" in error and "cluster." not in error


def test_gpus_beside_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.torch.cuda, "device_count", lambda: 8)
    assert device.gpus_beside(ClusterConfig()) == 8
    for said in ({"gpus": 1}, {"gpus": 4}, {"cpus": 2}, {"device": "cpu"}, {"address": "auto"}):
        assert device.gpus_beside(ClusterConfig(**said)) == 0
