"""The fused rollout of layers that are FP8 in part draws what the modules draw, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import EngineConfig, Fp8Config
from octetrl.engine.engine import Engine
from octetrl.engine.model_runner import ModelRunner
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.rollout_forward import rollout_forward
from tests.unit.engine.tiny_engine import CONTEXT_LENGTH, SCALES, SPEC, Letters, request

ASKED = [request(str(n), prompt_length=4 + 9 * n, num_siblings=2, seed=n) for n in range(2)]


def engine_of(fp8: Fp8Config) -> Engine:
    policy = precision_policy(SPEC, fp8)
    model = Decoder(SPEC, policy, "rollout")
    model.random_init(0)
    model.requantize()
    how: dict[str, Any] = {"context_length": CONTEXT_LENGTH, "dtype": torch.bfloat16, "device": "cpu"}
    engine = Engine(model, spec=SPEC, policy=policy, tokenizer=Letters(), config=EngineConfig(), **how)
    if fp8.kv_cache == "calibrated":
        engine.set_kv_scales(SCALES)
    return engine


@pytest.mark.parametrize(
    "changes",
    [
        *({"ignore": (f"*.{name}",)} for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        {"power_of_two": True},
        *({"kv_cache": mode, "kv_cache_tensors": one} for mode in ("calibrated", "dynamic") for one in ("k", "v")),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_the_fused_rollout_draws_what_the_modules_draw(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = Fp8Config(**({"rollout": True, "train": True} | changes))
    expected = engine_of(fp8).generate(ASKED)

    def fused(runner: ModelRunner, *inputs: Any, counts: bool = True) -> Tensor:
        return rollout_forward(runner.model, *inputs)

    monkeypatch.setattr(ModelRunner, "_forward", fused)
    assert engine_of(fp8).generate(ASKED) == expected
