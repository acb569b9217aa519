"""The weights, prompts and stand-ins that the tests of backends share: our engine, and vLLM's adapter over a double."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.config.schema import EngineConfig
from octetrl.engine.engine import Engine
from octetrl.engine.weights import weight_set
from octetrl.records import GenerationRequest, SamplingParams, SessionEvent, WeightSet
from tests.parity.shapes import TINY
from tests.parity.sides import Sides
from tests.unit.backends.vllm_double import VllmDouble, tensors_of

SPEC = replace(TINY["qwen3"], tied_embeddings=False)
CONTEXT_LENGTH = 64
SAMPLING = SamplingParams(6, temperature=0.9, ignore_eos=True)


class Letters:
    """Each token is one letter."""

    eos_token_id = 3
    chat_template = None
    all_special_tokens = ()

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any:
        raise NotImplementedError

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) - ord("A") for letter in text]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]:
        raise NotImplementedError

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        raise NotImplementedError

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(ord("A") + token % 26) for token in token_ids)


class Setting:
    """Trained weights, an adapter over a double, and our own engine with the same weights."""

    def __init__(self, precision: str, *, num_pages: int = 64) -> None:
        self.sides = Sides(SPEC, precision, calibrate_on=[[1, 2, 3, 4]])
        trained = self.sides.trainer_model
        self.weights = weight_set(trained, 0, self.sides.scales)
        ours = {name: one.detach() for name, one in trained.named_parameters()}
        held = tensors_of(SPEC, self.sides.policy, ours)
        self.double = VllmDouble(held, vocab_size=90, num_pages=num_pages, max_model_len=CONTEXT_LENGTH)
        common: dict[str, Any] = {
            "spec": SPEC,
            "policy": self.sides.policy,
            "tokenizer": Letters(),
            "config": EngineConfig(page_size=16, max_batch=4),
            "context_length": CONTEXT_LENGTH,
        }
        self.adapter = VllmBackend(self.double, **common)
        self.own = Engine(self.sides.engine_model, dtype=torch.bfloat16, device="cpu", **common)
        for backend in (self.adapter, self.own):
            backend.put_weights(self.weights)

    def later(self, version: int) -> WeightSet:
        """The weights after an update, with scales of that version."""
        with torch.no_grad():
            self.sides.trainer_model.norm.weight.add_(0.25 * version)
        scales = self.sides.scales
        return weight_set(
            self.sides.trainer_model, version, None if scales is None else replace(scales, policy_version=version)
        )


def request(name: str, seed: int = 5, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, seed), replace(SAMPLING, **sampling), 2, seed=seed)


def drain(session: Any) -> list[SessionEvent]:
    events: list[SessionEvent] = []
    while session.has_work:
        events += session.events()
    return events
