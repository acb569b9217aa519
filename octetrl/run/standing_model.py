"""A model that stays loaded and answers whatever comes: for `octetrl serve` and `octetrl.LLM`.

A calibrated FP8 cache needs scales before the first request, and nobody knows yet what the requests will be. They are
measured on `CALIBRATION_TEXTS`, or on texts of the caller's, with a margin of `CALIBRATION_MARGIN`. The largest values
of K and V belong to a few channels and to the first tokens, whatever the text, and E4M3 loses only its smallest numbers
to a wider scale. The share of values that were clamped all the same is a metric of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octetrl.config.errors import UserError
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer
from octetrl.models.families import load_spec
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.run.generate import generating_worker, generation_recipe, tokenizer_of
from octetrl.run.resume import trained_model, weights_folder
from octetrl.workers.worker import Worker

CONTEXT_LENGTH = 8192  # tokens at most, where none is asked for
CALIBRATION_MARGIN = 1.5
CALIBRATION_TEXTS = (
    "Explain in three sentences why the sky is blue and why evenings are red.",
    "A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive? Work it out step by step.",
    'Write a Python function that merges two sorted lists.\n\ndef merge(a: list, b: list) -> list:\n    """',
    '{"name": "search", "arguments": {"query": "population of Lisbon", "limit": 5}}',
    "Solve 3x^2 - 12x + 9 = 0, then check both roots: 3·1 - 12·1 + 9 = 0 and 27 - 36 + 9 = 0.",
    "Traduis en anglais : « Le chat dort sur le canapé pendant que la pluie tombe. »",
    "请用中文解释什么是梯度下降。",
    "| year | sales |\n|---|---|\n| 2021 | 14.2 |\n| 2022 | 17.9 |\n\nDescribe the trend.",
)


@dataclass(frozen=True, slots=True)
class StandingModel:
    worker: Worker
    tokenizer: Tokenizer
    chat: ChatTokens
    context_length: int  # tokens, prompt and answer together


def load_standing_model(
    model: str,
    *,
    precision: str,
    device: str,
    context_length: int | None = None,
    kv_cache_tokens: int | None = None,
    max_batch: int = 256,
    calibration_texts: Sequence[str] = CALIBRATION_TEXTS,
    spelled: Callable[[str], str] = str,
) -> StandingModel:
    """Load `model` (a Hugging Face folder, a run folder or a checkpoint) and calibrate its cache if it has to be.

    context_length: None for the model's own, at most CONTEXT_LENGTH. kv_cache_tokens: None for what the memory allows.
    spelled: how a message to the user writes the name of one of these settings. Raises UserError.
    """
    trained = trained_model(weights_folder(Path(model)))
    tokenizer = tokenizer_of(trained)
    positions = load_spec(Path(trained["path"])).max_positions
    length = min(positions, CONTEXT_LENGTH) if context_length is None else context_length
    if not 1 <= length <= positions:
        raise UserError(
            f"{spelled('context_length')}: {length} is out of range, this model has {positions} positions; give"
            f" 1 to {positions}"
        )
    if kv_cache_tokens is not None and kv_cache_tokens < length:
        raise UserError(
            f"{spelled('kv_cache_tokens')}: {kv_cache_tokens} do not hold one context of {length} tokens; give as"
            f" many or more, or lower {spelled('context_length')}"
        )
    recipe = _recipe(trained, precision, device, length, {"max_batch": max_batch, "kv_cache_tokens": kv_cache_tokens})
    worker = generating_worker(recipe, tokenizer)
    chat = ChatTokens(tokenizer, context_length=recipe.model.context_length)
    if worker.needs_calibration:
        worker.calibrate([chat.first_prompt_tokens(text, recipe.model.context_length) for text in calibration_texts])
    return StandingModel(worker, tokenizer, chat, recipe.model.context_length)


def _recipe(
    trained: Mapping[str, Any], precision: str, device: str, context_length: int, engine: Mapping[str, Any]
) -> Recipe:
    fp8 = {"calibration_margin": CALIBRATION_MARGIN} if precision == "fp8_full" else {}
    return generation_recipe(trained, precision, device, context_length, engine=engine, fp8=fp8)
