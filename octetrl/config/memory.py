"""How much device memory a recipe takes, by part, before anything is built. No torch.

P parameters, P8 those of linears that are FP8, L layers, T tokens of a micro-batch, b bytes of the model's dtype (2 in
BF16), c of an operand of wgrad (1 + 4/128 in FP8: codes and scales; else b). Always there:

    weights         b P                                 one set: engine and trainer read the same tensors
    FP8 copies      (1 + 4 / 128^2) P8                  codes and one float32 scale a 128x128 block, shared as well
                    + 1 P8                              the transposed codes of dgrad, where training is FP8;
                                                        `weight_codes: remade`: none, and no codes in an update
                    + 8 P8 + 8 P8                       emulated, instead: the codes' values in float64, on each side;
                                                        `remade`: on the engine's alone
    gradients       4 P                                 summed in float32
    optimizer       s P + 4 P                           two moments, s = 8, 4 or 2 + 2/128; the float32 master, unless
                                                        `stochastic_rounding`. `offload`: two pieces of 2^24 elements
    reference       as weights and FP8 copies           where `kl_coefficient` is above 0, dpo, ipo; a teacher's own;
                                                        no transposed codes, it has no backward
    critic          as all of the above but reference   PPO's, of its own shape and optimizer, without lm_head
    reward model    as weights and FP8 copies           where completions are scored by one
    CUDA context    0.6 GB                              kernels and the driver's own, measured; torch does not count it

While training, activations and working set:

    activations     b T L E                             "layer": each layer's input
                    + T L (b Q + 4 H)                   "attention": its output and log-sum-exp as well
                    + T L (b (E + X + 2 F) + 2 c E)     "none": all that a layer's backward reads; so for the layers
                                                        beyond `checkpointed_layers`
    working set     the larger of
      one layer's backward      what is alive at its fullest moment, `_LayerMemory`
      logits                    (4 + 4 b) chunk V + 4 V E, or (4 + b) V E: logits of a chunk, the gradients of four, the
                                gradient of lm_head summed in float32, then rounded; and 4 b T E of hidden states
                    + b V E where embeddings are tied: lm_head's gradient waits for the embedding's
      a scalar head             2 (b + 4) T E, in the place of logits: hidden states, widened, and their gradients. The
                                critic is trained when the policy's activations are gone: the larger of the two counts

With LoRA gradients, optimizer and reference count A, the parameters of the adapters and of a reward model's head,
instead of P; weights that training has in FP8 are kept as codes alone; layers keep n1 and n2 in BF16 for the adapters,
and no weight has a gradient. PPO's critic is trained whole.

While generating, the KV cache: L kv_size (bytes of K + bytes of V) a token, + 8 L heads if dynamic. On a GPU with
`release_for_training` the two share what is left, so the total is what is always there and the larger of them.

E hidden size, F intermediate size, H heads, Q = H * head size, K kv heads * head size, X = Q + 2 K, V vocabulary. What
no formula knows (cuBLAS work space, fragmentation, CUDA graphs of decoding) is left out: keep a tenth of the device
free. A block's layout says what the block holds (config/blocks.py); above are attention and a gated MLP. What torch's
autograd keeps on a CPU is of that order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octetrl.config.algorithm import DistillConfig
from octetrl.config.blocks import BlockMemory, TrainedAs
from octetrl.config.lora import adapter_elements
from octetrl.config.objective_settings import AlgorithmConfig
from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec

Format = Literal["bf16", "fp8"]
When = Literal["always", "training", "generating"]

CUDA_CONTEXT = 600_000_000
STATE_BYTES = {"float32": 8.0, "bfloat16": 4.0, "8bit": 2 + 2 / 128}  # of both moments of a parameter
OFFLOAD_ELEMENTS = 2 << 24  # on the device at one time: two pieces (trainer/optimizer_offload.py)
GATHERED_CHUNKS = 4  # whose logits' gradients are multiplied at once (kernels/gemm/linear_logprobs_backward.py)
RETURNING = "FP8 codes"  # the part that is remade in an update


@dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    num_bytes: int
    how: str  # one phrase on what it is made of
    when: When = "always"


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    parts: tuple[MemoryPart, ...]  # the KV cache last, if its size is known
    kv_bytes_per_token: int
    kv_cache_tokens: int | None  # None: a share of a device whose memory is not known
    takes_turns: bool  # the KV cache is freed for training

    def bytes_when(self, when: When) -> int:
        return sum(part.num_bytes for part in self.parts if part.when == when)

    @property
    def total_bytes(self) -> int:
        """At the fullest moment."""
        training, generating = self.bytes_when("training"), self.bytes_when("generating")
        both = max(training, generating) if self.takes_turns else training + generating
        return self.bytes_when("always") + both

    @property
    def training_bytes(self) -> int:
        """Bytes while training, with the KV cache freed: with activations, or later without them and with all codes."""
        returning = sum(part.num_bytes for part in self.parts if part.name == RETURNING)
        return self.bytes_when("always") + max(self.bytes_when("training"), returning)


@dataclass(frozen=True, slots=True)
class ScalarModel:
    """A model with a scalar head that a run holds beside the policy."""

    spec: ModelSpec
    precisions: Precisions

    @property
    def trunk(self) -> ModelSpec:
        return replace(self.spec, tied_embeddings=True)


@dataclass(frozen=True, slots=True)
class Precisions:
    """What the precision policy decided; linears by their names, such as `layers.3.mlp.down_proj`."""

    fp8_rollout: Collection[str]
    fp8_train: Collection[str]
    k_cache: Format
    v_cache: Format


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
    """The parts of one device's memory.

    `device_bytes` is what the device has; None: not known, then a KV cache that is a share of it has no size either.
    `critic` and `scorer` (a reward model) are those that the recipe asks for.
    """
    weight_bytes = 2 if recipe.model.dtype == "bfloat16" else 4
    trains_scalar = recipe.algorithm.name == "reward_model"
    if trains_scalar:
        spec = ScalarModel(spec, precisions).trunk
    lora = recipe.model.lora
    head = spec.hidden_size if trains_scalar else 0
    trained = spec.num_parameters if lora is None else adapter_elements(spec, lora) + head
    dropped = 0 if lora is None else _elements(spec, precisions.fp8_train)
    how = f"{recipe.model.dtype}, shared by both sides" + (", what is FP8 as codes alone" if dropped else "")
    parts = [MemoryPart("weights", weight_bytes * (spec.num_parameters - dropped), how)]
    emulated = recipe.fp8.emulate or (recipe.fp8.emulate is None and not on_gpu)
    parts += _fp8_parts(recipe, spec, precisions, emulated=emulated, has_critic=critic is not None)
    if lora is not None:
        parts.append(MemoryPart("adapters", weight_bytes * trained, f"{trained:,} parameters, all that is trained"))
    parts.append(MemoryPart("gradients", 4 * trained, "float32 sums"))
    parts.append(_optimizer(recipe, trained, weight_bytes, on_gpu))
    if teacher is not None:
        taught = weight_bytes * teacher[0].num_parameters + _fp8_copies(*teacher, emulated=emulated, backward=False)
        parts.append(MemoryPart("teacher", taught, _teacher(recipe.algorithm)))
    if recipe.algorithm.keeps_reference:
        its_copies = _fp8_copies(spec, precisions, emulated=emulated, backward=False) if lora is None else 0
        reference = weight_bytes * trained + its_copies
        what = "weights and FP8 copies" if lora is None else "adapters"
        parts.append(MemoryPart("reference model", reference, f"{what} of the policy it began with"))
    if on_gpu:
        parts.append(MemoryPart("CUDA context", CUDA_CONTEXT, "kernels and the driver's own"))
    if scorer is not None:
        held = weight_bytes * scorer.trunk.num_parameters + _fp8_copies(
            scorer.trunk, scorer.precisions, emulated=emulated, backward=False
        )
        parts.append(MemoryPart("reward model", held, "weights and FP8 copies of the model that scores"))
    frozen = lora is not None
    activations = _activations(recipe, spec, precisions, weight_bytes, scalar=trains_scalar, frozen=frozen)
    if critic is not None:
        parts.append(_critic(recipe, critic, weight_bytes, on_gpu=on_gpu, emulated=emulated))
        own = _activations(recipe, critic.trunk, critic.precisions, weight_bytes, scalar=True, frozen=False)
        activations = max(activations, own, key=lambda found: sum(part.num_bytes for part in found))
    parts += activations
    if trains_scalar:
        return MemoryEstimate(tuple(parts), 0, 0, takes_turns=True)
    per_token = kv_bytes_per_token(recipe, spec, precisions)
    taken = sum(part.num_bytes for part in parts if part.when != "training")
    tokens = _kv_cache_tokens(recipe, per_token, on_gpu, None if device_bytes is None else device_bytes - taken)
    if tokens is not None:
        how = f"{tokens:,} tokens of {per_token:,} bytes"
        parts.append(MemoryPart("KV cache", tokens * per_token, how, "generating"))
    takes_turns = on_gpu and recipe.engine.release_for_training
    return MemoryEstimate(tuple(parts), per_token, tokens, takes_turns)


def _teacher(algorithm: AlgorithmConfig) -> str:
    assert isinstance(algorithm, DistillConfig), f"{algorithm.name} has no teacher"
    return f"{algorithm.teacher}, {algorithm.teacher_precision}"


def fewest_checkpointed_layers(
    recipe: Recipe, num_layers: int, device_bytes: int, estimate: Callable[[Recipe], MemoryEstimate]
) -> int | None:
    """With how few of the layers checkpointed training on a GPU stays within nine tenths of the device; None: with no
    number. `estimate`: the memory of a recipe that differs from this one in that."""
    for number in range(num_layers + 1):
        trainer = recipe.trainer.model_copy(update={"checkpointed_layers": number})
        found = estimate(recipe.model_copy(update={"trainer": trainer}))
        training = found.training_bytes
        if not found.takes_turns:
            training += found.bytes_when("generating")
        if training <= 0.9 * device_bytes:
            return number
    return None


def kv_bytes_per_token(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes that one token takes in the cache, over all layers."""
    wide = 2 if recipe.model.dtype == "bfloat16" else 4
    formats = (precisions.k_cache, precisions.v_cache)
    values = sum(1 if cache == "fp8" else wide for cache in formats) * spec.kv_size
    scales = 4 * spec.num_kv_heads * formats.count("fp8") if recipe.fp8.kv_cache == "dynamic" else 0
    return spec.num_layers * (values + scales)


