"""The recipe's `cluster` section: whether a run is one process, or many workers on Ray (docs/scale.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from octetrl.config.section import Problem, Section

LEAST_SILENCE = 2.0  # seconds; of deadlines.silent_seconds
ROLE_FIELDS = ("cluster.trainer_gpus", "cluster.engine_gpus", "cluster.trainer_cpus", "cluster.engine_cpus")


class DeadlineConfig(Section):
    """Time limits of workers. If a worker exceeds one, the step ends with an error that names it. Only for Ray."""

    silent_seconds: float = Field(default=60.0, gt=0.0)
    """Longest time without a report from a worker, in seconds. A worker reports every second, also while it computes.
    One that is silent for longer counts as stalled."""
    first_seconds: float = Field(default=3600.0, gt=0.0)
    """Time limit of a phase's first run, in seconds: loading, or the first training with its compilation."""
    times_usual: float = Field(default=10.0, gt=1.0)
    """Time limit of later runs of a phase, as a multiple of its longest run so far. `least_seconds` is a lower
    bound."""
    least_seconds: float = Field(default=300.0, gt=0.0)
    """Lower bound of the limit that `times_usual` sets, in seconds."""


class ClusterConfig(Section):
    """Devices and workers of a run. By default a run is one process on one GPU, or on the CPU, and needs no Ray."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of a run with one worker. auto: a GPU if there is one, otherwise the CPU."""
    cpu_threads: int | None = Field(default=None, ge=1, le=4_096)
    """Number of torch's threads on a CPU, in each worker. None: torch's default; several workers share the
    machine's cores."""
    gpus: int | None = Field(default=None, ge=1, le=65_536)
    """Number of GPUs, with one worker on each. More than one needs the `ray` extra. None: one."""
    cpus: int | None = Field(default=None, ge=1, le=4_096)
    """Number of workers on the CPU, instead of `gpus`. Use it to try a run with many workers on a laptop."""
    trainer_gpus: int | None = Field(default=None, ge=1, le=65_536)
    """Number of GPUs that only train, instead of `gpus`. Give `engine_gpus` too. None: every GPU trains and
    generates."""
    engine_gpus: int | None = Field(default=None, ge=1, le=65_536)
    """Number of GPUs that only generate. They receive the weights after every update."""
    trainer_cpus: int | None = Field(default=None, ge=1, le=4_096)
    """Number of workers on the CPU that only train, instead of `cpus`. Give `engine_cpus` too."""
    engine_cpus: int | None = Field(default=None, ge=1, le=4_096)
    """Number of workers on the CPU that only generate."""
    max_staleness: int = Field(default=0, ge=0, le=64)
    """Number of policy versions that generating may run ahead of training, if workers only train or only generate. 0:
    each step generates with the weights of the step before it, and one side waits for the other. 1: both work at once,
    and a batch is one version old when it is trained on. Above 1 evens out steps of unequal length."""
    address: str | None = None
    """Ray cluster to use. `host:port`: a running cluster. `auto`: the one that runs on this machine. `local`: start Ray
    here, also for one worker. None: start Ray here if there are several workers. Ray that the run starts ends with
    it."""
    nodes: int | None = Field(default=None, ge=1, le=65_536)
    """Number of machines of the cluster at `address`, with workers on `gpus_per_node` GPUs of each. None: Ray chooses
    the machines."""
    gpus_per_node: int | None = Field(default=None, ge=1, le=1_024)
    """Number of GPUs on each of the `nodes`. The run uses nodes x gpus_per_node GPUs; leave `gpus` out."""
    workers_per_gpu: int = Field(default=1, ge=1, le=8)
    """Number of workers that share one GPU. Use it to test many workers on one GPU; it is never faster."""
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    """Number of workers that share one model by rows, for a model that is too large for one. The number of workers must
    be a multiple of it. Only for workers on the CPU so far (`cpus`). 1: every worker has the whole model."""
    gradients: Literal["local", "sharded"] = "local"
    """Where the gradient is summed. local: each worker keeps float32 sums of its micro-batches, 4 bytes per weight,
    and the workers add them once per update. sharded: each worker keeps only the sums of its own rows, and the workers
    add every micro-batch's gradient."""
    max_restarts: int = Field(default=0, ge=0, le=1_000_000)
    """Number of times that a run may restart after losing a worker. It builds all workers again and continues from its
    last checkpoint."""
    deadlines: DeadlineConfig = DeadlineConfig()
    """Time limits of workers."""

    @property
    def num_workers(self) -> int:
        if self.roles is not None:
            return sum(self.roles)
        if self.cpus is not None:
            return self.cpus
        gpus = self.gpus or 1
        if self.nodes is not None and self.gpus_per_node is not None:
            gpus = self.nodes * self.gpus_per_node
        return gpus * self.workers_per_gpu

    @property
    def roles(self) -> tuple[int, int] | None:
        """Number of workers that only train, and of those that only generate. None: every worker does both."""
        if self.trainer_cpus is not None and self.engine_cpus is not None:
            return self.trainer_cpus, self.engine_cpus
        if self.trainer_gpus is not None and self.engine_gpus is not None:
            return self.trainer_gpus * self.workers_per_gpu, self.engine_gpus * self.workers_per_gpu
        return None

    @property
    def num_trainers(self) -> int:
        """Number of workers that train."""
        return self.num_workers if self.roles is None else self.roles[0]

    @property
    def on_cpus(self) -> bool:
        """Whether the recipe gives a number of workers on the CPU."""
        return self.cpus is not None or self.trainer_cpus is not None

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the workers use. 0: the workers are on the CPU."""
        return 0 if self.on_cpus else self.num_workers // self.workers_per_gpu

    @property
    def num_groups(self) -> int:
        """Number of groups of `tensor_parallel` workers. Each group has the whole model and trains on its part."""
        return self.num_trainers // self.tensor_parallel

    @property
    def starts_ray(self) -> bool:
        """Whether the run starts Ray on this machine."""
        return self.uses_ray and self.address in (None, "local")

    @property
    def uses_ray(self) -> bool:
        return self.num_workers > 1 or self.address is not None


def lacking_gpus(cluster: ClusterConfig, has: int, where: str, remedy: str) -> str:
    """Say that `where` has fewer GPUs than the workers need. `remedy`: what to do if fewer workers are not wanted."""
    wanted = cluster.num_gpus
    field = "gpus" if cluster.gpus is not None else "workers_per_gpu" if cluster.nodes is None else "nodes"
    fewer = "lower it" if has else f"use cluster.cpus={cluster.num_workers} instead, remove it"
    return f"cluster.{field}: {wanted} GPUs were asked for, {where} has {has}; {fewer}, or {remedy}"


def local_lack(cluster: ClusterConfig, visible: int) -> str | None:
    """Say that this machine has too few GPUs for a Ray that the run starts here. None: it has enough."""
    if visible >= cluster.num_gpus:
        return None
    return lacking_gpus(cluster, visible, "this machine", "give the cluster.address of a Ray cluster that has them")


def whole_weights_problem(cluster: ClusterConfig, weight_codes: str, *, trains_fp8: bool) -> str | None:
    """Say that the setting needs whole BF16 weights, which none of several workers has. None: it does not."""
    if cluster.num_groups == 1 or weight_codes != "remade" or not trains_fp8:
        return None
    return (
        "trainer.weight_codes: remade quantises whole weights, and each of several workers has only some rows of them;"
        " use weight_codes: kept, or one worker"
    )


def cluster_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Yield the combinations of fields that are not allowed."""
    yield from _role_problems(cluster)
    if cluster.cpus is not None:
        for name in ("gpus", "nodes", "gpus_per_node"):
            if getattr(cluster, name) is not None:
                text = f"cluster.cpus: cannot be combined with cluster.{name}; keep one of the two"
                yield Problem(("cluster.cpus", f"cluster.{name}"), text)
        if cluster.device == "cuda":
            text = (
                "cluster.cpus: starts workers on the CPU, but cluster.device is cuda; use cluster.gpus, or device: cpu"
            )
            yield Problem(("cluster.cpus", "cluster.device"), text)
        if cluster.workers_per_gpu > 1:
            text = "cluster.workers_per_gpu: has no effect with workers on the CPU; remove it, or use cluster.gpus"
            yield Problem(("cluster.workers_per_gpu", "cluster.cpus"), text)
    elif cluster.device == "cpu" and (cluster.uses_ray or cluster.gpus is not None):
        text = "cluster.device: cpu has no GPUs; give the number of workers as cluster.cpus, or remove device"
        yield Problem(("cluster.device", "cluster.gpus"), text)
    if (cluster.nodes is None) != (cluster.gpus_per_node is None):
        text = "cluster.nodes: needs cluster.gpus_per_node, and the reverse; give both, or only cluster.gpus"
        yield Problem(("cluster.nodes", "cluster.gpus_per_node"), text)
    elif cluster.nodes is not None and cluster.gpus is not None:
        text = "cluster.gpus: is already given by nodes x gpus_per_node; leave it out"
        yield Problem(("cluster.gpus", "cluster.nodes"), text)
    elif cluster.nodes is not None and cluster.nodes > 1 and cluster.address in (None, "local"):
        text = "cluster.nodes: several machines need a running Ray cluster; give its cluster.address, or use gpus"
        yield Problem(("cluster.nodes", "cluster.address"), text)
    size = cluster.tensor_parallel
    if size > 1 and cluster.roles is not None:
        text = "cluster.tensor_parallel: workers that only train or only generate have whole models so far; remove it"
        yield Problem(("cluster.tensor_parallel", *ROLE_FIELDS), text)
    elif size > 1 and cluster.cpus is None:
        text = (
            f"cluster.tensor_parallel: {size} workers share a model only on the CPU so far; remove it, or use"
            f" cluster.cpus={size}"
        )
        yield Problem(("cluster.tensor_parallel", "cluster.cpus"), text)
    elif cluster.num_workers % size:
        text = (
            f"cluster.tensor_parallel: {cluster.num_workers} workers do not make groups of {size}; give a multiple of"
            f" {size} as cluster.cpus"
        )
        yield Problem(("cluster.tensor_parallel", "cluster.cpus"), text)
    if cluster.address is not None and not cluster.address.strip():
        yield Problem(("cluster.address",), "cluster.address: is empty; give host:port, auto or local, or leave it out")
    elif cluster.address not in (None, "auto", "local") and not _is_host_and_port(cluster.address):
        text = f"cluster.address: '{cluster.address}' is not host:port, auto or local; the usual port is 6379"
        yield Problem(("cluster.address",), text)
    if cluster.uses_ray and cluster.deadlines.silent_seconds < LEAST_SILENCE:
        text = (
            f"cluster.deadlines.silent_seconds: workers report every second, so {cluster.deadlines.silent_seconds:g}"
            f" would end a sound run; give {LEAST_SILENCE:g} or more"
        )
        yield Problem(("cluster.deadlines.silent_seconds",), text)


