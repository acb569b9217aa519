"""Generates text in Python with vLLM's names: `LLM(model).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from octetrl.api.python_words import python_words
from octetrl.api.sampling import SamplingParams
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import Precision
from octetrl.records import Completion, FinishReason, GenerationRequest
from octetrl.rollout.backend import seed_in_call
from octetrl.run.generate import load_standing_model
from octetrl.system.errors import UserError, type_of
from octetrl.system.text import TextTooLong

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The result of `LLM.generate` for one prompt. `text`, `token_ids` and `finish_reason` are the first completion's.

    Example: output.text; [sibling.text for sibling in output.outputs]
    """

    prompt: str | None  # None: token ids were given
    prompt_token_ids: tuple[int, ...]  # with the chat template's tokens
    outputs: tuple[Completion, ...]  # `SamplingParams.n` siblings: text, token_ids, logprobs, finish_reason

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason


class LLM:
    """A loaded model that generates.

    model: a Hugging Face folder, a run's folder or one of its checkpoints. precision: what is FP8, as in a recipe.
    context_length: most tokens of prompt and answer together; None: the model's, at most 8192. kv_cache_tokens: the
    capacity of the KV cache; None: what the memory allows. max_batch: most sequences that are decoded together.
    device: auto takes the GPU where there is one. cluster: a recipe's section for several workers, such as {"gpus": 4};
    each holds the whole model, and `close` ends them.

    Raises UserError for a folder without a model and for settings that the model does not support.

    Example:
        llm = LLM("models/mine", precision="fp8_full")
        llm.generate(["2+2="], SamplingParams(max_tokens=16))[0].text
    """

    @python_words()
    def __init__(
        self,
        model: str | Path,
        *,
        precision: Precision = "bf16",
        context_length: int | None = None,
        kv_cache_tokens: int | None = None,
        max_batch: int = 256,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        cluster: Mapping[str, Any] | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise UserError(f"LLM: precision is {precision!r}; give {', '.join(PRECISIONS)}")
        if not isinstance(cluster, Mapping | None):
            raise UserError(
                f"LLM: cluster is {cluster!r}; give a recipe's section as a dictionary, such as {{'gpus': 4}}"
            )
        self._loaded = load_standing_model(
            str(model),
            precision=precision,
            cluster={"device": device, **(cluster or {})},
            context_length=context_length,
            kv_cache_tokens=kv_cache_tokens,
            max_batch=max_batch,
        )
        self._one_call = Lock()  # calls of several threads take turns
        weakref.finalize(self, self._loaded.close).atexit = False

    @python_words()
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """One `RequestOutput` for each prompt, in their order.

        prompts: one prompt or several. A text is what the user says, put into the model's chat template as a task's
        prompt is in training; token ids are taken as they are. sampling_params: None for the defaults.

        Raises UserError for a prompt that leaves no room for `max_tokens` in the context.
        """
        sampling = sampling_params or SamplingParams()
        if not isinstance(sampling, SamplingParams):
            raise UserError(f"LLM.generate: {type_of(sampling)} was given; give an octetrl.SamplingParams")
        listed = _listed(prompts)
        if not listed:
            return []
        requests = [
            GenerationRequest(
                f"prompt {place}",
                self._token_ids(place, prompt, sampling.max_tokens),
                sampling.for_engine(),
                num_siblings=sampling.n,
                seed=seed_in_call(sampling.seed, place),
            )
            for place, prompt in enumerate(listed)
        ]
        with self._one_call:
            completions = self._loaded.generate(requests)
        return [
            RequestOutput(prompt if isinstance(prompt, str) else None, request.prompt_token_ids, tuple(siblings))
            for prompt, request, siblings in zip(listed, requests, completions, strict=True)
        ]

    def close(self) -> None:
        """End the workers of `cluster`, as deleting the LLM does. A later `generate` starts them again."""
        self._loaded.close()

    def _token_ids(self, place: int, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        context = self._loaded.context_length
        remedy = f"the context has {context:,}; shorten one of them, or raise LLM(context_length=...)"
        if not isinstance(prompt, Sequence):
            raise UserError(f"LLM.generate: prompt {place} is {type_of(prompt)}; give a text, or token ids")
        try:
            tokens = self._loaded.chat.prompt_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)
        except TextTooLong as error:
            raise UserError(f"LLM.generate: prompt {place} has {error}; {remedy}") from None
        vocabulary = self._loaded.vocab_size
        wrong = next((token for token in tokens if not isinstance(token, int) or not 0 <= token < vocabulary), None)
        if wrong is not None or not tokens:
            what = "has no tokens" if wrong is None else f"holds {wrong!r}"
            raise UserError(f"LLM.generate: prompt {place} {what}; give a text, or token ids below {vocabulary:,}")
        if len(tokens) + max_tokens > context:
            raise UserError(
                f"LLM.generate: prompt {place} has {len(tokens):,} tokens and max_tokens is {max_tokens:,}; {remedy}"
            )
        return tokens


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if not isinstance(prompts, Sequence):
        raise UserError(f"LLM.generate: {type_of(prompts)} was given; give a text, token ids, or a list of them")
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # one prompt, a text or token ids
    return list(prompts)  # type: ignore[arg-type]
