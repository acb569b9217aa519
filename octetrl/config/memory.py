"""Estimate the device memory of a recipe, by part, before anything is built. No torch.

Symbols:

    P   parameters                              E   hidden size
    P8  parameters of FP8 linears               F   intermediate size
    L   layers                                  V   vocabulary size
    T   tokens of a micro-batch                 H   attention heads
    b   bytes of a value in the model's dtype   Q   H * head size
    c   bytes of a value of a wgrad operand     K   KV heads * head size
    s   bytes of a parameter's two moments      X   Q + 2 K

b is 2 in BF16. c is 1 + 4/128 in FP8 (a code and its share of a scale), otherwise b. s is 8, 4 or 2 + 2/128.

Always allocated:

    weights         b P                     one copy, which engine and trainer share
    FP8 copies      (1 + 4 / 128^2) P8      codes and one float32 scale per 128x128 block, also shared
                    + 1 P8                  transposed codes for dgrad, if training is FP8. `weight_codes: remade`:
                                            no transposed codes, and no codes at all during an update
                    + 8 P8 + 8 P8           emulation has these instead of transposed codes: float64 values of the
                                            codes, for the engine and for the trainer. `remade`: only the engine's
    gradients       4 P                     float32 sums; BF16: 2 P
    optimizer       s P + 4 P               both moments, and the float32 master weights unless `stochastic_rounding`.
                                            `offload`: only two pieces of 2^24 elements
    reference       (1 + 4 / 128^2) P8      if `kl_coefficient` is above 0, and for dpo and ipo. It is not updated, so
                    + b (P - P8)            its FP8 linears are codes alone, without transposed ones
    teacher         as a reference          of its own shape
    critic          as the policy           PPO's critic, with its own shape and optimizer, without lm_head
    reward model    as a reference          if a reward model scores completions
    CUDA context    0.6 GB                  kernels and the driver's memory. Measured, because torch does not count it
    process         0.5 GB                  on a CPU instead: Python, torch and other libraries, measured

During training:

    activations     b T L E                           `layer`: input of each layer
                    + T L (b Q + 4 H)                 `attention`: also attention's output and log-sum-exp
                    + T L (b (E + X + 2 F) + 2 c E)   `none`: also all other values that a layer's backward reads.
                                                      Layers beyond `checkpointed_layers` always keep these
    working set     the larger of
      one layer's backward      its peak, from `_LayerMemory`; + b V E if embeddings are tied, because lm_head's
                                gradient is held until the embedding's is ready
      logits                    4 b T E + (4 + 4 b) chunk V + 4 V E: hidden states, logits of one chunk, gradients of
                                four, float32 sum of lm_head's gradient. Or 4 b T E + (4 + b) V E: the sum, rounded
      logits on a CPU           37 chunk V, in float64, or 32 chunk V + 8 V E
      a scalar head             instead of logits, 2 (b + 4) T E: hidden states in float32, and their gradients

The critic trains after the policy's activations are freed, so only the larger of the two models' activations counts.

With LoRA, gradients, optimizer and reference count only adapters and a reward model's head instead of P. Weights that
training has in FP8 exist only as codes. Layers keep both norms' results in BF16 for the adapters. No weight has a
gradient. PPO's critic is trained in full.

During generation the KV cache stores what the layers' blocks cache. Attention needs L K (bytes of K + bytes of V) per
token, and with dynamic scales 8 L times the KV heads more. Linear attention has a state for each sequence instead, in
slots that are allocated first (`state_slots`). On a GPU with `release_for_training`, training and the KV
cache use the same memory in turn. The total is then the part that is always allocated plus the larger of the two.

The estimate excludes the cuBLAS workspace, fragmentation and the CUDA graphs of decoding. Keep a tenth of the device
free for them. The formulas above are for attention and a gated MLP; other blocks define their memory in their layout
(shapes/blocks.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octetrl.config.algorithm import DistillConfig
from octetrl.config.backends import TRAITS
from octetrl.config.lora import adapter_elements
from octetrl.config.objective_settings import AlgorithmConfig, KlSettings
from octetrl.config.schema import EngineConfig, OptimizerConfig, Recipe
from octetrl.shapes.blocks import SCALE_PER_TOKEN, BlockMemory, CachedTensor, TrainedAs
from octetrl.shapes.spec import ModelSpec
from octetrl.system.text import binary_size

Format = Literal["bf16", "fp8"]
MX_BLOCK = 32  # of fp8/format.py, which needs torch
When = Literal["always", "training", "generating"]

_TRAINED = {"frozen": False}
CUDA_CONTEXT, CPU_PROCESS = 600_000_000, 500_000_000
STATE_BYTES = {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 + 2 / 128}  # both moments of one parameter
OFFLOAD_ELEMENTS = 2 << 24  # elements on the device at the same time: two pieces (trainer/optimizer_states.py)
TOKEN_BLOCK = 128  # workers that share a micro-batch have whole blocks of its tokens
EXCHANGED = 6  # tensors of all heads that attention's backward sends or receives at a time: Q, output, its gradient
ONE_TURN = {"reasoning_gym", "math", "jsonl", "code"}  # kinds of environments without tools
CACHE = "KV cache"  # name of its part
STATES = "sequence states"
RETURNING = "FP8 codes"  # name of the part that is freed and quantised again in an update


@dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    num_bytes: int
    how: str  # one phrase that says what it consists of
    when: When = "always"
    owned_bytes: int = 0  # rows that only their owner has, of several workers (worker_memory.py)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    parts: tuple[MemoryPart, ...]  # the KV cache last, if its size is known
    kv_bytes_per_token: int
    kv_cache_tokens: int | None  # None: it is a share of the device's memory, which is unknown
    takes_turns: bool  # the KV cache is freed for training

    def bytes_when(self, when: When) -> int:
        return sum(part.num_bytes for part in self.parts if part.when == when)

    @property
    def total_bytes(self) -> int:
        """Bytes at the peak."""
        training, generating = self.bytes_when("training"), self.bytes_when("generating")
        both = max(training, generating) if self.takes_turns else training + generating
        return self.bytes_when("always") + both

    @property
    def training_bytes(self) -> int:
        """Peak bytes while training without the KV cache: with activations, or later with all FP8 codes."""
        returning = sum(part.num_bytes for part in self.parts if part.name == RETURNING)
        return self.bytes_when("always") + max(self.bytes_when("training"), returning)


@dataclass(frozen=True, slots=True)
class ScalarModel:
    """A model with a scalar head that a run has in addition to the policy: a critic or a reward model."""

    spec: ModelSpec
    precisions: Precisions

    @property
    def trunk(self) -> ModelSpec:
        return replace(self.spec, tied_embeddings=True)


@dataclass(frozen=True, slots=True)
class Precisions:
    """The precision policy's decisions. Linears have names such as `layers.3.mlp.down_proj`."""

    fp8_rollout: Collection[str]
    fp8_train: Collection[str]
    fp8_cache: Collection[str]  # cached tensors, such as `K`
    mx: bool = False  # a scale for each 32 values, and codes of their own for dgrad


