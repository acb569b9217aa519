"""What `octetrl check` says about the workers of a run with several of them."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.cluster import ClusterConfig, local_lack


def worker_lines(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    """The number of workers and where they run. Nothing for one worker without Ray."""
    if not cluster.uses_ray:
        return
    count, gpus = cluster.num_workers, cluster.num_gpus
    place = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    joined = "" if cluster.starts_ray else f", of the Ray cluster at {cluster.address}, which is not checked here"
    yield "cluster", f"{count} worker{'s' if count > 1 else ''} on {place}{joined}"
    groups, size = cluster.num_groups, cluster.tensor_parallel
    if size > 1:
        yield "", f"{groups} group{'s' if groups > 1 else ''} of {size} workers, which share one model by rows"
        yield "", "the memory below is that of the worker with the largest part, in a run with one group; each group"
        yield "", "has the activations of its micro-batches, and owns its share of the optimizer's states"
    elif count > 1:
        yield "", "the memory below is that of a run with one worker; each worker holds the weights, activations"
        yield "", "and a KV cache, and its share of the optimizer's states"


def worker_problems(cluster: ClusterConfig) -> Iterator[str]:
    """What `octetrl train` would refuse on this machine."""
    if cluster.starts_ray and cluster.num_gpus:
        import torch

        lack = local_lack(cluster, torch.cuda.device_count())
        if lack is not None:
            yield lack
