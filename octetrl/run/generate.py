"""Text from a model folder, a run or a checkpoint: `octetrl generate`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.config.validate import validate_with_spec
from octetrl.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from octetrl.models.families import load_spec
from octetrl.records import Completion, GenerationRequest, SamplingParams
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.converse import seed_in_call
from octetrl.run.model_source import precision_of
from octetrl.run.trained_model import read_model, refuse_pruned, trained_model
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong
from octetrl.telemetry.console import Console
from octetrl.workers.many.build import build_workers
from octetrl.workers.model_shape import model_spec
from octetrl.workers.workers import Workers


def generate_text(
    model: str,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    sampling: SamplingParams,
    *,
    precision: str | None = "bf16",
    cluster: Mapping[str, Any] | None = None,
    seed: int = 0,
    n: int | Sequence[int] = 1,
    plain: bool = False,
    shows_progress: bool = False,
) -> list[list[Completion]]:
    """`n` completions of each prompt: a user's message, or a list of messages. n may have a number for each prompt.

    model: a Hugging Face folder, a run folder or a checkpoint. precision: None for the run's own, or bf16 if the model
    is no run. cluster: a recipe's section, for the device or for several workers. shows_progress: on stderr. plain:
    prompts without a template.
    """
    console = Console("auto" if shows_progress else "quiet", total_steps=0, out=sys.stderr)

    def load(folder: Path) -> tuple[Workers, list[tuple[int, ...]]]:
        trained = trained_model(folder)
        tokenizer = tokenizer_of(trained)
        positions = load_spec(Path(trained["path"])).max_positions
        refuse_pruned(folder)
        chat = ChatTokens(tokenizer, context_length=positions)
        try:
            token_lists = [chat.tokens_of(prompt, plain=plain) for prompt in prompts]
        except TextTooLong as error:
            raise UserError(f"a prompt has {error}, the model's positions; shorten it") from None
        length = max(len(tokens) for tokens in token_lists) + sampling.max_new_tokens
        _refuse_long(length, sampling.max_new_tokens, positions)
        name, sections = precision_of(model, precision)
        recipe = generation_recipe(trained, name, cluster or {}, length, **sections)
        with console.phase("load"):
            return generating_workers(recipe, tokenizer, console), token_lists

    workers, token_lists = read_model(model, load)
    counts = [n] * len(token_lists) if isinstance(n, int) else n
    requests = [
        GenerationRequest(f"prompt {index}", tokens, sampling, num_siblings=siblings, seed=seed_in_call(seed, index))
        for index, (tokens, siblings) in enumerate(zip(token_lists, counts, strict=True))
    ]
    with closing(workers), console.phase("generate"):
        if workers.needs_calibration:
            workers.calibrate(token_lists)
        return workers.generate(requests)


def _refuse_long(length: int, max_new_tokens: int, max_positions: int) -> None:
    """Raise UserError if `length` tokens, of the longest prompt and its answer, exceed the model's positions."""
    if length > max_positions:
        raise UserError(
            f"--max-new-tokens: a prompt of {length - max_new_tokens} tokens and an answer of {max_new_tokens} exceed"
            f" the model's {max_positions} positions; shorten one of them"
        )


def tokenizer_of(trained: Mapping[str, Any]) -> Tokenizer:
    """Of a model as `trained_model` describes it."""
    folder = Path(trained["tokenizer"] or trained["path"])
    return load_tokenizer(folder, remedy="copy the model's tokenizer files into it, or give a folder")


def generation_recipe(
    trained: Mapping[str, Any],
    precision: str | None,
    cluster: Mapping[str, Any],
    context_length: int,
    *,
    dtype: str = "bfloat16",
    **sections: Any,
) -> Recipe:
    """A recipe for workers that generate with a model as `trained_model` describes it. dtype: of what is not FP8."""
    lora = trained["lora"]
    section = {**trained, "lora": None if lora is None else lora.model_dump(mode="json")}
    return recipe_from_mapping(
        {
            "precision": precision,
            "model": {**section, "dtype": dtype, "context_length": max(16, context_length)},
            "cluster": dict(cluster),
            "environment": {"dataset": "chain_sum"},
            "rollout": {"max_prompt_tokens": max(1, context_length - 1), "max_new_tokens": 1},
            **sections,
        }
    )


def generating_workers(recipe: Recipe, tokenizer: Tokenizer, console: Console | None = None) -> Workers:
    """Workers that only generate: one in this process, or those of `cluster`. Close them."""
    spec, console = model_spec(recipe), console or Console("quiet", total_steps=0)
    validate_with_spec(recipe, spec)
    check_vocabulary(tokenizer, spec.vocab_size)
    return build_workers(recipe, spec, tokenizer, console, trains=False)
