"""Models that only generate: `octetrl generate`, by weights or by a server, and one that stays loaded.

`StandingModel` answers whatever comes, for `octetrl serve` and `octetrl.LLM`. A calibrated FP8 cache needs scales
before the first request, and the requests are not known yet. The scales are measured on `CALIBRATION_TEXTS`, or on
texts of the caller's, with a margin of `CALIBRATION_MARGIN`. The largest values of K and V belong to a few channels and
to the first tokens, whatever the text, and E4M3 loses only its smallest numbers to a wider scale. The share of values
that were clamped all the same is a metric of the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from octetrl.backends.openai.backend import OpenaiBackend
from octetrl.backends.openai.text import CharacterTokenizer
from octetrl.config.load import load_recipe, recipe_from_mapping
from octetrl.config.schema import OpenaiConfig, Recipe, RolloutConfig
from octetrl.config.validate import validate_with_spec
from octetrl.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from octetrl.models.families import load_spec
from octetrl.records import Completion, GenerationProgress, GenerationRequest, Prompt, SamplingParams, Task
from octetrl.rollout.backend import MeasuredSession, seed_in_call
from octetrl.rollout.call_text import find_format
from octetrl.rollout.chat_tokens import ChatTokens, template_names, unread
from octetrl.run.model_source import precision_of, recipe_of_run, rollout_of
from octetrl.run.trained_model import read_model, refuse_pruned, trained_model
from octetrl.system.errors import UserError
from octetrl.system.text import TextTooLong
from octetrl.telemetry.console import Console
from octetrl.workers.build_workers import build_workers
from octetrl.workers.model_shape import model_spec
from octetrl.workers.team import WorkerLost
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


def generate_text(
    model: str,
    prompts: Sequence[Prompt | Task],
    sampling: SamplingParams,
    *,
    precision: str | None = "bf16",
    cluster: Mapping[str, Any] | None = None,
    seed: int = 0,
    n: int | Sequence[int] = 1,
    plain: bool = False,
    chat_template: str | None = None,
    shows_progress: bool = False,
    fits: bool = False,
) -> list[list[Completion]]:
    """`n` completions of each prompt. n may have a number for each prompt. A task's id begins messages about it.

    model: a Hugging Face folder, a run folder or a checkpoint. precision: None for the run's own, or bf16 if the model
    is no run. cluster: a recipe's section, for the device or for several workers. shows_progress: on stderr. plain:
    prompts without a template. chat_template: a file in place of the tokenizer's template. fits: answers are at most as
    long as the model's positions leave.
    """
    console = Console("auto" if shows_progress else "quiet", total_steps=0, out=sys.stderr)

    tasks = [prompt if isinstance(prompt, Task) else Task("", prompt) for prompt in prompts]

    def load(folder: Path) -> tuple[Workers, list[tuple[int, ...]], ChatTokens]:
        nonlocal sampling
        trained, tokenizer, positions = model_parts(folder, chat_template)
        rollout = rollout_of(model)
        variables = rollout.chat_template_kwargs
        form = find_format(tokenizer, rollout.tool_format, variables)
        chat = ChatTokens(tokenizer, context_length=positions, variables=variables, tool_format=form)
        names = template_names(tokenizer)
        token_lists = [_prompt_tokens(chat, task, names, plain=plain) for task in tasks]
        longest = max(map(len, token_lists))
        if fits and longest < positions:
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, positions - longest))
        if longest + sampling.max_new_tokens > positions:
            raise UserError(
                f"--max-new-tokens: a prompt of {longest} tokens and an answer of {sampling.max_new_tokens} exceed the"
                f" model's {positions} positions; shorten one of them"
            )
        name, sections = precision_of(model, precision)
        recipe = generation_recipe(trained, name, cluster or {}, longest + sampling.max_new_tokens, **sections)
        with console.phase("load"):
            return generating_workers(recipe, tokenizer, console), token_lists, chat

    workers, token_lists, chat = read_model(model, load)
    counts = [n] * len(token_lists) if isinstance(n, int) else n
    with_calls = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *chat.call_ends))
    requests = [
        GenerationRequest(
            f"prompt {place}", tokens, with_calls if task.tools else sampling, siblings, seed_in_call(seed, place)
        )
        for place, (task, tokens, siblings) in enumerate(zip(tasks, token_lists, counts, strict=True))
    ]
    with closing(workers), console.phase("generate"):
        if workers.needs_calibration:
            workers.calibrate(token_lists)
        completions = workers.generate(requests)
    return [
        [chat.with_calls(one, sampling.stop) for one in siblings] if task.tools else siblings
        for task, siblings in zip(tasks, completions, strict=True)
    ]


def _prompt_tokens(chat: ChatTokens, task: Task, names: frozenset[str] | None, *, plain: bool) -> tuple[int, ...]:
    """names: that the template reads. Raises UserError, with the task's id if it has one."""
    try:
        if lost := unread(names, task.chat_template_kwargs, task.tools):
            raise UserError(lost)
        return chat.of(task).tokens_of(task.prompt, plain=plain)
    except TextTooLong as error:
        problem = f"a prompt has {error}, the model's positions; shorten it"
        raise UserError(f"{task.id}: {problem}" if task.id else problem) from None
    except UserError as error:
        raise UserError(f"{task.id}: {error}" if task.id else str(error)) from error


