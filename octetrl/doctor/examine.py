"""Runs a recipe's engine and trainer for `octetrl doctor`, which names the first op whose bits differ.

    ends      the real engine samples (together; again, with cached pages; with other requests and chunk sizes), and the
              real trainer computes the log-probs of these tokens (packed as in training; each sequence alone)
    forwards  only the two forwards, op by op, in every way of passes.py, each compared with the trainer's packed one

The ends include captured graphs, the scheduler, packing and activation checkpoints. The forwards show which op differs.
If the forwards agree and an end differs from them, the fault is in the code around that end's forward. On a GPU the
forwards are the fused ones. If they differ, the modules of models/decoder.py decide which of the two is wrong.

Weights, prompts, precision, page size and packing come from the recipe. Answers have a fixed length. Nothing is
written, and no weight changes, except that adapters with zero B get small numbers in memory (`wake_branches`).

B sequences, N drawn tokens, R rows (tokens of all sequences end to end), L layers, S scales of a layer's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.schema import Recipe
from octetrl.config.validate import validate_with_spec
from octetrl.data.tokenizer import Tokenizer, recipe_tokenizer
from octetrl.doctor.passes import DrawnSequences, EngineLimits, LogprobRule, Pass, engine_plans, packed_pass, paged_pass
from octetrl.doctor.taps import Tap, engine_tap, trainer_tap
from octetrl.engine.engine import Engine
from octetrl.engine.kv_cache import CacheFormat, cache_format
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.models.decoder import Decoder
from octetrl.records import Completion, GenerationRequest, Sample, SamplingParams
from octetrl.rollout.backend import seed_of
from octetrl.run.device import seed_everything
from octetrl.run.environment import build_chats, build_environments, build_tasks
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.trainer.activation_checkpoint import KEPT
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import PackingLayout, pack
from octetrl.trainer.without_update import accumulate_gradients
from octetrl.workers.build import fill_weights, resolve_device
from octetrl.workers.model_shape import model_spec, with_context_length
from octetrl.workers.worker import Worker, own_engine

SMALL_CHUNK = 16  # prefill chunk of the engine with other batches
BRANCH_STD = 0.02  # standard deviation of the numbers that replace an adapter's zero B


@dataclass(frozen=True, slots=True)
class Examination:
    """The size of an examination."""

    prompts: int = 4
    sequences: int = 2  # answers to each prompt
    answer_tokens: int = 32


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """Log-probs of the real engine or trainer, computed in one way."""

    side: str
    way: str
    tokens_N: Tensor  # int64: the sampled tokens; for the trainer, those of the first engine end
    logprobs_N: Tensor  # float32

    @property
    def name(self) -> str:
        return f"{self.side}, {self.way}"


class LogprobRecorder:
    """Replaces the loss: records the trainer's log-probs of each micro-batch, in their order. The gradient is zero."""

    def __init__(self) -> None:
        self.recorded: list[Tensor] = []

    def __call__(self, inputs: LossInputs) -> TokenLoss:
        self.recorded.append(inputs.logprobs_N.detach().cpu())
        return TokenLoss(torch.zeros_like(inputs.logprobs_N).requires_grad_())


