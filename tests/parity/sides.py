"""Both sides of a run over one set of weights, at any shape and on any device, and what the parity tests ask of them.

    Sides            a trainer's and an engine's model that share their tensors, with calibrated KV scales where needed
    Sides.engine     the product's engine, under any settings
    Sides.logprobs   both sides' log-probs of what was drawn, by the product's trainer, forward and backward, under any
                     settings; nothing is updated
    Pages            the engine's model alone on pages of its own: any pieces of any sequences in one forward

Random weights are scaled so that probabilities are neither flat nor certain: a log-prob then has bits to differ in.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig, LoraConfig, TrainerConfig
from octetrl.engine.engine import Engine
from octetrl.engine.kv_cache import KVCache, cache_format
from octetrl.engine.sequence_states import IDLE, SequenceStates
from octetrl.engine.weights import put_weights, share_weights, weight_set
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.kv_scales import KVScales, kv_scales_from_amax
from octetrl.fp8.policy import precision_policy
from octetrl.layers.context import PackedContext, PagedContext
from octetrl.layers.weight_memory import filling
from octetrl.models.decoder import Decoder
from octetrl.models.decoder_class import decoder_class
from octetrl.models.hf_weights import load_weights
from octetrl.models.rollout_forward import can_fuse, rollout_forward
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.records import Completion, GenerationRequest, Sample, SamplingParams
from octetrl.shapes.spec import ModelSpec
from octetrl.trainer.activation_checkpoint import layer_runner
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack
from octetrl.trainer.trainer import Trainer
from octetrl.trainer.without_update import accumulate_gradients, observe_kv
from tests.objectives import objective

PRECISIONS = {
    "bf16": Fp8Config(),
    "fp8": Fp8Config(rollout=True, train=True),
    "fp8_full": Fp8Config(rollout=True, train=True, kv_cache="calibrated"),
    "fp8_dynamic": Fp8Config(rollout=True, train=True, kv_cache="dynamic"),
    "fp8_int8": Fp8Config(rollout=True, train=True, kv_cache="int8"),
    "mxfp8": Fp8Config(rollout=True, train=True, format="mxfp8"),
}
ONE_TENSOR = {  # K or V in codes, beside the other one in BF16; Qwen2.5 has V alone in every FP8 cache
    f"{name}_{tensor}": PRECISIONS[name].model_copy(update={"kv_cache_tensors": tensor})
    for name in ("fp8_full", "fp8_dynamic", "fp8_int8")
    for tensor in ("k", "v")
}
Answers = list[list[Completion]]
Piece = tuple[int, int, int]  # (sequence, first position, end)


class NoText:
    """A tokenizer for engines whose texts nobody reads."""

    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return ""


class Sides:
    """A trainer's and an engine's model of one shape, precision and seed, sharing their weights."""

    def __init__(
        self,
        spec: ModelSpec,
        precision: str,
        device: str = "cpu",
        *,
        seed: int = 0,
        calibrate_on: Sequence[Sequence[int]] | None = None,
        lora: LoraConfig | None = None,
        folder: Path | None = None,
    ) -> None:
        """folder: a Hugging Face folder whose weights are taken; None: random ones of the seed."""
        self.spec, self.device = spec, torch.device(device)
        self.policy = precision_policy(spec, (PRECISIONS | ONE_TENSOR)[precision])
        backend = choose_backend(device, mx=self.policy.mx)
        new = decoder_class(spec)
        self.trainer_model = new(spec, self.policy, "train", device=device, backend=backend, lora=lora)
        if folder is None:
            draw_weights(self.trainer_model, seed)
        else:
            load_weights(self.trainer_model, folder)
        if lora is not None:
            self.trainer_model.train_adapters_alone()
        self.engine_model = new(spec, self.policy, "rollout", device="meta", backend=backend, lora=lora)
        share_weights(self.engine_model, self.trainer_model)
        put_weights(self.engine_model, weight_set(self.trainer_model, 0))
        self.scales: KVScales | None = None
        if self.policy.kv_mode == "calibrated":
            self.scales = self._calibrated(calibrate_on or [random_tokens(random.Random(seed), spec, 60)])

    def _calibrated(self, token_lists: Sequence[Sequence[int]]) -> KVScales:
        """With no margin to spare: some of what is drawn later is clamped, on both sides alike."""
        trainer = self._trainer(None)
        amax_LS = observe_kv(trainer, token_lists)
        assert amax_LS is not None
        return kv_scales_from_amax(amax_LS, self.spec, margin=1.0, policy_version=0)

    def _trainer(self, heard: list[LossInputs] | None, temperature: float = 1.0, **config: Any) -> Trainer:
        """`heard` gets what the algorithm is given, for each micro-batch."""

        def loss(inputs: LossInputs) -> TokenLoss:
            assert heard is not None
            heard.append(inputs)
            return TokenLoss(inputs.advantages_N * inputs.logprobs_N)

        return Trainer(
            self.trainer_model,
            config=TrainerConfig(**config),
            algorithm=replace(build_algorithm(objective()), loss=loss),
            temperature=temperature,
            total_steps=1,
            trains=False,
        )

    def engine(self, *, context_length: int | None = None, **config: Any) -> Engine:
        engine = Engine(
            self.engine_model,
            spec=self.spec,
            policy=self.policy,
            tokenizer=NoText(),
            config=EngineConfig(**config),
            context_length=context_length or self.spec.max_positions,
            dtype=self.trainer_model.dtype,
            device=self.device,
        )
        if self.scales is not None:
            engine.set_kv_scales(self.scales)
        return engine

    @property
    def replay(self) -> KVReplay:
        if self.scales is None:
            return KVReplay(self.policy.kv_mode)
        return KVReplay("calibrated", self.scales.scale_LS)

    def logprobs(self, asked: Sequence[GenerationRequest], answers: Answers, **config: Any) -> tuple[Tensor, Tensor]:
        """The engine's and the trainer's log-prob of every token drawn, float32 on the CPU. `config`: the trainer's."""
        temperatures = {request.sampling.temperature for request in asked}
        assert len(temperatures) == 1, "a trainer has one temperature"
        heard: list[LossInputs] = []
        trainer = self._trainer(heard, temperatures.pop(), **config)
        accumulate_gradients(trainer, pack(samples_of(asked, answers), trainer.layout, "token"), self.replay)
        self.trainer_model.zero_grad(set_to_none=True)
        self.trainer_model.requantize()  # codes that are remade come back
        theirs = [inputs.generator_logprobs_N for inputs in heard]
        engines = torch.cat([logprobs_N for logprobs_N in theirs if logprobs_N is not None]).cpu()
        return engines, torch.cat([inputs.logprobs_N.detach() for inputs in heard]).cpu()

    def packed(self, sequences: Sequence[Tensor], checkpointing: str = "layer") -> list[Tensor]:
        """Hidden states of whole sequences, end to end in one training forward."""
        lengths = [len(sequence) for sequence in sequences]
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        context = PackedContext(
            cu_seqlens_B1=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device),
            max_seqlen=max(lengths),
            kv_mode=self.replay.kv_mode,
            kv_scale_LS=self.replay.kv_scale_LS,
        )
        run_layer = layer_runner(self.trainer_model, checkpointing)  # type: ignore[arg-type]
        tokens_T = torch.cat(list(sequences)).to(self.device)
        hidden_TE = self.trainer_model(tokens_T, positions_T.to(self.device), context, run_layer)
        return list(hidden_TE.detach().split(lengths))


