"""A worker runs any `RolloutBackend`: it calls nothing but the protocol, and weights may lie in other memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from octetrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, Recipe, RolloutConfig, TrainerConfig
from octetrl.engine.engine import Engine
from octetrl.fp8.backends import choose_backend
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, GenerationRequest, OnCompletions, OnProgress, SamplingParams, WeightSet
from octetrl.rollout.backend import RolloutSession
from octetrl.trainer.packing import pack
from octetrl.workers.worker import Worker
from tests.parity.shapes import TINY
from tests.parity.short_run import rewarded, worker_of
from tests.parity.sides import PRECISIONS, NoText, samples_of

SPEC = TINY["qwen3"]
RECIPE = Recipe(
    model=ModelConfig(preset="tiny", init="random", context_length=64),
    fp8=PRECISIONS["fp8_full"],
    rollout=RolloutConfig(temperature=0.9),
    engine=EngineConfig(page_size=16, max_batch=4, release_for_training=True),
    trainer=TrainerConfig(optimizer=OptimizerConfig(lr=1e-2)),
)
ASKED = [GenerationRequest("a", (1, 2, 3), SamplingParams(6, temperature=0.9, ignore_eos=True), 2, seed=5)]


class Elsewhere:
    """A backend that has the protocol's methods and no other, over an engine whose weights are its own copies."""

    def __init__(self, worker: Worker) -> None:
        model = Decoder(SPEC, worker.policy, "rollout", device="cpu", backend=choose_backend("cpu"))
        model.requantize()
        model.drop_fp8_weights()
        self.__engine = Engine(
            model,
            spec=SPEC,
            policy=worker.policy,
            tokenizer=NoText(),
            config=RECIPE.engine,
            context_length=64,
            dtype=worker.trainer_model.dtype,
            device="cpu",
        )
        self.called: list[str] = []

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
        /,
    ) -> list[list[Completion]]:
        self.called.append("generate")
        return self.__engine.generate(requests, on_progress, on_completions)

    def session(self, on_progress: OnProgress | None = None, /) -> AbstractContextManager[RolloutSession]:
        self.called.append("session")
        return self.__engine.session(on_progress)

    def put_weights(self, weights: WeightSet, /) -> None:
        self.called.append(f"weights of {weights.policy_version}")
        self.__engine.put_weights(weights)

    def weights_digest(self, *, covers_all: bool = False) -> str:
        return self.__engine.weights_digest(covers_all=covers_all)

    def forget_prefixes(self) -> None:
        self.called.append("forget")
        self.__engine.forget_prefixes()

    def sleep(self) -> None:
        self.called.append("sleep")
        self.__engine.sleep()

    def wake(self) -> None:
        self.__engine.wake()

    def rollout_metrics(self) -> dict[str, float]:
        return self.__engine.rollout_metrics()


def step_of(worker: Worker) -> tuple[list[list[Completion]], str, list[list[Completion]]]:
    """What the worker draws, the digest after an update, and what it draws then."""
    worker.calibrate([request.prompt_token_ids for request in ASKED])
    drawn = worker.generate(ASKED)
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
    assert backend.called == ["weights of 0", "generate", "weights of 1", "forget", "generate"]
    with other.session() as session:
        session.submit(ASKED[0])
        found = [event for _ in range(40) for event in session.events()]
    assert not session.has_work and len([event for event in found if event.completion is not None]) == 2
    assert other.rollout_metrics().keys() == own.rollout_metrics().keys()
