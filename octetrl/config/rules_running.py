"""Rules of where a recipe runs: engine, rollout backends, cluster, roles, learning beside the tail."""

from __future__ import annotations

import re
from collections.abc import Iterator

from octetrl.config.backends import TRAITS, VLLM_TEMPERATURES
from octetrl.config.cluster import LEAST_SILENCE, ROLE_FIELDS, ClusterConfig
from octetrl.config.memory import describe_smallest, longest_rollout, smallest_cache
from octetrl.config.rules import Rule, apart, problems_of, together, value
from octetrl.config.rules_training import reads_rows
from octetrl.config.schema import MOST_STOPS, EngineConfig, ModelConfig, OpenaiConfig, Recipe, SpeculationConfig
from octetrl.config.section import Problem
from octetrl.shapes.blocks import SCALE_PER_TOKEN
from octetrl.system.names import HOW, is_address

_URL = re.compile(r"https?://[^/\s@?#]+(/[^\s?#]*)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CPUS, _PER_NODE = ("cpus", "cpus_per_node", "trainer_cpus"), ("gpus_per_node", "cpus_per_node")
_NO_CPUS = " ".join(f"(cluster.{name}=null)" for name in _CPUS)
_ALL_ROLES = " ".join(f"?{name}" for name in ROLE_FIELDS)


# ---------------------------------------------------------------- engine and backends


def _needs_context(recipe: Recipe) -> bool:
    return TRAITS[recipe.engine.backend].needs_context


def _has_small_cache(recipe: Recipe) -> bool:
    tokens, page = recipe.engine.kv_cache_tokens or 0, recipe.engine.page_size
    return tokens // page * page < smallest_cache(recipe)


def _cannot_hold(recipe: Recipe) -> str:
    engine, also = recipe.engine, ", or lower model.context_length" if _needs_context(recipe) else ""
    what = f"one prompt and answer of {longest_rollout(recipe)} tokens"
    what = describe_smallest(recipe) if _needs_context(recipe) else what
    least = smallest_cache(recipe)
    return f"{engine.kv_cache_tokens} cannot hold {what} (in pages of {engine.page_size}); raise it to {least}{also}"


ENGINE = (
    Rule(
        "engine.kv_cache_tokens ?engine.page_size ?rollout.max_prompt_tokens ?rollout.max_new_tokens",
        _cannot_hold,
        lambda r: _has_small_cache(r) and not _needs_context(r),
    ),
    Rule(
        "engine.kv_cache_tokens ?engine.page_size ?engine.backend ?model.context_length",
        _cannot_hold,
        lambda r: _has_small_cache(r) and _needs_context(r),
    ),
    Rule(
        "logging.notify",
        "it has no webhook and no command; give one of them",
        value_is=lambda notify: notify is not None and notify.webhook is None and not notify.command,
    ),
    *together(
        "engine.prefix_cache=keep fp8.kv_cache=calibrated",  # old codes would be read with new scales
        "engine.max_batch=1 engine.speculation.name=ngram",  # drafts take free places of the batch
        "engine.openai engine.backend!=openai",
    ),
)
VLLM = (
    *apart(
        "engine.backend=vllm",
        "cluster.cpus cluster.cpus_per_node cluster.trainer_cpus cluster.weights_in_flight engine.speculation.name"
        f" engine.prefix_cache=keep model.lora model.dtype fp8.kv_cache={'|'.join(sorted(SCALE_PER_TOKEN))}"
        " fp8.kv_cache_tensors fp8.emulate=true fp8.format",
    ),
    *together(
        *(
            f"engine.speculation.{name} engine.backend=vllm (engine.speculation.name=none)"
            for name in SpeculationConfig.model_fields
            if name != "name"
        ),
        f"cluster.device=cpu engine.backend=vllm {_NO_CPUS}",
    ),
    Rule(
        "cluster.tensor_parallel engine.backend=vllm cluster.gpus_per_node",
        "engine.backend: vllm keeps the workers that share a model on one machine; give a multiple as gpus_per_node",
        lambda r: (r.cluster.gpus_per_node or 0) % r.cluster.tensor_parallel > 0,
    ),
    Rule(  # with shared models no cache makes it right
        "cluster.workers_per_gpu engine.backend=vllm (cluster.tensor_parallel=1) (engine.kv_cache_tokens=null)",
        "engine.backend: vllm sizes its cache by a GPU of its own; give engine.kv_cache_tokens, or set it to 1",
    ),
    Rule(
        "?algorithm.name engine.backend=vllm",
        "{} generates nothing with vllm; use engine.backend: octetrl",
        reads_rows,
    ),
    *(
        Rule(
            f"{section}.temperature>0 engine.backend=vllm",
            f"{{}} is not what engine.backend: vllm samples at: {VLLM_TEMPERATURES[0]:g} to {VLLM_TEMPERATURES[1]:g}",
            value_is=lambda degrees: not VLLM_TEMPERATURES[0] <= degrees <= VLLM_TEMPERATURES[1],
        )
        for section in ("rollout", "evaluation")
    ),
)
SERVER = (  # values are not shown: one of them may be a key by mistake
    Rule(
        "engine.openai.base_url",
        f"this is not an address; {HOW}, without a user, a key or a query",
        value_is=lambda url: not (_URL.fullmatch(url) and is_address(url)),
    ),
    Rule(
        "engine.openai.api_key_variable",
        "this is not the name of an environment variable; give one, such as OPENAI_API_KEY, and never the key",
        value_is=lambda variable: not _VARIABLE.fullmatch(variable),
    ),
)
OPENAI = (
    Rule(
        "engine.openai=null engine.backend=openai",
        "it is missing; give engine.openai.base_url and engine.openai.model, the server's address and model",
    ),
    *apart("engine.backend=openai", "engine.speculation.name environment.reward_model"),
    Rule(
        "?cluster.gpus engine.backend=openai", "a server needs no workers; leave them out", lambda r: r.cluster.uses_ray
    ),
    *together(*(f"rollout.{name} engine.openai.answers=text (engine.backend=openai)" for name in ("top_k", "min_p"))),
    Rule(
        "rollout.stop engine.openai.answers=text (engine.backend=openai)",
        f"a server of texts takes {MOST_STOPS} stop strings; give fewer",
        value_is=lambda stop: len(stop) > MOST_STOPS,
    ),
)
SERVER_TRAINS = (
    Rule(
        "engine.backend=openai",
        "openai answers with a server's own weights, for octetrl eval; {r.algorithm.name} needs answers of the weights"
        " that it trains, with their log-probs; use octetrl or vllm (octetrl check --eval checks an evaluation, octetrl"
        " generate --base-url draws data for SFT)",
    ),
)


def openai_problems(config: OpenaiConfig) -> Iterator[Problem]:
    """What is wrong with the settings of a server."""
    return problems_of(SERVER, Recipe(model=ModelConfig(), engine=EngineConfig(openai=config)))


# ---------------------------------------------------------------- cluster


def _roles(recipe: Recipe) -> list[str]:
    """The fields of roles that are given."""
    return [name for name in ROLE_FIELDS if value(recipe, name) is not None]


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port[:6]) < 1 << 16


