"""A model that stays loaded and answers whatever comes: for `octetrl serve` and `octetrl.LLM`.

A calibrated FP8 cache needs scales before the first request, and nobody knows yet what the requests will be. They are
measured on `CALIBRATION_TEXTS`, or on texts of the caller's, with a margin of `CALIBRATION_MARGIN`. The largest values
of K and V belong to a few channels and to the first tokens, whatever the text, and E4M3 loses only its smallest numbers
to a wider scale. The share of values that were clamped all the same is a metric of the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer
from octetrl.models.families import load_spec
from octetrl.records import Completion, GenerationRequest
from octetrl.rollout.backend import MeasuredSession
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.run.generate import generating_workers, generation_recipe, tokenizer_of
from octetrl.run.model_source import precision_of, recipe_of_run
from octetrl.run.trained_model import read_model, refuse_pruned, trained_model
from octetrl.system.errors import UserError
from octetrl.workers.many.team import WorkerLost
from octetrl.workers.model_shape import model_spec
from octetrl.workers.workers import Workers

CONTEXT_LENGTH = 8192  # tokens at most of a model that is no run, where none is asked for
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


class StandingModel:
    """The workers of a recipe that only generates, calibrated. `cluster` says how many: each holds the whole model.

    If one of several is lost, what was in flight fails, and the next call builds all of them again.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, calibration_texts: Sequence[str]) -> None:
        self._recipe, self._calibration_texts = recipe, calibration_texts
        self.tokenizer, self.cluster = tokenizer, recipe.cluster
        self.vocab_size = model_spec(recipe).vocab_size
        self.context_length = recipe.model.context_length  # tokens, prompt and answer together
        self.chat = ChatTokens(tokenizer, context_length=self.context_length)
        self._workers: Workers | None = self._built()

    def _built(self) -> Workers:
        length = self.context_length
        workers = generating_workers(self._recipe, self.tokenizer)
        try:
            if workers.needs_calibration:
                workers.calibrate([self.chat.first_prompt_tokens(text, length) for text in self._calibration_texts])
        except BaseException:
            workers.close()
            raise
        return workers

    @contextmanager
    def _whole(self) -> Iterator[Workers]:
        if self._workers is None:
            self._workers = self._built()
        try:
            yield self._workers
        except WorkerLost:
            self.close()
            raise

    @contextmanager
    def session(self) -> Iterator[MeasuredSession]:
        """An open session: requests may arrive while others run."""
        with self._whole() as workers, workers.session() as session:
            yield session

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """`num_siblings` completions of each request, in the order of the requests."""
        with self._whole() as workers:
            return workers.generate(requests)

    def close(self) -> None:
        """Ends workers in other processes. A later call builds them again."""
        if self._workers is not None and not self._workers.in_process:
            workers, self._workers = self._workers, None
            workers.close()


def load_standing_model(
    model: str,
    *,
    precision: str | None,
    cluster: Mapping[str, Any],
    context_length: int | None = None,
    kv_cache_tokens: int | None = None,
    max_batch: int = 256,
    calibration_texts: Sequence[str] = CALIBRATION_TEXTS,
    spelled: Callable[[str], str] = str,
) -> StandingModel:
    """Load `model` (a Hugging Face folder, a run folder or a checkpoint) and calibrate its cache if it has to be.

    precision: None: as the run was trained, or bf16 for a model that is no run. cluster: a recipe's section.
    context_length: None for that of the run's recipe, or for a model's own, at most CONTEXT_LENGTH. kv_cache_tokens: of
    each worker; None for what the memory allows. spelled: how a message to the user writes the name of one of these
    settings. Raises UserError.
    """

    def load(folder: Path) -> StandingModel:
        trained = trained_model(folder)
        tokenizer = tokenizer_of(trained)
        positions = load_spec(Path(trained["path"])).max_positions
        refuse_pruned(folder)
        length = min(positions, default_context_length(model)) if context_length is None else context_length
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
        name, sections = precision_of(model, precision)
        recipe = _recipe(
            trained, name, sections, cluster, length, {"max_batch": max_batch, "kv_cache_tokens": kv_cache_tokens}
        )
        return StandingModel(recipe, tokenizer, calibration_texts)

    return read_model(model, load)


def default_context_length(model: str) -> int:
    """Tokens of prompt and answer together: as the run was trained, or CONTEXT_LENGTH for a model that is no run."""
    path = recipe_of_run(model)
    return CONTEXT_LENGTH if path is None else load_recipe(path).model.context_length


def _recipe(
    trained: Mapping[str, Any],
    precision: str | None,
    sections: Mapping[str, Any],
    cluster: Mapping[str, Any],
    context_length: int,
    engine: Mapping[str, Any],
) -> Recipe:
    fp8 = dict(sections.get("fp8", {}))
    if fp8.get("kv_cache", "calibrated" if precision == "fp8_full" else "none") == "calibrated":
        fp8["calibration_margin"] = max(CALIBRATION_MARGIN, fp8.get("calibration_margin", 0.0))
    return generation_recipe(trained, precision, cluster, context_length, **{**sections, "engine": engine, "fp8": fp8})
