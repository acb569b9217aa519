"""What another rollout backend cannot do (`engine.backend`), as config/validate.py reports it. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.openai import MOST_STOPS, openai_problems
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.config.validate_speculation import changed_speculation
from octetrl.config.vllm import LEAST_TEMPERATURE, MOST_TEMPERATURE, padded_vocabulary
from octetrl.shapes.blocks import SCALE_PER_TOKEN
from octetrl.shapes.spec import ModelSpec

FIELD = "engine.backend"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose parameters have the same rows here and in vLLM
BLOCK = 128  # rows of a block with one scale


def backend_problems(recipe: Recipe, training: bool = True) -> Iterator[Problem]:
    """Yield the settings that the backend does not have, or that have no effect with it. training: see
    `combination_problems`."""
    if recipe.engine.backend == "vllm":
        yield from _vllm_problems(recipe)
    elif recipe.engine.backend == "openai":
        yield from _openai_problems(recipe, training)
    if recipe.engine.openai is not None and recipe.engine.backend != "openai":
        text = (
            f"engine.openai: it has no effect with {FIELD}: {recipe.engine.backend}; add {FIELD}=openai, or remove it"
        )
        yield Problem(("engine.openai", FIELD), text)


def without_effect(recipe: Recipe) -> str | None:
    """The recipe's settings of `engine` that its backend does not read, in one line. None: there are none. They are no
    problem: a recipe that trains here is evaluated by a server as well."""
    if recipe.engine.backend != "openai":
        return None
    unread = [name for name in type(recipe.engine).model_fields if name not in {"backend", "openai", "speculation"}]
    given = [f"engine.{name}" for name in unread if name in recipe.engine.model_fields_set]
    given += changed_speculation(recipe)
    verb = "has" if len(given) == 1 else "have"
    return f"{', '.join(given)} {verb} no effect with {FIELD}: openai; the server has its own" if given else None


def _vllm_problems(recipe: Recipe) -> Iterator[Problem]:
    cluster, fp8, speculation = recipe.cluster, recipe.fp8, recipe.engine.speculation
    own, drafts = "or engine.backend: octetrl", changed_speculation(recipe)
    shares = cluster.workers_per_gpu > 1 and cluster.tensor_parallel == 1  # with it, no cache makes it right
    rules = (
        (cluster.device == "cpu" or cluster.on_cpus, _cpu_field(recipe), "needs NVIDIA GPUs; run there,"),
        (
            (cluster.gpus_per_node or 0) % cluster.tensor_parallel > 0,
            "cluster.tensor_parallel",
            "keeps the workers that share a model on one machine; give a multiple of it as gpus_per_node,",
        ),
        (
            cluster.weights_in_flight != "off",
            "cluster.weights_in_flight",
            "cannot change weights while it generates; set it to off,",
        ),
        (
            shares and recipe.engine.kv_cache_tokens is None,
            "cluster.workers_per_gpu",
            "sizes its cache by a GPU of its own; give engine.kv_cache_tokens, or set it to 1,",
        ),
        (recipe.algorithm.learns_from != "rollouts", "algorithm.name", "would generate nothing; leave it out,"),
        (speculation.name != "none", "engine.speculation.name", "has no n-gram drafts here; use none,"),
        *((speculation.name == "none", field, "makes no drafts here; leave it out,") for field in drafts),
        (recipe.engine.prefix_cache == "keep", "engine.prefix_cache", "drops its prefixes; use drop_on_publish,"),
        (recipe.model.lora is not None, "model.lora", "gets no adapters so far; train the weights,"),
        (recipe.model.dtype != "bfloat16", "model.dtype", "runs in bfloat16 here; use that,"),
        (fp8.kv_cache in SCALE_PER_TOKEN, "fp8.kv_cache", "has no scales of tokens here; use calibrated or none,"),
        (fp8.kv_cache_tensors != "both", "fp8.kv_cache_tensors", "stores K and V in one format; use both,"),
        (fp8.emulate is True, "fp8.emulate", "does not emulate FP8; leave it out,"),
        *(
            (
                bool(value) and not LEAST_TEMPERATURE <= value <= MOST_TEMPERATURE,
                f"{section}.temperature",
                f"samples at {LEAST_TEMPERATURE:g} to {MOST_TEMPERATURE:g}, not at {value:g}; change it,",
            )
            for section, value in (
                ("rollout", recipe.rollout.temperature),
                ("evaluation", recipe.evaluation.temperature),
            )
        ),
    )
    for is_wrong, field, text in rules:
        if is_wrong:
            yield Problem((field, FIELD), f"{field}: engine.backend: vllm {text} {own}")


def _cpu_field(recipe: Recipe) -> str:
    """The field that asks for workers on the CPU."""
    if recipe.cluster.cpus is not None:
        return "cluster.cpus"
    return "cluster.device" if recipe.cluster.trainer_cpus is None else "cluster.trainer_cpus"


def backend_spec_problems(recipe: Recipe, spec: ModelSpec) -> Iterator[Problem]:
    """Yield what of this model the adapter does not know, or vLLM does not store."""
    if recipe.engine.backend != "vllm":
        return
    if spec.family not in FAMILIES:
        text = f"{FIELD}: vllm is not told the parameters of {spec.family}; it knows {', '.join(FAMILIES)}"
        yield Problem((FIELD,), f"{text}; use engine.backend: octetrl")
    for text in _lacks_of_vllm(spec.whole):
        yield Problem((FIELD,), f"{FIELD}: vllm {text}; use engine.backend: octetrl")
    size, rows = recipe.cluster.tensor_parallel, padded_vocabulary(spec.vocab_size)
    if rows % size:
        text = (
            f"cluster.tensor_parallel: engine.backend: vllm cuts the vocabulary in equal parts, and {size} does not"
            f" divide its {rows:,} rows; use a power of two, or engine.backend: octetrl"
        )
        yield Problem(("cluster.tensor_parallel", FIELD), text)
    if recipe.fp8.rollout:
        sizes = {part.name: part.rows for _, linear in spec.linears() for part in linear.parts[:-1]}
        for name, rows in sizes.items():
            if rows % BLOCK:
                text = (
                    f"{FIELD}: vllm needs multiples of {BLOCK} rows for FP8, and {name} has {rows}; use precision: bf16"
                )
                yield Problem((FIELD, "fp8.rollout"), text)
    for tensor in dict.fromkeys(one for layer in range(spec.num_layers) for one in spec.cached(layer)):
        if recipe.fp8.kv_cache != "none" and tensor.never_fp8 is not None:
            text = (
                f"fp8.kv_cache: engine.backend: vllm stores K and V in one format, and {tensor.name} must stay BF16"
                f" ({tensor.never_fp8}); use none"
            )
            yield Problem(("fp8.kv_cache", FIELD), text)


def _lacks_of_vllm(spec: ModelSpec) -> Iterator[str]:
    """What vLLM's model of this family lacks, for which it has an assertion at its start or no parameter."""
    family, size = spec.family, spec.hidden_size // spec.num_heads
    windows = {getattr(spec.blocks_of(layer).attention, "window", None) for layer in range(spec.num_layers)}
    if len(windows) > 1:
        yield f"has sliding windows in all layers of a {family} or in none, and this model has them in some"
    if family == "qwen3" and spec.o_bias:
        yield "has no bias of o_proj in a qwen3, and this model has one (attention_bias: true)"
    if family == "qwen2" and spec.head_size != size:
        yield (
            f"takes hidden_size / num_attention_heads as the head size of a qwen2, {size} here, and this model's"
            f" head_dim is {spec.head_size}"
        )


