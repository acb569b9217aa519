"""Workers whose vLLM is a double, on the CPU: in this process, in threads, and in processes of Ray that import this."""

from __future__ import annotations

from typing import Any

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.backends.vllm.ranks import Ranks
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.shapes.spec import ModelSpec
from octetrl.workers import build_engine
from octetrl.workers.build import BuiltWorker, build_worker
from tests.unit.backends.vllm_double import VllmDouble, tensors_of


class CountingDouble(VllmDouble):
    """Counts how often it slept. On ranks its forwards meet: all must run the same requests."""

    sleeps = 0
    ranks: Ranks | None = None

    def step(self) -> list[Any]:
        outputs = super().step()
        if self.ranks is not None:
            met = self.ranks.commands.gather_records([one.name for one in self.launched or ()], "forward")
            assert all(names == met[0] for names in met), f"the ranks run different forwards: {met}"
        return outputs

    def sleep(self, level: int = 1) -> None:
        self.sleeps += 1
        super().sleep(level)


def build_double(
    recipe: Recipe,
    spec: ModelSpec,
    *,
    policy: PrecisionPolicy,
    tokenizer: Any,
    ranks: Ranks | None = None,
    **_: Any,
) -> VllmBackend:
    """In place of `build_vllm` of workers/build_engine.py."""
    shapes = Decoder(spec.whole, policy, "train", device="meta", backend="emulated")
    ours = {name: one.detach() for name, one in shapes.named_parameters()}
    context = recipe.model.context_length
    how = {"vocab_size": spec.vocab_size, "num_pages": 256, "max_model_len": context}
    double = CountingDouble(tensors_of(spec, policy, ours, spec.tensor.size), **how)
    double.ranks = ranks
    settings: dict[str, Any] = {"config": recipe.engine, "context_length": context, "tokenizer": tokenizer}
    return VllmBackend(double, spec=spec, policy=policy, ranks=ranks, **settings)


def build_worker_with_double(*arguments: Any, **settings: Any) -> BuiltWorker:
    """In place of `build_worker`, in a process of its own."""
    build_engine.build_vllm = build_double  # type: ignore[assignment]
    return build_worker(*arguments, **settings)
