"""How much device memory a recipe takes, by part, before anything is built. No torch.

P parameters, P8 those of linears that are FP8, L layers, T tokens of a micro-batch, b bytes of the model's dtype (2 in
BF16). Per part:

    weights         b P                                 one set: engine and trainer read the same tensors
    FP8 copies      (1 + 4 / 128^2) P8                  codes and one float32 scale a 128x128 block, shared as well
                    + 1 P8                              the transposed codes of dgrad, where training is FP8
                    + 8 P8                              emulated only: the codes' values in float64
    gradients       4 P                                 summed in float32
    optimizer       8 P + 4 P                           two moments; the float32 master, unless `stochastic_rounding`
    reference       as weights and FP8 copies           where `kl_coefficient` is above 0
    activations     b T (L E + A)                       checkpointed: each layer's input and one layer's inside, A
                    b T L A                             else
                    A = 4 E + Q + 3 F + (Q + 2 K) (2 with QK-norm, else 1)    what one layer keeps for its backward
    logits          3 * 4 * logprob_chunk * V           logits, their gradient and one temporary, in float32
                    + (4 + b) V E                       the gradient of lm_head, summed in float32, then rounded
    KV cache        kv_bytes_per_token * tokens         L kv_size (bytes of K + bytes of V), + 8 L heads if dynamic

E hidden size, F intermediate size, Q heads * head size, K kv heads * head size, V vocabulary. What no formula knows
(the CUDA context, cuBLAS work space, fragmentation) is left out: keep a tenth of the device free.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from octetrl.config.schema import Recipe
from octetrl.config.spec import ModelSpec

Format = Literal["bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    name: str
    num_bytes: int
    how: str  # one phrase on what it is made of


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    parts: tuple[MemoryPart, ...]  # the KV cache last, if its size is known
    kv_bytes_per_token: int
    kv_cache_tokens: int | None  # None: a share of a device whose memory is not known

    @property
    def total_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Precisions:
    """What the precision policy decided; linears by their names, such as `layers.3.mlp.down_proj`."""

    fp8_rollout: Collection[str]
    fp8_train: Collection[str]
    k_cache: Format
    v_cache: Format


def estimate_memory(
    recipe: Recipe, spec: ModelSpec, precisions: Precisions, *, on_gpu: bool, device_bytes: int | None
) -> MemoryEstimate:
    """The parts of one device's memory.

    `device_bytes` is what the device has; None: not known, then a KV cache that is a share of it has no size either.
    """
    weight_bytes = 2 if recipe.model.dtype == "bfloat16" else 4
    parts = [MemoryPart("weights", weight_bytes * spec.num_parameters, f"{recipe.model.dtype}, shared by both sides")]
    copies = _fp8_copies(spec, precisions, emulated=recipe.fp8.emulate or (recipe.fp8.emulate is None and not on_gpu))
    if copies:
        parts.append(MemoryPart("FP8 copies", copies, "codes, transposed codes and scales"))
    parts.append(MemoryPart("gradients", 4 * spec.num_parameters, "float32 sums"))
    own_master = recipe.trainer.optimizer.master == "float32" and weight_bytes == 2
    moments = "two moments and the master, float32" if own_master else "two moments, float32"
    parts.append(MemoryPart("optimizer", (12 if own_master else 8) * spec.num_parameters, moments))
    if recipe.algorithm.kl_coefficient > 0:
        reference = weight_bytes * spec.num_parameters + copies
        parts.append(MemoryPart("reference model", reference, "weights and FP8 copies of the policy it began with"))
    parts += _activations(recipe, spec, weight_bytes)
    per_token = kv_bytes_per_token(recipe, spec, precisions)
    taken = sum(part.num_bytes for part in parts if part.name not in ("activations", "logits"))
    tokens = _kv_cache_tokens(recipe, per_token, on_gpu, None if device_bytes is None else device_bytes - taken)
    if tokens is not None:
        how = f"{tokens:,} tokens of {per_token:,} bytes"
        parts.append(MemoryPart("KV cache", tokens * per_token, how))
    return MemoryEstimate(tuple(parts), per_token, tokens)


def kv_bytes_per_token(recipe: Recipe, spec: ModelSpec, precisions: Precisions) -> int:
    """Bytes that one token takes in the cache, over all layers."""
    wide = 2 if recipe.model.dtype == "bfloat16" else 4
    formats = (precisions.k_cache, precisions.v_cache)
    values = sum(1 if cache == "fp8" else wide for cache in formats) * spec.kv_size
    scales = 4 * spec.num_kv_heads * formats.count("fp8") if recipe.fp8.kv_cache == "dynamic" else 0
    return spec.num_layers * (values + scales)


def linear_elements(spec: ModelSpec) -> dict[str, int]:
    """Weights of each kind of linear in one layer, by the name it has in the precision policy."""
    return {
        "attention.qkv_proj": spec.hidden_size * (spec.q_size + 2 * spec.kv_size),
        "attention.o_proj": spec.hidden_size * spec.q_size,
        "mlp.gate_up_proj": spec.hidden_size * 2 * spec.intermediate_size,
        "mlp.down_proj": spec.hidden_size * spec.intermediate_size,
    }


def _fp8_copies(spec: ModelSpec, precisions: Precisions, *, emulated: bool) -> int:
    elements = linear_elements(spec)

    def total(names: Collection[str]) -> int:
        return sum(elements[name.split(".", 2)[2]] for name in names)

    either = total(set(precisions.fp8_rollout) | set(precisions.fp8_train))
    codes_and_scales = either + 4 * (either // 128**2)
    return codes_and_scales + (8 * either if emulated else total(precisions.fp8_train))


def _activations(recipe: Recipe, spec: ModelSpec, value_bytes: int) -> list[MemoryPart]:
    trainer = recipe.trainer
    qkv = spec.q_size + 2 * spec.kv_size
    layer = 4 * spec.hidden_size + spec.q_size + 3 * spec.intermediate_size + qkv * (2 if spec.qk_norm else 1)
    checkpointed = trainer.activation_checkpointing == "layer"
    kept = spec.num_layers * spec.hidden_size + layer if checkpointed else spec.num_layers * layer
    how = f"{trainer.tokens_per_micro_batch:,} tokens, {'checkpointed' if checkpointed else 'all kept'}"
    logits = (3 * 4 * trainer.logprob_chunk + (4 + value_bytes) * spec.hidden_size) * spec.vocab_size
    return [
        MemoryPart("activations", value_bytes * trainer.tokens_per_micro_batch * kept, how),
        MemoryPart("logits", logits, f"{trainer.logprob_chunk:,} trained tokens at a time, and lm_head's gradient"),
    ]


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
