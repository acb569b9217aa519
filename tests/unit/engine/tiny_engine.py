"""An engine small enough for a unit test: a random two-layer Qwen3, an alphabet as tokenizer, every precision."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig
from octetrl.engine.engine import Engine
from octetrl.fp8.kv_scales import KVScales
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import GenerationRequest, SamplingParams
from tests.tiny_spec import TINY_SPEC

EOS = 1
CONTEXT_LENGTH = 160
SPEC = replace(TINY_SPEC, max_positions=CONTEXT_LENGTH, eos_token_ids=(EOS,))
PRECISIONS = {
    "bf16": Fp8Config(),
    "fp8": Fp8Config(rollout=True, train=True),
    "fp8_dynamic": Fp8Config(rollout=True, train=True, kv_cache="dynamic"),
    "fp8_full": Fp8Config(rollout=True, train=True, kv_cache="calibrated"),
}
SCALES = KVScales(torch.tensor([[0.008, 0.01, 0.15, 0.14], [0.009, 0.007, 0.16, 0.15]]), 0)  # two heads' K, then V


class Letters:
    """Token n is the letter n; EOS is special and leaves no text."""

    eos_token_id = EOS

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids if token != EOS or not skip_special_tokens)


def policy_of(precision: str) -> PrecisionPolicy:
    return precision_policy(SPEC, PRECISIONS[precision])


@lru_cache(maxsize=16)
def tiny_model(precision: str, side: Any = "rollout", seed: int = 0) -> Decoder:
    """Weights ten times larger than usual, so that the logits are far from flat."""
    model = Decoder(SPEC, policy_of(precision), side)
    model.random_init(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    model.requantize()
    return model


def tiny_engine(precision: str = "bf16", model: Any = None, tokenizer: Any = None, **config: Any) -> Engine:
    engine = Engine(
        model or tiny_model(precision),
        spec=SPEC,
        policy=policy_of(precision),
        tokenizer=tokenizer or Letters(),
        config=EngineConfig(**config),
        context_length=CONTEXT_LENGTH,
        dtype=torch.bfloat16,
        device="cpu",
    )
    if precision == "fp8_full":
        engine.set_kv_scales(SCALES)
    return engine


class Graphs:
    """As if each forward were captured, in a quarter of a second."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, forward: Any, *how: Any) -> Any:
        self.seconds += 0.25
        return forward(*how)


def request(name: str = "r", prompt_length: int = 10, num_siblings: int = 1, seed: int = 0, **sampling: Any):
    """A request whose prompt is a function of its length."""
    prompt = tuple(2 + (7 * i + prompt_length) % 40 for i in range(prompt_length))
    params = SamplingParams(**{"max_new_tokens": 12, **sampling})
    return GenerationRequest(name, prompt, params, num_siblings=num_siblings, seed=seed)