def _cannot_group(recipe: Recipe) -> bool:
    cluster = recipe.cluster
    return cluster.num_workers % cluster.tensor_parallel > 0 and cluster.roles is None and cluster.workers_per_gpu == 1


CLUSTER = (
    Rule(
        "cluster.max_staleness",
        "needs workers that only train and workers that only generate; give cluster.trainer_gpus and"
        " cluster.engine_gpus (on a CPU trainer_cpus and engine_cpus), or remove it",
        lambda r: not _roles(r),
    ),
    *together(
        *(f"cluster.{name} cluster.max_staleness=0" for name in ("weight_buffer", "weights_in_flight")),
        *(
            f"cluster.{name} cluster.{other}"
            for name in ("trainer_gpus", "trainer_cpus", "cpus")
            for other in ("gpus", "cpus", "nodes", "gpus_per_node", "cpus_per_node")
            if name != other
        ),
        *(f"cluster.{name} cluster.device=cuda" for name in _CPUS),
        *(f"cluster.workers_per_gpu cluster.{name}" for name in _CPUS),
        *(f"cluster.gpus cluster.nodes cluster.{name}" for name in _PER_NODE),
        "cluster.gpus_per_node cluster.cpus_per_node",
    ),
    Rule(
        _ALL_ROLES,
        "all workers are on GPUs or all on the CPU, and some have each role; give trainer_gpus and engine_gpus, or"
        " trainer_cpus and engine_cpus, or only gpus or cpus",
        lambda r: bool(_roles(r)) and (r.cluster.roles is None or len(_roles(r)) > 2),
    ),
    Rule(
        "cluster.trainer_gpus ?cluster.engine_gpus cluster.workers_per_gpu",
        "{r.cluster.num_workers} workers that train or generate do not fill GPUs with {r.cluster.workers_per_gpu} each;"
        " give a multiple of {r.cluster.workers_per_gpu} workers, or remove cluster.workers_per_gpu",
        lambda r: r.cluster.num_workers % r.cluster.workers_per_gpu > 0,
    ),
    Rule(
        f"cluster.device=cpu {_NO_CPUS} ?cluster.gpus",
        "cpu has no GPUs; give the number of workers as cluster.cpus, or remove device",
        lambda r: r.cluster.uses_ray or r.cluster.gpus is not None,
    ),
    Rule(
        "?cluster.nodes ?cluster.gpus_per_node ?cluster.cpus_per_node",
        "needs cluster.gpus_per_node (on a CPU cpus_per_node), and the reverse; give both, or only cluster.gpus",
        lambda r: (r.cluster.nodes is None) != (r.cluster.per_node is None),
    ),
    Rule(
        "cluster.nodes>1 (cluster.gpus=null) ?cluster.address",
        "several machines need a running Ray cluster; give its cluster.address, or use gpus",
        lambda r: r.cluster.address in (None, "local"),
    ),
    Rule(
        f"cluster.tensor_parallel>1 {_ALL_ROLES}",
        "workers that only train or only generate have whole models so far; remove it",
        lambda r: r.cluster.roles is not None,
    ),
    Rule(
        "cluster.workers_per_gpu cluster.tensor_parallel>1",
        "workers that share a model need a GPU each; remove it, or use cluster.cpus",
        lambda r: r.cluster.roles is None,
    ),
    Rule(
        "cluster.tensor_parallel ?cluster.gpus ?cluster.cpus",
        "{r.cluster.num_workers} workers do not make groups of {}; give a multiple as cluster.gpus or cluster.cpus",
        _cannot_group,
    ),
    Rule(
        "cluster.address",
        "'{}' is not host:port, auto or local; the usual port is 6379",
        value_is=lambda address: address not in ("auto", "local") and not _is_host_and_port(address),
    ),
    Rule(
        f"cluster.deadlines.silent_seconds<{LEAST_SILENCE}",
        f"workers report every second, so {{}} would end a sound run; give {LEAST_SILENCE:g} or more",
        lambda r: r.cluster.uses_ray,
    ),
)