def _openai_problems(recipe: Recipe, training: bool) -> Iterator[Problem]:
    server, rollout = recipe.engine.openai, recipe.rollout
    if training:
        text = (
            f"{FIELD}: openai answers with a server's own weights, for octetrl eval; {recipe.algorithm.name} needs"
            " answers of the weights that it trains, with their log-probs; use octetrl or vllm (octetrl check --eval"
            " checks an evaluation, octetrl generate --base-url draws data for SFT)"
        )
        yield Problem((FIELD,), text)
    if server is None:
        text = "it is missing; give engine.openai.base_url and engine.openai.model, the server's address and model"
        yield Problem(("engine.openai", FIELD), f"engine.openai: {text}")
        return
    yield from openai_problems(server)
    cluster = recipe.cluster
    scored = [name for name, one in recipe.each_environment.items() if one.reward_model is not None]
    section = "environments.NAME" if recipe.environments else "environment"
    only_text = server.answers == "text"
    rules = (
        (cluster.uses_ray, "cluster.gpus", "loads no model; leave the workers out"),
        (recipe.engine.speculation.name != "none", "engine.speculation.name", "drafts in its own way; use none"),
        (bool(scored), f"{section}.reward_model", "loads no model; score with reward, judge or the environment"),
        (only_text and rollout.top_k > 0, "rollout.top_k", "has no top_k with answers: text; set it to 0"),
        (only_text and rollout.min_p > 0, "rollout.min_p", "has no min_p with answers: text; set it to 0"),
        (
            only_text and len(rollout.stop) > MOST_STOPS,
            "rollout.stop",
            f"takes {MOST_STOPS} stop strings with answers: text; give fewer",
        ),
    )
    for is_wrong, field, text in rules:
        if is_wrong:
            yield Problem((field, FIELD), f"{field}: engine.backend: openai {text}")
