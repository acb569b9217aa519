"""The recipe's `environment.box` section: where an agent's commands run (docs/agents.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from octetrl.config.section import Section


class BoxConfig(Section):
    kind: Literal["docker", "podman", "bubblewrap"] = "docker"
    """What makes the boxes. docker and podman: containers. bubblewrap: namespaces of this machine, without images."""
    image: str | None = None
    """docker and podman: the image. bubblewrap: a folder with a root file system, which boxes leave unchanged; None:
    this machine's system folders, to read, and empty /work and /tmp. {name} stands for the task's column of that
    name."""
    cpus: float | None = Field(default=None, gt=0.0, le=4_096)
    """docker and podman: number of cores that a box may use. None: all."""
    memory_mib: int = Field(default=4096, ge=16, le=1 << 24)
    """Memory of a box in MiB. bubblewrap: of each of its processes, and of the files that are written in it."""
    network: Literal["off", "bridge", "host"] = "off"
    """off: a box reaches nothing but the policy. bridge: docker's and podman's own network. host: this machine's."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every command in a box."""
    program: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The command that makes the boxes, with its global options, such as [podman, --runtime, runc]. None: docker,
    podman or bwrap."""
    options: tuple[str, ...] = ()
    """Further options of `docker run`, `podman run` or `bwrap`, such as [--gpus, all]."""