class ExaminedWorker:
    """A recipe's worker with trainer, engine and first prompts, without an optimizer. UserError for bad input."""

    def __init__(self, recipe: Recipe, examination: Examination) -> None:
        if recipe.algorithm.learns_from != "rollouts":
            name = recipe.algorithm.name
            raise UserError(
                f"algorithm.name: '{name}' samples no rollouts, so there are not two sides to compare; use grpo"
            )
        self.device = resolve_device(recipe.cluster)
        seed_everything(recipe.seed)
        recipe = with_context_length(recipe)
        self.recipe, self.examination = recipe, examination
        self.spec: ModelSpec = model_spec(recipe)
        validate_with_spec(recipe, self.spec)
        self.policy: PrecisionPolicy = precision_policy(self.spec, recipe.fp8)
        self.tokenizer: Tokenizer = recipe_tokenizer(recipe, model_spec(recipe).vocab_size)
        self.prompts = first_prompts(recipe, self.spec, self.tokenizer, examination)
        self.recorder = LogprobRecorder()
        self.worker = Worker(
            recipe,
            spec=self.spec,
            policy=self.policy,
            tokenizer=self.tokenizer,
            algorithm=replace(
                build_algorithm(recipe.algorithm),
                loss=self.recorder,
                needs_reference=False,
                needs_teacher=False,
                teacher_top_k=0,
                step_means={},
                shape=None,
                needs_values=False,
                returns=None,
            ),
            load_weights=lambda model, loading: fill_weights(model, recipe, loading),
            device=self.device,
            trains=False,
        )
        self.woke_branches = wake_branches(self.worker.trainer_model, recipe.seed)  # the engine shares these tensors
        if self.worker.needs_calibration:
            self.worker.calibrate(self.prompts)

    def __str__(self) -> str:
        recipe, asked = self.recipe, self.examination
        what = recipe.model.preset or recipe.model.path
        drawn = f"{len(self.prompts)} prompts x {asked.sequences} answers of {asked.answer_tokens} tokens"
        if self.woke_branches:
            drawn += "; every adapter's B is zero and would hide its branch: small numbers stand in for it"
        return f"{what}, {recipe.precision or 'precision as given'}, on {self.device.type}: {drawn}"

    @property
    def temperature(self) -> float:
        return self.recipe.rollout.temperature or 1.0

    @property
    def kv(self) -> KVReplay:
        """The worker's settings for the trainer's replay of the cache."""
        return self.worker.replay()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.recipe.model.dtype)
        return dtype

    # ------------------------------------------------------------ the real ends

    def requests(self) -> list[GenerationRequest]:
        seed = self.recipe.seed
        sampling = SamplingParams(self.examination.answer_tokens, temperature=self.temperature, ignore_eos=True)
        return [
            GenerationRequest(f"prompt {index}", prompt, sampling, self.examination.sequences, seed_of(seed, index))
            for index, prompt in enumerate(self.prompts)
        ]

    def engine_ends(self) -> tuple[list[End], list[list[Completion]]]:
        """The engine's log-probs, computed in three ways, and the completions of the first."""
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
        ends.append(_end("in another batch, other chunks", backwards))
        other.sleep()
        return ends, drawn

    def _prefilled(self) -> int:
        return round(self.worker.engine.rollout_metrics()["rollout/prefilled_tokens"])

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
        held = own_engine(self.worker).kv_scales
        if held is not None:
            engine.set_kv_scales(held)
        engine.publish(own_engine(self.worker).policy_version)
        return engine

    def trainer_ends(self, drawn: list[list[Completion]]) -> list[End]:
        """The trainer's log-probs of those tokens, from the forward of training."""
        samples = samples_of(self.prompts, drawn)
        tokens_N = _tokens(drawn)
        layouts = {"packed": self.worker.layout, "each alone": replace(self.worker.layout, tokens_per_micro_batch=1)}
        return [End("trainer", way, tokens_N, self.logprobs_of(samples, layout)) for way, layout in layouts.items()]

    def logprobs_of(self, samples: list[Sample], layout: PackingLayout, kv: KVReplay | None = None) -> Tensor:
        """The trainer's log-probs of the sampled tokens, with K and V as `kv` says."""
        self.recorder.recorded.clear()
        batch = pack(samples, replace(layout, minibatches=1), self.worker.trainer.algorithm.token_weighting)
        accumulate_gradients(self.worker.trainer, batch, kv or self.kv)
        self.worker.trainer.model.requantize()  # restores codes that were freed
        sample_N = torch.cat([packed.sample_N for minibatch in batch.minibatches for packed in minibatch])
        return torch.cat(self.recorder.recorded)[sample_N.argsort(stable=True)]  # in the samples' order

    # ------------------------------------------------------------ the forwards

    def sequences(self, drawn: list[list[Completion]]) -> DrawnSequences:
        samples = samples_of(self.prompts, drawn)
        lengths = [sample.loss_mask.index(True) for sample in samples]
        return DrawnSequences(tuple(sample.token_ids for sample in samples), tuple(lengths), self.device)

    def passes(self, sequences: DrawnSequences) -> list[Pass]:
        """All passes. The first is the reference for the others."""
        recipe, worker = self.recipe, self.worker
        chunk = recipe.engine.prefill_chunk or self.spec.prefill_chunk
        limits = EngineLimits(recipe.engine.page_size, chunk, recipe.engine.max_batch, not self.spec.state_bytes(1))
        held = own_engine(worker).kv_scales
        scale_LS = None if held is None else held.scale_LS
        trainer = partial(trainer_tap, worker.trainer_model, KEPT[recipe.trainer.activation_checkpointing])
        budgets = {"packed": recipe.trainer.tokens_per_micro_batch, "each alone": 1}
        packed = [packed_pass(trainer, sequences, self.kv, self.rule, budget, way) for way, budget in budgets.items()]
        paged = [
            paged_pass(partial(engine_tap, worker.engine_model), sequences, plan, self.rule, self.page_of, scale_LS)
            for plan in engine_plans(sequences, limits)
        ]
        return [*packed, *paged]

    def module_pass(self, sequences: DrawnSequences) -> Pass:
        """The trainer's packed forward, module by module on any device."""
        tap, budget = partial(Tap, self.worker.trainer_model), self.recipe.trainer.tokens_per_micro_batch
        return packed_pass(tap, sequences, self.kv, self.rule, budget, "module by module")

    @property
    def is_fused(self) -> bool:
        """Whether `passes` run the fused forms."""
        return engine_tap(self.worker.engine_model, lambda *_: None).is_fused

    @property
    def rule(self) -> LogprobRule:
        return LogprobRule(self.temperature, self.recipe.trainer.logprob_chunk)

    def page_of(self, page_size: int) -> CacheFormat:
        return cache_format(self.spec, self.policy, self.dtype, page_size)