def cluster_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """What is wrong with a cluster alone."""
    return problems_of(CLUSTER, Recipe(model=ModelConfig(), cluster=cluster))


def _compares_nothing(recipe: Recipe) -> bool:
    """Whether the objective compares no token with the policy that sampled it."""
    return recipe.algorithm.name == "rft" or value(recipe, "algorithm.distillation") in ("reverse_kl", "forward_kl")


def _leaves_stale(recipe: Recipe) -> bool:
    """Whether tokens are compared with the trainer's own log-probs, and nothing corrects those of older weights."""
    base, several = value(recipe, "algorithm.ratio_base"), recipe.trainer.epochs * recipe.trainer.minibatches > 1
    corrects = {"tis", "sequence_tis"} & set(value(recipe, "algorithm.corrections") or ())
    return (base == "proximal" or (base == "auto" and several)) and not corrects


ROLES = (
    Rule(
        f"?algorithm.name {_ALL_ROLES}",
        "{} samples no rollouts, so no worker would only generate; use cluster.gpus or cluster.cpus",
        lambda r: r.cluster.roles is not None and reads_rows(r),
    ),
    Rule(
        "cluster.max_staleness ?algorithm.name",
        "{r.algorithm.name} compares no token with the policy that sampled it, so stale answers would not be corrected;"
        " use 0, or another objective",
        lambda r: r.cluster.roles is not None and _compares_nothing(r),
    ),
    Rule(
        "cluster.max_staleness ?algorithm.corrections ?algorithm.ratio_base",
        "several updates of a step compare a token with the trainer's own log-probs, and algorithm.corrections has"
        " neither tis nor sequence_tis for stale tokens; add one, or use algorithm.ratio_base: generator",
        lambda r: r.cluster.roles is not None and not _compares_nothing(r) and _leaves_stale(r),
    ),
)
SHARED_MODEL = apart(  # a worker has a part of the model
    "cluster.tensor_parallel>1",
    "engine.speculation.name algorithm.name=ppo|reward_model|distill algorithm.reference_every"
    " environment.reward_model",
)
CONTEXT_PARALLEL = (  # several workers have one micro-batch
    *apart(
        "cluster.context_parallel",
        "cluster.tensor_parallel>1 rollout.learn_beside_tail algorithm.name=ppo|reward_model|distill",
    ),
    Rule(
        "cluster.context_parallel ?cluster.gpus ?cluster.cpus",
        "{r.cluster.num_trainers} workers that train do not make groups of {}; give a multiple of it, or use auto",
        value_is=lambda size: isinstance(size, int),
        when=lambda r: r.cluster.num_trainers % int(r.cluster.context_parallel) > 0,
    ),
)
BESIDE_TAIL = (  # docs/scale.md has the reasons
    *apart(
        "rollout.learn_beside_tail",
        "cluster.trainer_gpus cluster.trainer_cpus cluster.tensor_parallel cluster.gradients trainer.gradients"
        " trainer.weight_codes trainer.minibatches trainer.epochs trainer.router.balance_loss trainer.router.z_loss"
        " engine.backend environment.reward_model algorithm.name=reinforce_pp|reinforce_pp_baseline|ppo"
        " algorithm.distillation=sampled algorithm.masked_tokens",
    ),
    Rule(
        "rollout.learn_beside_tail ?cluster.gpus ?cluster.cpus",
        "one worker samples and trains in turns, which takes the time of both; give 2 or more, or set it to false",
        lambda r: r.cluster.num_workers == 1,
    ),
    Rule(
        "rollout.learn_beside_tail ?algorithm.name",
        "{r.algorithm.name} samples no rollouts; set it to false",
        reads_rows,
    ),
    *together(
        "algorithm.kl_in!=loss rollout.learn_beside_tail (algorithm.kl_coefficient>0)"
        " (algorithm.name!=reinforce_pp|reinforce_pp_baseline|ppo)"
    ),
    Rule(
        "rollout.learn_beside_tail ?algorithm.corrections",
        "algorithm.corrections: self_normalize divides by a mean over the whole batch; remove it",
        lambda r: "self_normalize" in (value(r, "algorithm.corrections") or ()),
    ),
)
RUNNING = (*ENGINE, *VLLM, *SERVER, *OPENAI, *CLUSTER, *ROLES, *SHARED_MODEL, *CONTEXT_PARALLEL)
