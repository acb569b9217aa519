"""`octetrl doctor`: are the trainer's log-probs those of the engine, bit for bit, and if not, which op is the first?

    ends      the real engine draws (together; again, with its pages still there; in other company and other chunks),
              the real trainer computes the log-probs of what was drawn (packed as it would train; each sequence alone)
    forwards  the two forwards alone, op by op, in every way of passes.py, each against the trainer's packed one

The ends are what training meets: captured graphs, the scheduler, packing, activation checkpoints. In the forwards a
difference has a name. Where they agree and an end does not, that end's own machinery is at fault, and the end that left
the forwards' log-probs is named. On a GPU the forwards are the fused ones, and where they differ the modules of
models/decoder.py are asked which of the two is as they are.

The weights, prompts, precision, page size and packing are the recipe's; answers are drawn by its weights, of a fixed
length, so that every sequence has as many tokens as was asked for. Nothing is written, and no weight changes but
adapters whose B are all zero, in memory (`wake_branches`).

B sequences, N drawn tokens, R rows (tokens of all sequences end to end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.errors import UserError
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec
from octetrl.config.validate import validate_with_spec
from octetrl.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_folder
from octetrl.doctor.passes import DrawnSequences, EngineLimits, LogprobRule, Pass, engine_plans, packed_pass, paged_pass
from octetrl.doctor.taps import Tap, engine_tap, trainer_tap
from octetrl.engine.engine import Engine
from octetrl.engine.kv_cache import CacheFormat, cache_format
from octetrl.environments.base import Taskset
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, GenerationRequest, Sample, SamplingParams
from octetrl.run.build import build_chat, build_environment, fill_weights, model_spec
from octetrl.run.device import resolve_device, seed_everything
from octetrl.telemetry.spans import Spans
from octetrl.trainer.activation_checkpoint import KEPT
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.trainer import KVReplay
from octetrl.workers.worker import Worker

SMALL_CHUNK = 16  # of the engine that has other company
BRANCH_STD = 0.02  # of what stands in for an adapter's B


@dataclass(frozen=True, slots=True)
class Examination:
    """How much is looked at."""

    prompts: int = 4
    sequences: int = 2  # answers to each prompt
    answer_tokens: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """One way in which the real engine or trainer was asked."""

    side: str
    way: str
    tokens_N: Tensor  # int64: what was drawn; the trainer's are the first engine's
    logprobs_N: Tensor  # float32

    @property
    def name(self) -> str:
        return f"{self.side}, {self.way}"


class Listener:
    """Stands in for a loss: keeps the log-probs that the trainer made, by sample, and asks for no gradient of them."""

    def __init__(self) -> None:
        self.heard: dict[int, Tensor] = {}

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        sample_N = inputs.advantages_N.long().cpu()  # `samples_of` says which sample it is in its advantage
        logprobs_N = inputs.logprobs_N.detach().cpu()
        for sample in sample_N.unique().tolist():
            self.heard[sample] = logprobs_N[sample_N == sample]
        return TokenLoss(torch.zeros_like(inputs.logprobs_N).requires_grad_())


class Patient:
    """A recipe's trainer and engine, alive, with its first prompts, without an optimizer. UserError for bad input."""

    def __init__(self, recipe: Recipe, examination: Examination) -> None:
        if recipe.algorithm.learns_from != "rollouts":
            name = recipe.algorithm.name
            raise UserError(f"algorithm.name: '{name}' draws no rollouts, so there are not two sides; take grpo")
        self.device = resolve_device(recipe.cluster)
        seed_everything(recipe.seed)
        self.recipe, self.examination = recipe, examination
        self.spec: ModelSpec = model_spec(recipe)
        validate_with_spec(recipe, self.spec)
        self.policy: PrecisionPolicy = precision_policy(self.spec, recipe.fp8, recipe.numerics)
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer_folder(recipe), model_spec(recipe).vocab_size)
        self.prompts = first_prompts(recipe, self.spec, self.tokenizer, examination)
        self.listener = Listener()
        self.worker = Worker(
            recipe,
            spec=self.spec,
            policy=self.policy,
            tokenizer=self.tokenizer,
            algorithm=replace(
                build_algorithm(recipe.algorithm),
                loss=self.listener,
                needs_reference=False,
                needs_teacher=False,
                teacher_top_k=0,
                step_means={},
                shape=None,
                needs_values=False,
                returns=None,
            ),
            load_weights=lambda model: fill_weights(model, recipe),
            device=self.device,
            spans=Spans(),
            trains=False,
        )
        self.woke_branches = wake_branches(self.worker.trainer_model, recipe.seed)  # the engine's too: they share them
        if self.worker.needs_calibration:
            self.worker.calibrate(self.prompts)

    def __str__(self) -> str:
        recipe, asked = self.recipe, self.examination
        what = recipe.model.preset or recipe.model.path
        drawn = f"{len(self.prompts)} prompts x {asked.sequences} answers of {asked.answer_tokens} tokens"
        if self.woke_branches:
            drawn += "; every adapter's B is zero and would hide its branch: small numbers stand in for it"
        return f"{what}, {recipe.precision or 'precision as given'}, {recipe.numerics}, on {self.device.type}: {drawn}"

    @property
    def temperature(self) -> float:
        return self.recipe.rollout.temperature or 1.0

    @property
    def kv(self) -> KVReplay:
        """What the trainer sees of the cache, as the worker tells it."""
        return self.worker._replay()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.recipe.model.dtype)
        return dtype

    # ------------------------------------------------------------ the real ends

    def requests(self) -> list[GenerationRequest]:
        sampling = SamplingParams(self.examination.answer_tokens, temperature=self.temperature, ignore_eos=True)
        return [
            GenerationRequest(f"prompt {index}", prompt, sampling, self.examination.sequences, self.recipe.seed + index)
            for index, prompt in enumerate(self.prompts)
        ]

    def engine_ends(self) -> tuple[list[End], list[list[Completion]]]:
        """The engine's log-probs, asked in three ways, and what it drew the first time."""
        requests, engine = self.requests(), self.worker.engine
        engine.forget_prefixes()
        drawn = engine.generate(requests)
        ends = [_end("together", drawn)]
        prefilled = self._prefilled()
        again = engine.generate(requests)
        ends.append(_end(f"again, {prefilled - self._prefilled()} prompt tokens cached", again))
        engine.sleep()
        other = self._other_engine(len(requests) * self.examination.sequences)
        backwards = other.generate(requests[::-1])[::-1]
        ends.append(_end("other company, other chunks", backwards))
        other.sleep()
        return ends, drawn

    def _prefilled(self) -> int:
        assert self.worker.engine.metrics is not None, "the engine says nothing about the call"
        return self.worker.engine.metrics.prefilled_tokens

    def _other_engine(self, sequences: int) -> Engine:
        config = self.recipe.engine.model_copy(
            update={"max_batch": max(1, sequences // 4), "prefill_chunk": SMALL_CHUNK}
        )
        engine = Engine(
            self.worker.engine_model,
            spec=self.spec,
            policy=self.policy,
            tokenizer=self.tokenizer,
            config=config,
            context_length=self.recipe.model.context_length,
            dtype=self.dtype,
            device=self.device,
        )
        held = self.worker.engine.kv_scales
        if held is not None:
            engine.set_kv_scales(held)
        engine.publish(self.worker.engine.policy_version)
        return engine

    def trainer_ends(self, drawn: list[list[Completion]]) -> list[End]:
        """The trainer's log-probs of those tokens, from the forward it trains by."""
        samples = samples_of(self.prompts, drawn)
        tokens_N = _tokens(drawn)
        layouts = {"packed": self.worker.layout, "each alone": replace(self.worker.layout, tokens_per_micro_batch=1)}
        return [End("trainer", way, tokens_N, self._heard(samples, layout)) for way, layout in layouts.items()]

    def _heard(self, samples: list[Sample], layout: PackingLayout) -> Tensor:
        self.listener.heard.clear()
        batch = pack(samples, replace(layout, minibatches=1), self.worker.trainer.algorithm.token_weighting)
        self.worker.trainer.accumulate_alone(batch, self.kv)
        self.worker.trainer.model.requantize()  # codes that are remade come back
        return torch.cat([self.listener.heard[sample] for sample in range(len(samples))])

    # ------------------------------------------------------------ the forwards

    def sequences(self, drawn: list[list[Completion]]) -> DrawnSequences:
        samples = samples_of(self.prompts, drawn)
        lengths = [sample.loss_mask.index(True) for sample in samples]
        return DrawnSequences(tuple(sample.token_ids for sample in samples), tuple(lengths), self.device)

    def passes(self, sequences: DrawnSequences) -> list[Pass]:
        """The first is what the others are compared with."""
        recipe, worker = self.recipe, self.worker
        limits = EngineLimits(recipe.engine.page_size, recipe.engine.prefill_chunk, recipe.engine.max_batch)
        held, scale_2LK = worker.engine.kv_scales, None
        if held is not None:
            scale_2LK = torch.stack((held.k_scale_LK, held.v_scale_LK))
        trainer = partial(trainer_tap, worker.trainer_model, KEPT[recipe.trainer.activation_checkpointing])
        budgets = {"packed": recipe.trainer.tokens_per_micro_batch, "each alone": 1}
        packed = [packed_pass(trainer, sequences, self.kv, self.rule, budget, way) for way, budget in budgets.items()]
        paged = [
            paged_pass(partial(engine_tap, worker.engine_model), sequences, plan, self.rule, self.page_of, scale_2LK)
            for plan in engine_plans(sequences, limits)
        ]
        return [*packed, *paged]

    def module_pass(self, sequences: DrawnSequences) -> Pass:
        """The trainer's packed forward, module by module on any device."""
        tap, budget = partial(Tap, self.worker.trainer_model), self.recipe.trainer.tokens_per_micro_batch
        return packed_pass(tap, sequences, self.kv, self.rule, budget, "module by module")

    @property
    def is_fused(self) -> bool:
        """Whether `passes` run other code than the modules."""
        return engine_tap(self.worker.engine_model, lambda *_: None).is_fused

    @property
    def rule(self) -> LogprobRule:
        return LogprobRule(self.temperature, self.recipe.trainer.logprob_chunk)

    def page_of(self, page_size: int) -> CacheFormat:
        return cache_format(self.spec, self.policy, self.dtype, page_size)


@torch.no_grad()
def wake_branches(model: Decoder, seed: int) -> bool:
    """Where the B of every adapter is zero, as before a run's first step, small numbers are put there, in memory alone:
    a branch that adds nothing would hide whatever is wrong with it. Whether it was so."""
    branches = [adapter.b for _, adapter in model.adapters()]
    if not branches or any(bool(b_NR.any()) for b_NR in branches):
        return False
    generator = torch.Generator().manual_seed(seed)
    for b_NR in branches:
        b_NR.copy_(torch.empty(b_NR.shape).normal_(std=BRANCH_STD, generator=generator))
    return True


def first_prompts(
    recipe: Recipe, spec: ModelSpec, tokenizer: Tokenizer, examination: Examination
) -> list[tuple[int, ...]]:
    """The prompts a run of the recipe would begin with; longer ones than it generates from are cut."""
    environment = build_environment(recipe.environment)
    chat = build_chat(recipe, spec, tokenizer, environment)
    taskset = Taskset(environment.tasks, eval_size=recipe.environment.eval_size, seed=recipe.environment.seed)
    limit = recipe.rollout.max_prompt_tokens
    prompts = [chat.first_prompt_tokens(task.prompt, limit) for task in taskset.next_batch(examination.prompts)]
    longest = max(len(prompt) for prompt in prompts) + examination.answer_tokens
    if longest > recipe.model.context_length:
        raise UserError(
            f"--answer-tokens: {examination.answer_tokens} and a prompt of {longest - examination.answer_tokens} tokens"
            f" exceed model.context_length {recipe.model.context_length}; lower it, or raise model.context_length"
        )
    return prompts


def samples_of(prompts: Sequence[tuple[int, ...]], drawn: list[list[Completion]]) -> list[Sample]:
    """Each answer as the trainer gets it; its advantage is its number, by which the listener knows it."""
    pairs = [(prompt, answer) for prompt, answers in zip(prompts, drawn, strict=True) for answer in answers]
    return [
        Sample(
            token_ids=(*prompt, *answer.token_ids),
            loss_mask=(False,) * len(prompt) + (True,) * len(answer.token_ids),
            generator_logprobs=(0.0,) * len(prompt) + answer.logprobs,
            advantage=float(number),
            policy_version=answer.policy_version,
            precision_digest=answer.precision_digest,
        )
        for number, (prompt, answer) in enumerate(pairs)
    ]


def _end(way: str, drawn: list[list[Completion]]) -> End:
    logprobs = [logprob for answers in drawn for answer in answers for logprob in answer.logprobs]
    return End("engine", way, _tokens(drawn), torch.tensor(logprobs, dtype=torch.float32))


def _tokens(drawn: list[list[Completion]]) -> Tensor:
    return torch.tensor([token for answers in drawn for answer in answers for token in answer.token_ids])