def generate_by_server(
    config: OpenaiConfig,
    prompts: Sequence[Prompt | Task],
    sampling: SamplingParams,
    *,
    n: Sequence[int],
    seed: int = 0,
    plain: bool = False,
) -> Iterator[list[Completion]]:
    """The `n` completions of each prompt, in the order of the prompts, as soon as they and those before them are there.

    Only text is sent, so any server with OpenAI's API will do; it applies its own chat template (plain: none). A
    completion that the server did not give has `finish_reason` FAILED. Raises UserError."""
    chat = ChatTokens(CharacterTokenizer())
    console = Console("auto", total_steps=0, out=sys.stderr)
    with closing(OpenaiBackend.of_text(config)) as backend, console.phase("generate") as show:

        def on_progress(progress: GenerationProgress) -> None:
            show(progress.done, progress.total, progress.generated_tokens, None)

        completions: list[dict[int, Completion]] = [{} for _ in prompts]
        with backend.session(on_progress) as session:
            for place, (prompt, siblings) in enumerate(zip(prompts, n, strict=True)):
                task = prompt if isinstance(prompt, Task) else Task("", prompt)
                if task.tools:
                    raise UserError(f"{task.id}: a server's calls are no text; leave 'tools' out")
                tokens = chat.of(task).tokens_of(task.prompt, plain=plain)
                request = GenerationRequest(f"prompt {place}", tokens, sampling, siblings, seed_in_call(seed, place))
                session.accept(session.checked(request))
            for place, siblings in enumerate(n):
                while len(completions[place]) < siblings:
                    for sequence, completion in session.advance():
                        completions[sequence.group.index][sequence.sibling] = completion
                yield [completions[place].pop(sibling) for sibling in range(siblings)]


# ---------------------------------------------------------------- workers that only generate


def model_parts(folder: Path, template: str | None = None) -> tuple[dict[str, Any], Tokenizer, int]:
    """A model's part of a recipe (`trained_model`), its tokenizer, and its positions. template: a file with a chat
    template in place of the tokenizer's."""
    trained = trained_model(folder)
    tokenizer_folder = Path(trained["tokenizer"] or trained["path"])
    remedy = "copy the model's tokenizer files into it, or give a folder"
    try:
        tokenizer = load_tokenizer(tokenizer_folder, remedy=remedy, template=template)
    except UserError as error:
        raise UserError(str(error).replace("model.chat_template", "--chat-template")) from error
    positions = load_spec(Path(trained["path"])).max_positions
    refuse_pruned(folder)
    return trained, tokenizer, positions


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


# ---------------------------------------------------------------- a model that stays loaded


class StandingModel:
    """The workers of a recipe that only generates, calibrated. `cluster` says how many: each holds the whole model.

    If one of several is lost, what was in flight fails, and the next call builds all of them again.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: Tokenizer, calibration_texts: Sequence[str], rollout: RolloutConfig
    ) -> None:
        self._recipe, self._calibration_texts = recipe, calibration_texts
        self.tokenizer, self.cluster = tokenizer, recipe.cluster
        spec = model_spec(recipe)
        self.vocab_size, self.eos_token_ids = spec.vocab_size, spec.eos_token_ids
        self.context_length = recipe.model.context_length  # tokens, prompt and answer together
        self.variables, self.tool_format = rollout.chat_template_kwargs, rollout.tool_format
        self.chat = ChatTokens(tokenizer, context_length=self.context_length, variables=self.variables)
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
    chat_template: str | None = None,
    calibration_texts: Sequence[str] = CALIBRATION_TEXTS,
    spelled: Callable[[str], str] = str,
) -> StandingModel:
    """Load `model` (a Hugging Face folder, a run folder or a checkpoint) and calibrate its cache if it has to be.

    precision: None: as the run was trained, or bf16 for a model that is no run. cluster: a recipe's section.
    context_length: None for that of the run's recipe, or for a model's own, at most CONTEXT_LENGTH. kv_cache_tokens: of
    each worker; None for what the memory allows. chat_template: a file in place of the tokenizer's template. spelled:
    how a message to the user writes the name of one of these settings. Raises UserError.
    """

    def load(folder: Path) -> StandingModel:
        trained, tokenizer, positions = model_parts(folder, chat_template)
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
        fp8 = dict(sections.get("fp8", {}))
        if fp8.get("kv_cache", "calibrated" if name == "fp8_full" else "none") == "calibrated":
            fp8["calibration_margin"] = max(CALIBRATION_MARGIN, fp8.get("calibration_margin", 0.0))
        engine = {"max_batch": max_batch, "kv_cache_tokens": kv_cache_tokens}
        recipe = generation_recipe(trained, name, cluster, length, **{**sections, "engine": engine, "fp8": fp8})
        return StandingModel(recipe, tokenizer, calibration_texts, rollout_of(model))

    return read_model(model, load)


def default_context_length(model: str) -> int:
    """Tokens of prompt and answer together: as the run was trained, or CONTEXT_LENGTH for a model that is no run."""
    path = recipe_of_run(model)
    return CONTEXT_LENGTH if path is None else load_recipe(path).model.context_length