def estimate_memory(
    recipe: Recipe,
    spec: ModelSpec,
    precisions: Precisions,
    *,
    on_gpu: bool,
    device_bytes: int | None,
    critic: ScalarModel | None = None,
    scorer: ScalarModel | None = None,
    teacher: tuple[ModelSpec, Precisions] | None = None,
) -> MemoryEstimate:
    """Estimate each part of one device's memory.

    device_bytes: the device's memory. None: unknown; a KV cache that is a share of it then has no size either.
    critic, scorer, teacher: the models that the recipe asks for. `scorer` is a reward model.
    """
    weight_bytes, backend = recipe.model.value_bytes, TRAITS[recipe.engine.backend]
    trains_scalar = recipe.algorithm.name == "reward_model"
    if trains_scalar:
        spec = ScalarModel(spec, precisions).trunk
    lora = recipe.model.lora
    trained = spec.num_parameters if lora is None else adapter_elements(spec, lora) + trains_scalar * spec.hidden_size
    dropped = 0 if lora is None else count_weights(spec, precisions.fp8_train)
    alone = trains_scalar or recipe.cluster.roles is not None or backend.has_weights
    how = f"{recipe.model.dtype}, {'of the trainer' if alone else 'shared by engine and trainer'}"
    how += "; FP8 linears only as codes" if dropped else ""
    owned = weight_bytes * count_weights(spec, precisions.fp8_train) if lora is None else 0
    parts = [MemoryPart("weights", weight_bytes * (spec.num_parameters - dropped), how, owned_bytes=owned)]
    emulated = recipe.fp8.is_emulated or (recipe.fp8.is_emulated is None and not on_gpu)
    parts += _fp8_parts(recipe, spec, precisions, emulated=emulated, has_critic=critic is not None)
    if lora is not None:
        parts.append(MemoryPart("adapters", weight_bytes * trained, f"{trained:,} trained parameters"))
    sums = recipe.trainer.gradient_bytes * trained
    owned = sums if recipe.cluster.gradients == "sharded" else 0
    parts.append(MemoryPart("gradients", sums, f"{recipe.trainer.gradients} sums", owned_bytes=owned))
    parts.append(_optimizer(recipe.trainer.optimizer, trained, weight_bytes, on_gpu))
    if teacher is not None:
        parts.append(MemoryPart("teacher", _fixed(*teacher, weight_bytes, emulated), _teacher(recipe.algorithm)))
    if recipe.algorithm.keeps_reference:
        reference = weight_bytes * trained if lora else _fixed(spec, precisions, weight_bytes, emulated)
        what = "adapters" if lora else "codes of FP8 linears, other weights,"
        parts.append(MemoryPart("reference model", reference, f"{what} of the initial policy"))
    process = ("CUDA context", CUDA_CONTEXT, "kernels and the driver's memory")
    parts.append(MemoryPart(*(process if on_gpu else ("process", CPU_PROCESS, "Python, torch and other libraries"))))
    if scorer is not None:
        held = _fixed(scorer.trunk, scorer.precisions, weight_bytes, emulated)
        parts.append(MemoryPart("reward model", held, "codes of FP8 linears, and other weights"))
    where = {"frozen": lora is not None, "on_gpu": on_gpu}
    activations = _activations(recipe, spec, precisions, weight_bytes, scalar=trains_scalar, **where)
    if critic is not None:
        parts.append(_critic(recipe, critic, weight_bytes, on_gpu=on_gpu, emulated=emulated))
        own = _activations(recipe, critic.trunk, critic.precisions, weight_bytes, scalar=True, **where | _TRAINED)
        activations = max(activations, own, key=lambda found: sum(part.num_bytes for part in found))
    parts += activations
    if trains_scalar or not generates(recipe):
        return MemoryEstimate(tuple(parts), 0, 0, takes_turns=True)
    parts += [MemoryPart(*held, "generating") for held in backend.held(spec, precisions.fp8_rollout)]
    if state := spec.state_bytes(weight_bytes, recipe.engine.most_rows):
        places = recipe.engine.max_batch  # on a CPU a slot takes memory when it is first written
        slots = state_slots(recipe.engine, places if on_gpu else min(recipe.most_answers, places))
        parts.append(MemoryPart(STATES, slots * state, f"{slots} of {binary_size(state)}", "generating"))
    per_token = kv_bytes_per_token(recipe, spec, precisions)
    takes_turns = on_gpu and recipe.engine.release_for_training
    return with_kv_cache(recipe, parts, per_token, device_bytes, on_gpu=on_gpu, takes_turns=takes_turns)