class Pages:
    """Pages for some sequences, in random order, and forwards of the engine's model over them."""

    def __init__(self, sides: Sides, sequences: Sequence[Tensor], page_size: int, seed: int = 0) -> None:
        self.sides, self.sequences, self.page_size = sides, sequences, page_size
        counts = [-(-len(sequence) // page_size) for sequence in sequences]
        order = random.Random(seed).sample(range(sum(counts)), sum(counts))
        self.table_BP = torch.full((len(sequences), max(counts)), -1)
        for row_P, (start, end) in zip(self.table_BP, pairwise([0, *accumulate(counts)]), strict=True):
            row_P[: end - start] = torch.tensor(order[start:end])
        scales = sides.scales
        page = cache_format(sides.spec, sides.policy, sides.trainer_model.dtype, page_size)
        self.cache = KVCache(page, sum(counts), sides.device, None if scales is None else scales.scale_LS)
        self.states = SequenceStates(sides.engine_model, len(sequences), sides.device)

    @torch.no_grad()
    def forward(self, pieces: Sequence[Piece], idle: int = 0) -> list[Tensor]:
        """Hidden states of each piece, all in one forward; `idle` rows of nobody follow them, as in a padded batch."""
        device, model = self.sides.device, self.sides.engine_model
        tokens, positions, slots = [], [], []
        for sequence, first, end in pieces:
            at = torch.arange(first, end)
            tokens.append(self.sequences[sequence][first:end].cpu())
            positions.append(at)
            slots.append(self.table_BP[sequence][at // self.page_size] * self.page_size + at % self.page_size)
        nobody = torch.zeros(idle, dtype=torch.int64)
        lengths = [end - first for _, first, end in pieces]
        table_BP = torch.cat(
            [
                self.table_BP[[piece[0] for piece in pieces]],
                torch.full((idle, 1), -1).expand(-1, self.table_BP.shape[1]),
            ]
        )
        ends = [end for _, _, end in pieces]
        context = PagedContext(
            layers=self.cache.layers,
            slot_mapping_T=torch.cat([*slots, nobody - 1]).to(device),
            block_table_BP=table_BP.int().to(device),
            cu_seqlens_q_B1=torch.tensor([0, *accumulate(lengths + [1] * idle)], dtype=torch.int32, device=device),
            context_lens_B=torch.tensor(ends + [0] * idle, dtype=torch.int32, device=device),
            max_query_len=max(lengths),
            max_context_len=max(ends),
        )
        slots = torch.tensor([piece[0] for piece in pieces] + [IDLE] * idle, device=device)
        context = self.states.slots_of(context, slots, one_chunk=max(lengths) == 1)
        run = partial(rollout_forward, model) if device.type == "cuda" and can_fuse(model) else model
        hidden_TE = run(torch.cat([*tokens, nobody]).to(device), torch.cat([*positions, nobody]).to(device), context)
        return list(hidden_TE.split([*lengths, idle])[:-1])

    def filled(self, chunks_of: Sequence[Sequence[Piece]]) -> list[Tensor]:
        """Runs forward after forward of such pieces; each sequence's hidden states, put together again."""
        parts: list[list[Tensor]] = [[] for _ in self.sequences]
        for pieces in chunks_of:
            for (sequence, _, _), hidden in zip(pieces, self.forward(pieces), strict=True):
                parts[sequence].append(hidden)
        return [torch.cat(part) for part in parts]


# ---------------------------------------------------------------- what is drawn at random


def random_tokens(draw: random.Random, spec: ModelSpec, length: int) -> tuple[int, ...]:
    return tuple(draw.randrange(spec.vocab_size) for _ in range(length))


def random_sequences(draw: random.Random, spec: ModelSpec, lengths: Sequence[int]) -> list[Tensor]:
    return [torch.tensor(random_tokens(draw, spec, length)) for length in lengths]


def random_chunks(draw: random.Random, lengths: Sequence[int], sizes: Sequence[int]) -> Iterator[list[Piece]]:
    """Prefill plans: each sequence cut at random, some sequences in each forward, until all are done."""
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        open_ones = [index for index, length in enumerate(lengths) if done[index] < length]
        pieces = []
        for index in draw.sample(open_ones, draw.randint(1, len(open_ones))):
            end = min(lengths[index], done[index] + draw.choice(sizes))
            pieces.append((index, done[index], end))
            done[index] = end
        yield pieces


def random_requests(
    draw: random.Random,
    spec: ModelSpec,
    count: int,
    *,
    prompts: tuple[int, int],
    answers: tuple[int, int],
    siblings: tuple[int, int] = (1, 3),
    temperature: float = 1.0,
) -> list[GenerationRequest]:
    """Requests whose prompts, answers and numbers of siblings lie between these."""
    return [
        GenerationRequest(
            str(index),
            random_tokens(draw, spec, draw.randint(*prompts)),
            SamplingParams(draw.randint(*answers), temperature=temperature, ignore_eos=True),
            num_siblings=draw.randint(*siblings),
            seed=draw.randrange(1 << 40),
        )
        for index in range(count)
    ]


def samples_of(asked: Sequence[GenerationRequest], answers: Answers) -> list[Sample]:
    samples = []
    for request, siblings in zip(asked, answers, strict=True):
        prompt = request.prompt_token_ids
        for answer in siblings:
            samples.append(
                Sample(
                    token_ids=prompt + answer.token_ids,
                    loss_mask=(False,) * len(prompt) + (True,) * len(answer.token_ids),
                    generator_logprobs=(0.0,) * len(prompt) + answer.logprobs,
                    advantage=1.0,
                    policy_version=answer.policy_version,
                    precision_digest=answer.precision_digest,
                )
            )
    return samples


@torch.no_grad()
def draw_weights(model: Decoder, seed: int) -> None:
    """On the model's device: logits that are neither flat nor certain, norms and biases away from 1 and 0. A part of a
    model gets its rows of the whole model's weights."""
    generator = torch.Generator(model.lm_head_weight.device).manual_seed(seed)
    cut, fill = cut_rows_of(model.spec, model.lora), filling(model)
    for name, parameter in model.named_parameters():
        rows = cut.get(name)
        with fill(name):
            drawn = parameter if rows is None else parameter.new_empty(rows.whole_rows, *parameter.shape[1:])
            if parameter.dim() == 2:
                drawn.normal_(std=2.0 * parameter.shape[1] ** -0.5, generator=generator)
            else:
                drawn.normal_(std=0.3, generator=generator)
                if not name.endswith("bias"):
                    drawn.add_(-2.0 if name.endswith("A_log") else 1.0)  # a state that lasts for some ten tokens
            if rows is not None:
                parameter.copy_(torch.cat([drawn[one.whole : one.whole + one.rows] for one in rows.pieces]))
    model.requantize()