@torch.no_grad()
def wake_branches(model: Decoder, seed: int) -> bool:
    """Writes small numbers into the adapters' B, in memory, if all are zero, as before the first step of a run.

    A branch that adds zero would hide its faults. Returns whether it wrote.
    """
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
    """The first prompts of a run of the recipe, cut to `rollout.max_prompt_tokens`."""
    environments = build_environments(recipe)
    chat = build_chats(recipe, spec, tokenizer, environments)
    taskset = build_tasks(recipe, environments)
    limit = recipe.rollout.max_prompt_tokens
    prompts = [
        chat.of(task).first_prompt_tokens(task.prompt, limit) for task in taskset.next_batch(examination.prompts)
    ]
    longest = max(len(prompt) for prompt in prompts) + examination.answer_tokens
    if longest > recipe.model.context_length:
        raise UserError(
            f"--answer-tokens: {examination.answer_tokens} and a prompt of {longest - examination.answer_tokens} tokens"
            f" exceed model.context_length {recipe.model.context_length}; lower it, or raise model.context_length"
        )
    return prompts


def samples_of(prompts: Sequence[tuple[int, ...]], drawn: list[list[Completion]]) -> list[Sample]:
    """Each answer as a sample, without an advantage."""
    pairs = [(prompt, answer) for prompt, answers in zip(prompts, drawn, strict=True) for answer in answers]
    return [
        Sample(
            token_ids=(*prompt, *answer.token_ids),
            loss_mask=(False,) * len(prompt) + (True,) * len(answer.token_ids),
            generator_logprobs=(0.0,) * len(prompt) + answer.logprobs,
            advantage=0.0,
            policy_version=answer.policy_version,
            precision_digest=answer.precision_digest,
        )
        for prompt, answer in pairs
    ]


def _end(way: str, drawn: list[list[Completion]]) -> End:
    logprobs = [logprob for answers in drawn for answer in answers for logprob in answer.logprobs]
    return End("engine", way, _tokens(drawn), torch.tensor(logprobs, dtype=torch.float32))


def _tokens(drawn: list[list[Completion]]) -> Tensor:
    return torch.tensor([token for answers in drawn for answer in answers for token in answer.token_ids])