def _is_host_and_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and int(port[:6]) < 1 << 16


def _role_problems(cluster: ClusterConfig) -> Iterator[Problem]:
    """Workers that only train, and workers that only generate."""
    given = [name for name in ROLE_FIELDS if getattr(cluster, name.removeprefix("cluster.")) is not None]
    if not given:
        if cluster.max_staleness:
            text = (
                "cluster.max_staleness: needs workers that only train and workers that only generate; give"
                " cluster.trainer_gpus and cluster.engine_gpus, or remove it"
            )
            yield Problem(("cluster.max_staleness",), text)
        return
    kinds = {name.removesuffix("s")[-3:] for name in given}
    if len(kinds) > 1:
        text = f"{given[0]}: all workers are on GPUs or all on the CPU; give trainer_gpus and engine_gpus, or the cpus"
        yield Problem(tuple(given), text)
    elif len(given) == 1:
        kind = kinds.pop()
        text = f"{given[0]}: needs both cluster.trainer_{kind}s and cluster.engine_{kind}s; give both, or use {kind}s"
        yield Problem(tuple(given), text)
    for name in ("gpus", "cpus", "nodes", "gpus_per_node"):
        if getattr(cluster, name) is not None:
            text = f"{given[0]}: cannot be combined with cluster.{name}; keep one of the two"
            yield Problem((given[0], f"cluster.{name}"), text)
    if cluster.trainer_cpus is not None and cluster.device == "cuda":
        text = f"{given[0]}: starts workers on the CPU, but cluster.device is cuda; remove device"
        yield Problem((given[0], "cluster.device"), text)
    if cluster.trainer_cpus is not None and cluster.workers_per_gpu > 1:
        text = f"cluster.workers_per_gpu: has no effect with {given[0]}; remove it"
        yield Problem((given[0], "cluster.workers_per_gpu"), text)