def _teacher(algorithm: AlgorithmConfig) -> str:
    assert isinstance(algorithm, DistillConfig), f"{algorithm.name} has no teacher"
    return f"{algorithm.teacher}, {algorithm.teacher_precision}"


def state_slots(engine: EngineConfig, places: int) -> int:
    """Slots for the states of linear attention: one for each place in the batch, one for four places for prompts that
    siblings share, since few groups are smaller, and snapshots."""
    quarter = -(-places // 4)
    snapshots = quarter if engine.state_snapshots is None else engine.state_snapshots
    return places + quarter + (0 if engine.prefix_cache == "off" else snapshots)


def kv_bytes_per_token(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes of one token in the KV cache, over all layers."""
    dynamic = recipe.fp8.kv_cache in SCALE_PER_TOKEN or not spec.calibrates

    def num_bytes(tensor: CachedTensor) -> int:
        is_fp8 = tensor.name in precisions.fp8_cache
        return tensor.bytes_per_token(1 if is_fp8 else recipe.model.value_bytes, token_scales=is_fp8 and dynamic)

    return sum(num_bytes(tensor) for layer in range(spec.num_layers) for tensor in spec.cached(layer))


def count_weights(spec: ModelSpec, names: Collection[str]) -> int:
    """Count the weights of these linears."""
    wanted = set(names)
    return sum(linear.num_weights for name, linear in spec.linears() if name in wanted)


def _fp8_parts(
    recipe: Recipe, spec: ModelSpec, precisions: Precisions, *, emulated: bool, has_critic: bool
) -> Iterator[MemoryPart]:
    """The policy's FP8 copies. Remade codes are not in memory while the policy is trained. With a critic they count as
    always allocated, because each model's codes exist while the other is trained. This overestimates slightly."""
    remakes = recipe.trainer.weight_codes == "remade"
    elsewhere = TRAITS[recipe.engine.backend].has_weights
    own = replace(precisions, fp8_rollout=precisions.fp8_train) if elsewhere else precisions
    copies = _fp8_copies(spec, own, emulated=emulated, backward=not remakes)
    given_back = count_weights(spec, precisions.fp8_train) if remakes else 0
    if copies:
        how = "scales, and the codes that are not remade" if remakes else "codes, transposed codes and scales"
        how = "codes, scales, and the codes' values in float64" if emulated else how
        yield MemoryPart("FP8 copies", copies - given_back, how)
    if given_back:
        how = "quantised again for each GEMM of an update"
        yield MemoryPart(RETURNING, given_back, how, "always" if has_critic else "generating")


def _fp8_copies(spec: ModelSpec, precisions: Precisions, *, emulated: bool, backward: bool) -> int:
    """Bytes of a model's FP8 copies. `backward`: with those that only an update needs (transposed codes, or the
    trainer's values if emulated)."""
    rollout, train = set(precisions.fp8_rollout), set(precisions.fp8_train)
    either = count_weights(spec, rollout | train)
    codes_and_scales = either + 4 * (either // (MX_BLOCK if precisions.mx else 128**2))
    if precisions.mx:
        codes_and_scales *= 2  # along both dimensions
    if emulated:
        return codes_and_scales + 8 * (either + (count_weights(spec, rollout & train) if backward else 0))
    return codes_and_scales + (count_weights(spec, train) if backward else 0)


def _fixed(spec: ModelSpec, precisions: Precisions, weight_bytes: int, emulated: bool) -> int:
    """Bytes of a model in the trainer's format that nobody updates (layers/weight_memory.py)."""
    own = replace(precisions, fp8_rollout=[])
    others = spec.num_parameters - count_weights(spec, own.fp8_train)
    return weight_bytes * others + _fp8_copies(spec, own, emulated=emulated, backward=False)


def _has_master(optimizer: OptimizerConfig, weight_bytes: int) -> bool:
    return optimizer.master == "float32" and weight_bytes == 2


def _bytes_of_state(optimizer: OptimizerConfig, weight_bytes: int) -> float:
    """Bytes of the optimizer's state for one parameter."""
    return STATE_BYTES[optimizer.states] + (4 if _has_master(optimizer, weight_bytes) else 0)


def _optimizer(optimizer: OptimizerConfig, trained: int, weight_bytes: int, on_gpu: bool) -> MemoryPart:
    each = _bytes_of_state(optimizer, weight_bytes)
    how = f"two moments, {optimizer.states}"
    if _has_master(optimizer, weight_bytes):
        how += " and the master" if optimizer.states == "float32" else ", and the master, float32"
    if optimizer.offload and on_gpu:
        held = f"{how}: {each * trained / 2**30:.1f} GiB in host memory, two pieces of it on the device"
        return MemoryPart("optimizer", int(each * min(OFFLOAD_ELEMENTS, trained)), held)
    return MemoryPart("optimizer", int(each * trained), how, owned_bytes=int(each * trained))


def _critic(recipe: Recipe, critic: ScalarModel, weight_bytes: int, *, on_gpu: bool, emulated: bool) -> MemoryPart:
    parameters = critic.trunk.num_parameters
    states = _optimizer(recipe.critic.optimizer, parameters, weight_bytes, on_gpu)
    gradients = recipe.trainer.gradient_bytes * parameters
    num_bytes = weight_bytes * parameters + gradients + states.num_bytes
    kept = recipe.trainer.weight_codes == "kept"
    num_bytes += _fp8_copies(critic.trunk, critic.precisions, emulated=emulated, backward=kept)
    owned = weight_bytes * count_weights(critic.trunk, critic.precisions.fp8_train)
    owned += states.owned_bytes + (gradients if recipe.cluster.gradients == "sharded" else 0)
    return MemoryPart("critic", num_bytes, f"weights, FP8 copies, gradients; {states.how}", owned_bytes=owned)


def _activations(
    recipe: Recipe, spec: ModelSpec, precisions: Precisions, value_bytes: int, *, scalar: bool, **where: bool
) -> list[MemoryPart]:
    """where: frozen, whether lm_head and the norms are not trained; on_gpu."""
    trainer, frozen = recipe.trainer, where["frozen"]
    keep, together = trainer.activation_checkpointing, recipe.cluster.micro_batch_workers
    tokens = own_tokens(micro_batch_tokens(recipe), together)
    num_fp8 = len(precisions.fp8_train)
    formats = {True} if num_fp8 else set()
    formats |= {False} if num_fp8 < sum(1 for _ in spec.linears()) else set()
    kinds = [TrainedAs(value_bytes, fp8, **where) for fp8 in formats]
    layers = [_LayerMemory(spec, layer, tokens, kinds) for layer in range(spec.num_layers)]
    again = spec.num_layers if trainer.checkpointed_layers is None else trainer.checkpointed_layers
    again = 0 if keep == "none" else min(again, spec.num_layers)
    others = sum(layer.kept("none") for layer in layers[again:])
    kept = sum(layer.kept(keep) for layer in layers[:again]) + others
    what = {"none": "all kept", "attention": "inputs of layers and attention's output", "layer": "inputs of layers"}
    if 0 < again < spec.num_layers:
        what[keep] += f" of {again} layers, everything of the others"
    # The checkpointed layers are the first ones, so their backward runs after the other layers' activations are freed.
    backward = max(layer.backward(keep) for layer in layers) - others
    if others:
        backward = max(backward, *(layer.backward("none") for layer in layers))
    if scalar:
        logits, what_of = 2 * (value_bytes + 4) * tokens * spec.hidden_size, "the scalar head"
    else:
        logits = logits_bytes(spec, tokens, value_bytes, trainer.logprob_chunk, **where)
        what_of = "logits" if frozen else "logits and lm_head's gradient"
        waiting = value_bytes * spec.vocab_rows * spec.hidden_size  # lm_head's gradient, held for the embedding's
        backward += waiting if spec.tied_embeddings and not frozen else 0
    how = f"one layer's backward ({binary_size(backward)}) or {what_of} ({binary_size(logits)})"
    parts = [
        MemoryPart("activations", kept, f"{tokens:,} tokens, {what[keep]}", "training"),
        MemoryPart("working set", max(backward, logits), how, "training"),
    ]
    if together > 1:
        moved = value_bytes * tokens * EXCHANGED * spec.num_heads * spec.head_size
        parts.append(
            MemoryPart("exchanges", moved, f"heads of {together} workers that share a micro-batch", "training")
        )
    return parts


class _LayerMemory:
    """Memory of one layer of models/training_forward.py. If the model has FP8 and other linears, the larger counts."""

    def __init__(self, spec: ModelSpec, layer: int, tokens: int, formats: Sequence[TrainedAs]) -> None:
        """`formats`: with FP8 linears and with others, if there are both."""
        self.tokens = tokens
        self.stream = formats[0].value_bytes * spec.hidden_size  # bytes per token of a residual or a norm's result
        self.hidden = spec.hidden_size
        self.formats = formats
        self.blocks = [[block.memory(spec, how) for block in spec.blocks_of(layer)] for how in self.formats]

    def kept(self, keep: str) -> int:
        """Bytes kept from forward to backward."""
        return max(
            int(self.tokens * (self.stream + self._kept_of_blocks(keep, how, blocks)))
            for how, blocks in zip(self.formats, self.blocks, strict=True)
        )

    def _kept_of_blocks(self, keep: str, how: TrainedAs, blocks: Sequence[BlockMemory]) -> float:
        costly = sum(block.costly for block in blocks) if keep != "layer" else 0
        return costly + (self._saved(how, blocks) if keep == "none" else 0)

    def _saved(self, how: TrainedAs, blocks: Sequence[BlockMemory]) -> float:
        """Bytes per token that the blocks save, with their norms' results and the residual stream between them."""
        norms = len(blocks) * how.operand_bytes * self.hidden
        return sum(block.saved for block in blocks) + norms + (len(blocks) - 1) * self.stream

    def backward(self, keep: str) -> int:
        """Peak bytes of the layer's backward, besides what is kept. The last block's backward runs first."""
        return max(
            int(max(self._moments(keep, how, blocks))) for how, blocks in zip(self.formats, self.blocks, strict=True)
        )

    def _moments(self, keep: str, how: TrainedAs, blocks: Sequence[BlockMemory]) -> Iterator[float]:
        again = self._saved(how, blocks) if keep != "none" else 0
        again += sum(block.costly for block in blocks) if keep == "layer" else 0
        of_weights = 0
        for place in reversed(range(len(blocks))):
            below = sum(block.made_with_costly for block in blocks[:place]) if keep == "layer" else 0
            for peak in blocks[place].peaks:
                per_token = again + below + self.stream + peak.per_token
                yield self.tokens * per_token + of_weights + peak.of_weights
            of_weights += blocks[place].of_weights


def with_kv_cache(
    recipe: Recipe,
    parts: list[MemoryPart],
    per_token: int,
    device_bytes: int | None,
    *,
    on_gpu: bool,
    takes_turns: bool,
) -> MemoryEstimate:
    """The estimate of these parts and a KV cache, by the engine's rule: `kv_cache_tokens` if given, on a GPU a share of
    the memory that is free while it generates, on a CPU enough for a step's requests. In whole pages."""
    engine, rollout, tokens = recipe.engine, recipe.rollout, recipe.engine.kv_cache_tokens
    if tokens is None and not on_gpu:
        longest = in_pages(recipe, rollout.max_prompt_tokens + rollout.max_new_tokens)
        tokens = recipe.answers_at_once() * longest
    elif tokens is None and device_bytes is not None:
        free = device_bytes - sum(part.num_bytes for part in parts if part.when != "training")
        tokens = int(max(free, 0) * engine.kv_memory_fraction) // max(1, per_token)
    if tokens is None:
        return MemoryEstimate(tuple(parts), per_token, None, takes_turns)
    tokens = tokens // engine.page_size * engine.page_size
    cache = MemoryPart(CACHE, tokens * per_token, f"{tokens:,} tokens of {per_token:,} bytes", "generating")
    return MemoryEstimate((*parts, cache), per_token, tokens, takes_turns)


GATHERED_CHUNKS = 4  # chunks whose logits' gradients share one GEMM (kernels/gemm/linear_logprobs_backward.py)


def logits_bytes(spec: ModelSpec, tokens: int, value_bytes: int, chunk: int, *, frozen: bool, on_gpu: bool) -> int:
    """value_bytes: of the model's dtype. chunk: `trainer.logprob_chunk`. frozen: lm_head is not trained."""
    rows, group = min(chunk, tokens), min(GATHERED_CHUNKS * chunk, tokens)
    weight = 0 if frozen else spec.vocab_rows * spec.hidden_size
    if on_gpu:
        while_summed = (4 * rows + value_bytes * group) * spec.vocab_size + 4 * weight
        most = max(while_summed, (4 + (value_bytes if value_bytes < 4 else 0)) * weight)
    else:
        wide = 4 * spec.vocab_rows * spec.hidden_size  # lm_head in float32
        most = max(37 * rows * spec.vocab_size, (16 * rows + 4 * group) * spec.vocab_size + wide + 4 * weight)
    return most + 4 * value_bytes * tokens * spec.hidden_size


def longest_rollout(recipe: Recipe) -> int:
    """Tokens of the longest prompt and answer, also of an evaluation, in whole pages."""
    return in_pages(recipe, _longest(recipe))


def micro_batch_tokens(recipe: Recipe) -> int:
    """Tokens of the largest micro-batch: a sample longer than `tokens_per_micro_batch` has one to itself. A sample is
    a prompt and an answer, or as long as the context in data and in environments that may have several turns."""
    rollout, environments = recipe.rollout, recipe.each_environment.values()
    answers = recipe.algorithm.learns_from == "rollouts"
    one_turn = answers and all(one.kind in ONE_TURN and not one.tools for one in environments)
    longest = rollout.max_prompt_tokens + rollout.max_new_tokens if one_turn else recipe.model.context_length
    return max(recipe.trainer.tokens_per_micro_batch, longest)


def own_tokens(tokens: int, workers: int) -> int:
    """The most of a micro-batch's tokens that one of the workers has that share it, in whole blocks."""
    return tokens if workers == 1 else min(tokens, TOKEN_BLOCK * -(-tokens // (TOKEN_BLOCK * workers)))


def generates(recipe: Recipe) -> bool:
    """Whether the run samples answers, so that it needs a KV cache."""
    return recipe.algorithm.learns_from == "rollouts" or recipe.draws_evaluations


def smallest_cache(recipe: Recipe) -> int:
    """Tokens of the smallest KV cache with which a worker generates, in whole pages."""
    context = recipe.model.context_length if TRAITS[recipe.engine.backend].needs_context else 0
    return in_pages(recipe, max(_longest(recipe), context))


def describe_smallest(recipe: Recipe) -> str:
    """What `smallest_cache` holds."""
    backend = TRAITS[recipe.engine.backend]
    if backend.needs_context:
        return f"model.context_length {recipe.model.context_length:,}, without which {backend.title} does not start"
    return "one rollout"


def _longest(recipe: Recipe) -> int:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    sets = [one for each in recipe.each_environment.values() for one in each.eval_sets.values()]
    limits = (evaluation.max_new_tokens, *(one.max_new_tokens for one in sets))
    return rollout.max_prompt_tokens + max(rollout.max_new_tokens, *(limit or 0 for limit in limits))


def in_pages(recipe: Recipe, tokens: int) -> int:
    """As many tokens in whole pages of the KV cache."""
    page = recipe.engine.page_size
    return -(-tokens // page) * page


@dataclass(frozen=True, slots=True)
class SavedState:
    """Size of a run's state in bytes, which a checkpoint copies to host memory (trainer/state_writer.py).

    P is the number of trained parameters (with LoRA, of the adapters). b is the bytes of a value in the model's dtype,
    s the bytes of a parameter's two moments.

        weights       b P
        optimizer     s P + 4 P      both moments, and the float32 master weights. No master weights with
                                     `stochastic_rounding` or float32 weights
        critic        both of these for PPO's value model
        reference     b P            only if it changes during the run (`reference_every`)
    """

    weights: int  # includes those of a reference that changes during the run
    optimizer: int

    @property
    def num_bytes(self) -> int:
        return self.weights + self.optimizer


def saves_beside_steps(recipe: Recipe) -> bool:
    """Whether a checkpoint is due before the run's last step. Only such a checkpoint is copied."""
    return 0 < recipe.checkpoint.every < recipe.steps


def saved_state(recipe: Recipe, spec: ModelSpec, critic: ScalarModel | None) -> SavedState:
    """Estimate the size of one checkpoint of the run."""
    weight_bytes, lora, algorithm = recipe.model.value_bytes, recipe.model.lora, recipe.algorithm
    trains_scalar = algorithm.name == "reward_model"
    if trains_scalar:
        spec = replace(spec, tied_embeddings=True)  # the scalar head replaces lm_head
    trained = spec.num_parameters
    if lora is not None:
        trained = adapter_elements(spec, lora) + (spec.hidden_size if trains_scalar else 0)
    weights = weight_bytes * trained
    optimizer = int(_bytes_of_state(recipe.trainer.optimizer, weight_bytes) * trained)
    if isinstance(algorithm, KlSettings) and algorithm.keeps_reference and algorithm.reference_every:
        weights *= 2
    if critic is not None:
        elements = critic.trunk.num_parameters
        weights += weight_bytes * elements
        optimizer += int(_bytes_of_state(recipe.critic.optimizer, weight_bytes) * elements)
    return SavedState(weights, optimizer)