def _elements(spec: ModelSpec, names: Collection[str]) -> int:
    """Weights of these linears."""
    wanted = set(names)
    return sum(linear.num_weights for name, linear in spec.linears() if name in wanted)


def _fp8_parts(
    recipe: Recipe, spec: ModelSpec, precisions: Precisions, *, emulated: bool, has_critic: bool
) -> Iterator[MemoryPart]:
    """Of the policy. Codes that are remade are gone while it is trained. With a critic they count as always there; that
    is too much by the smaller set: each model's are there while the other is trained."""
    remakes = recipe.trainer.weight_codes == "remade"
    copies = _fp8_copies(spec, precisions, emulated=emulated, backward=not remakes)
    given_back = _elements(spec, precisions.fp8_train) if remakes else 0
    if copies:
        how = "what is not remade of codes and scales" if remakes else "codes, transposed codes and scales"
        how = "codes, scales, and the codes' values in float64" if emulated else how
        yield MemoryPart("FP8 copies", copies - given_back, how)
    if given_back:
        when: When = "always" if has_critic else "generating"
        yield MemoryPart(RETURNING, given_back, "remade for each product of an update", when)


def _fp8_copies(spec: ModelSpec, precisions: Precisions, *, emulated: bool, backward: bool) -> int:
    """`backward`: with what an update keeps, transposed codes or, emulated, values of the trainer's own."""
    rollout, train = set(precisions.fp8_rollout), set(precisions.fp8_train)
    either = _elements(spec, rollout | train)
    codes_and_scales = either + 4 * (either // 128**2)
    if emulated:
        return codes_and_scales + 8 * (either + (_elements(spec, rollout & train) if backward else 0))
    return codes_and_scales + (_elements(spec, train) if backward else 0)


def _optimizer(recipe: Recipe, trained: int, weight_bytes: int, on_gpu: bool) -> MemoryPart:
    optimizer = recipe.trainer.optimizer
    own_master = optimizer.master == "float32" and weight_bytes == 2
    each = STATE_BYTES[optimizer.states] + (4 if own_master else 0)
    how = f"two moments, {optimizer.states}"
    if own_master:
        how += " and the master" if optimizer.states == "float32" else ", and the master, float32"
    if optimizer.offload and on_gpu:
        held = f"{how}: {each * trained / 2**30:.1f} GiB of the host's memory, here two pieces of it"
        return MemoryPart("optimizer", int(each * min(OFFLOAD_ELEMENTS, trained)), held)
    return MemoryPart("optimizer", int(each * trained), how)


def _critic(recipe: Recipe, critic: ScalarModel, weight_bytes: int, *, on_gpu: bool, emulated: bool) -> MemoryPart:
    optimizer = recipe.trainer.model_copy(update={"optimizer": recipe.critic.optimizer})
    states = _optimizer(
        recipe.model_copy(update={"trainer": optimizer}), critic.trunk.num_parameters, weight_bytes, on_gpu
    )
    num_bytes = (weight_bytes + 4) * critic.trunk.num_parameters + states.num_bytes
    kept = recipe.trainer.weight_codes == "kept"
    num_bytes += _fp8_copies(critic.trunk, critic.precisions, emulated=emulated, backward=kept)
    return MemoryPart("critic", num_bytes, f"weights, FP8 copies, gradients; {states.how}")


def _activations(
    recipe: Recipe, spec: ModelSpec, precisions: Precisions, value_bytes: int, *, scalar: bool, frozen: bool
) -> list[MemoryPart]:
    trainer = recipe.trainer
    tokens, keep = trainer.tokens_per_micro_batch, trainer.activation_checkpointing
    num_fp8 = len(precisions.fp8_train)
    formats = {True} if num_fp8 else set()
    formats |= {False} if num_fp8 < sum(1 for _ in spec.linears()) else set()
    layers = [_LayerMemory(spec, layer, tokens, value_bytes, formats, frozen) for layer in range(spec.num_layers)]
    again = spec.num_layers if trainer.checkpointed_layers is None else trainer.checkpointed_layers
    again = 0 if keep == "none" else min(again, spec.num_layers)
    others = sum(layer.kept("none") for layer in layers[again:])
    kept = sum(layer.kept(keep) for layer in layers[:again]) + others
    what = {"none": "all kept", "attention": "inputs of layers and attention's output", "layer": "inputs of layers"}
    if 0 < again < spec.num_layers:
        what[keep] += f" of {again} layers, all of the others"
    backward = max(layer.backward(keep) for layer in layers) - others  # the first layers' turn comes last
    if others:
        backward = max(backward, *(layer.backward("none") for layer in layers))
    if scalar:
        logits, what_of = 2 * (value_bytes + 4) * tokens * spec.hidden_size, "the scalar head"
    else:
        logits = _logits(spec, tokens, value_bytes, trainer.logprob_chunk, frozen)
        what_of = "logits" if frozen else "logits and lm_head's gradient"
        waiting = value_bytes * spec.vocab_size * spec.hidden_size  # lm_head's gradient, for the embedding's
        backward += waiting if spec.tied_embeddings and not frozen else 0
    how = f"one layer's backward ({backward / 2**30:.2f}) or {what_of} ({logits / 2**30:.2f})"
    return [
        MemoryPart("activations", kept, f"{tokens:,} tokens, {what[keep]}", "training"),
        MemoryPart("working set", max(backward, logits), how, "training"),
    ]


def _logits(spec: ModelSpec, tokens: int, value_bytes: int, chunk: int, frozen: bool) -> int:
    rows, group = min(chunk, tokens), min(GATHERED_CHUNKS * chunk, tokens)
    weight = 0 if frozen else spec.vocab_size * spec.hidden_size
    while_summed = (4 * rows + value_bytes * group) * spec.vocab_size + 4 * weight
    while_rounded = (4 + (value_bytes if value_bytes < 4 else 0)) * weight
    return max(while_summed, while_rounded) + 4 * value_bytes * tokens * spec.hidden_size


class _LayerMemory:
    """Bytes of one layer of models/training_forward.py, in the format that takes most of those in the model."""

    def __init__(
        self, spec: ModelSpec, layer: int, tokens: int, value_bytes: int, formats: Collection[bool], frozen: bool
    ) -> None:
        """`formats`: whether linears are FP8, or are not; `frozen`: beside adapters."""
        self.tokens = tokens
        self.stream = value_bytes * spec.hidden_size  # bytes a token of a residual or a norm's result
        self.hidden = spec.hidden_size
        self.formats = [TrainedAs(value_bytes, fp8, frozen) for fp8 in formats]
        self.blocks = [[block.memory(spec, how) for block in spec.blocks_of(layer)] for how in self.formats]

    def kept(self, keep: str) -> int:
        """From forward to backward."""
        return max(
            int(self.tokens * (self.stream + self._kept_of_blocks(keep, how, blocks)))
            for how, blocks in zip(self.formats, self.blocks, strict=True)
        )

    def _kept_of_blocks(self, keep: str, how: TrainedAs, blocks: Sequence[BlockMemory]) -> float:
        costly = sum(block.costly for block in blocks) if keep != "layer" else 0
        return costly + (self._saved(how, blocks) if keep == "none" else 0)

    def _saved(self, how: TrainedAs, blocks: Sequence[BlockMemory]) -> float:
        """Of each block what it saves and its norm's result, and the residual stream between them."""
        norms = len(blocks) * how.operand_bytes * self.hidden
        return sum(block.saved for block in blocks) + norms + (len(blocks) - 1) * self.stream

    def backward(self, keep: str) -> int:
        """Beside what is kept, at the fullest moment of its blocks' backwards, the last block's first."""
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


def _kv_cache_tokens(recipe: Recipe, per_token: int, on_gpu: bool, free_bytes: int | None) -> int | None:
    """As the engine sizes it, in whole pages: as told, a share of what is free, or a step's requests on a CPU."""
    engine, rollout = recipe.engine, recipe.rollout
    if engine.kv_cache_tokens is not None:
        tokens = engine.kv_cache_tokens
    elif on_gpu:
        if free_bytes is None:
            return None
        tokens = int(max(free_bytes, 0) * engine.kv_memory_fraction) // per_token
    else:
        longest = -(-(rollout.max_prompt_tokens + rollout.max_new_tokens) // engine.page_size) * engine.page_size
        tokens = min(rollout.prompts_per_step * rollout.group_size, engine.max_batch) * longest
    return tokens // engine.page_size * engine.page_size
