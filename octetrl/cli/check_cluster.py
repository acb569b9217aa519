"""What `octetrl check` says about the workers of a run with several of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from octetrl.cli.check_turns import turns_line
from octetrl.config.cluster import ClusterConfig, local_lack, whole_weights_problem
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.schema import Recipe
from octetrl.config.validate_roles import describe_roles
from octetrl.fp8.policy import PrecisionPolicy

LEAST_MICRO_BATCHES = 4  # of a worker
CONNECT_SECONDS = 2.0


def worker_lines(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The number of workers and where they run. Nothing for one worker without Ray."""
    cluster = recipe.cluster
    if not cluster.uses_ray:
        return
    count, gpus = cluster.num_workers, cluster.num_gpus
    place = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    joined = "" if cluster.starts_ray else f", of the Ray cluster at {cluster.address}, whose machines are not checked"
    yield "cluster", f"{count} worker{'s' if count > 1 else ''} on {place}{joined}"
    if not cluster.starts_ray and not _answers(str(cluster.address)):
        yield "", f"warning: nothing answers at {cluster.address} from this machine; start Ray there before the run"
    roles = describe_roles(recipe)
    if roles is not None:
        yield "", roles
        if cluster.max_staleness and recipe.mismatch.fail_above is not None:
            limit = (
                f"mismatch.fail_above={recipe.mismatch.fail_above:g} judges stale tokens too, so the policy's change"
            )
            yield "", f"warning: {limit} may end the run; give mismatch.fail_above=null, or a limit that allows for it"
        count = cluster.num_trainers
    groups, size = cluster.num_groups, cluster.tensor_parallel
    if size > 1:
        yield "", f"{groups} group{'s' if groups > 1 else ''} of {size} workers, which share one model by rows"
        yield "", "the memory below is that of the worker with the largest part of the model"
    elif count > 1:
        if roles is None:
            each = "the memory below is that of each worker: codes, activations, a KV cache, and its share of the"
            yield "", f"{each} optimizer's states"
        few = micro_batches_of_longest(recipe)
        if few < LEAST_MICRO_BATCHES * count:
            what = f"at their longest, a step's sequences fill {few} micro-batches of an update; {count} workers need"
            lower = "Lower trainer.minibatches or trainer.tokens_per_micro_batch, give a step more sequences, or"
            yield "", f"warning: {what} {LEAST_MICRO_BATCHES} each, or some wait for others. {lower} use fewer workers"


def _answers(address: str) -> bool:
    """Whether a port is open. `auto` is found by Ray, when the run starts."""
    if address == "auto":
        return True
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def micro_batches_of_longest(recipe: Recipe) -> int:
    """Micro-batches of an optimizer step if every sequence has its largest length."""
    algorithm, rollout, trainer = recipe.algorithm, recipe.rollout, recipe.trainer
    longest = recipe.model.context_length
    if isinstance(algorithm, DatasetSettings):
        sequences = algorithm.batch_size * (2 if algorithm.learns_from == "preferences" else 1)
    else:
        sequences = rollout.prompts_per_step * rollout.group_size
        if next(turns_line(recipe), None) is None:  # one turn
            longest = min(longest, rollout.max_prompt_tokens + rollout.max_new_tokens)
    each = max(1, trainer.tokens_per_micro_batch // longest)  # sequences of a micro-batch
    return -(-sequences // trainer.minibatches // each)


def weight_problems(recipe: Recipe, policy: PrecisionPolicy) -> Iterator[str]:
    """What several workers cannot do, since none has whole weights."""
    trains_fp8 = policy.uses_fp8("train")
    problem = whole_weights_problem(recipe.cluster, recipe.trainer.weight_codes, trains_fp8=trains_fp8)
    if problem is not None:
        yield problem


def worker_problems(cluster: ClusterConfig) -> Iterator[str]:
    """What `octetrl train` would refuse on this machine."""
    if cluster.starts_ray and cluster.num_gpus:
        import torch

        lack = local_lack(cluster, torch.cuda.device_count())
        if lack is not None:
            yield lack
