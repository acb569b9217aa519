"""Any `RolloutBackend` serves a worker, several workers, the library and a server: they call nothing but the protocol.

The double's weights lie in other memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import octetrl
from octetrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, Recipe, RolloutConfig, TrainerConfig
from octetrl.data.tokenizer import load_tokenizer, tokenizer_folder
from octetrl.engine.engine import Engine
from octetrl.engine.stopping import Tokenizer
from octetrl.fp8.choose_backend import choose_backend
from octetrl.models.decoder import Decoder
from octetrl.records import (
    Completion,
    EarlierAnswer,
    GenerationRequest,
    OnProgress,
    SamplingParams,
    SessionEvent,
)
from octetrl.rollout.backend import BackendSession, RolloutBackend
from octetrl.system.errors import UserError
from octetrl.trainer.packing import pack
from octetrl.workers.build import BuiltWorker, build_worker
from octetrl.workers.worker import Worker, own_engine
from tests.e2e.live_server import live_server
from tests.parity.shapes import TINY
from tests.parity.short_run import rewarded, worker_of
from tests.parity.sides import PRECISIONS, NoText, samples_of
from tests.unit.workers.thread_team import run_on, steps_of

pytestmark = pytest.mark.usefixtures("rewards_here")

SPEC = TINY["qwen3"]
RECIPE = Recipe(
    model=ModelConfig(preset="tiny", init="random", context_length=64),
    fp8=PRECISIONS["fp8_full"],
    rollout=RolloutConfig(temperature=0.9),
    engine=EngineConfig(page_size=16, max_batch=4, release_for_training=True),
    trainer=TrainerConfig(optimizer=OptimizerConfig(lr=1e-2)),
)
ASKED = [GenerationRequest("a", (1, 2, 3), SamplingParams(6, temperature=0.9, ignore_eos=True), 2, seed=5)]


class Only:
    """`inner` with the members of a protocol and no other. `called`: the names of the methods that were asked for."""

    def __init__(self, inner: Any, protocol: type) -> None:
        self._inner, self._members = inner, {name for base in protocol.__mro__ for name in vars(base)}
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._members:
            raise AttributeError(name)
        self.called.append(name)
        return getattr(self._inner, name)


class Elsewhere(Only):
    """A backend over an engine whose weights are its own copies."""

    def __init__(self, worker: Worker, tokenizer: Tokenizer | None = None) -> None:
        recipe = worker.recipe
        model = Decoder(worker.spec, worker.policy, "rollout", device="cpu", backend=choose_backend("cpu"))
        model.requantize()
        model.drop_fp8_weights()
        engine = Engine(
            model,
            spec=worker.spec,
            policy=worker.policy,
            tokenizer=tokenizer or NoText(),
            config=recipe.engine,
            context_length=recipe.model.context_length,
            dtype=worker.trainer_model.dtype,
            device="cpu",
        )
        super().__init__(engine, RolloutBackend)

    @contextmanager
    def session(self, on_progress: OnProgress | None = None, /) -> Iterator[Any]:
        self.called.append("session")
        with self._inner.session(on_progress) as session:
            yield Only(session, BackendSession)


BUILT: list[Elsewhere] = []


def built_elsewhere(recipe: Recipe, *args: Any, tokenizer: Tokenizer | None = None, **options: Any) -> BuiltWorker:
    """`build_worker`, with the other backend."""
    tokenizer = tokenizer or load_tokenizer(tokenizer_folder(recipe))
    built = build_worker(recipe, *args, tokenizer=tokenizer, **options)
    assert isinstance(built.worker, Worker)
    built.worker.engine = backend = Elsewhere(built.worker, tokenizer)
    BUILT.append(backend)
    built.worker.publish(built.worker.policy_version)
    return built


def step_of(worker: Worker) -> tuple[list[list[Completion]], str, list[list[Completion]]]:
    """What the worker draws, the digest after an update, and what it draws then."""
    worker.calibrate([request.prompt_token_ids for request in ASKED])
    drawn = worker.generate(ASKED)
    worker.remember([EarlierAnswer((1, 2), (3,))])  # a backend without drafts ignores it
    samples = [rewarded(sample) for sample in samples_of(ASKED, drawn)]
    update = worker.train(pack(samples, worker.layout, "token"))
    assert update.metrics["mismatch/unequal_tokens"] == 0
    digest = worker.publish(update.policy_version).weights_digest
    worker.forget_prefixes()
    return drawn, digest, worker.generate(ASKED)


def test_a_worker_asks_a_backend_for_nothing_but_the_protocol_and_gets_the_same_bits() -> None:
    own, other = worker_of(RECIPE, SPEC, "cpu"), worker_of(RECIPE, SPEC, "cpu")
    backend = Elsewhere(other)
    other.engine = backend
    expected = step_of(own)
    assert step_of(other) == expected and expected[0] != expected[2]
    verbs = [name for name in backend.called if name not in ("metrics", "weights_digest")]
    assert verbs == ["put_weights", "generate", "put_weights", "forget_prefixes", "generate"]
    with other.session() as session:
        session.submit(ASKED[0])
        found = [event for _ in range(40) for event in session.events()]
    assert not session.has_work and len([event for event in found if event.completion is not None]) == 2
    assert other.engine.rollout_metrics().keys() == own.engine.rollout_metrics().keys()


@pytest.mark.parametrize("how", [{}, {"engines": 1, "ahead": 1}], ids=["all", "apart"])
def test_a_run_on_several_workers(how: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """The second way trains on two, and generates ahead on a third."""
    with run_on(2, model, tmp_path, **how) as run:
        drawn, metrics = steps_of(run, 2)
    BUILT.clear()
    with run_on(2, model, tmp_path, build=built_elsewhere, **how) as run:
        assert steps_of(run, 2) == (drawn, metrics)
    assert sum("session" in backend.called for backend in BUILT) == (1 if how else 2)


def test_an_open_session_takes_weights() -> None:
    def found(worker: Worker) -> list[SessionEvent]:
        with worker.session() as session:
            session.submit(ASKED[0])
            events = [event for _ in range(4) for event in session.events()]
            events += session.adopt(lambda: worker.publish(worker.policy_version).policy_version, keeps_cache=False)
            while session.has_work:
                events += session.events()
        return events

    own, other = worker_of(RECIPE, SPEC, "cpu"), worker_of(RECIPE, SPEC, "cpu")
    other.engine = Elsewhere(other)
    for worker in (own, other):
        worker.calibrate([request.prompt_token_ids for request in ASKED])
    assert found(other) == found(own) != []


def test_the_library_and_a_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = octetrl.SamplingParams(n=2, max_tokens=6, seed=1)
    expected = octetrl.LLM(model, precision="fp8_full", device="cpu").generate(["3 + 1 ="], sampling)
    monkeypatch.setattr("octetrl.workers.build_workers.build_worker", built_elsewhere)
    llm = octetrl.LLM(model, precision="fp8_full", device="cpu")
    assert llm.generate(["3 + 1 ="], sampling) == expected and "generate" in BUILT[-1].called
    body = {"model": "tiny", "prompt": "3 + 1 =", "n": 2, "max_tokens": 4, "seed": 5}
    with live_server(model) as live:
        answer = httpx.post(f"{live.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
        assert "session" in BUILT[-1].called
        assert "octetrl_cache_pages " in httpx.get(f"{live.url}/metrics").text
        live.until(lambda: live.pages_in_use == 0)


def test_what_looks_into_the_engine_refuses_another() -> None:
    worker = worker_of(RECIPE, SPEC, "cpu")
    assert own_engine(worker) is worker.engine
    worker.engine = Elsewhere(worker)
    with pytest.raises(UserError, match="generates with Elsewhere, and the doctor and `bench step` look into"):
        own_engine(worker)
