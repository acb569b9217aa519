"""Boxes of each kind that works here: bubblewrap, and podman and docker with an image of busybox."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from octetrl.boxes.boxes import try_box
from octetrl.config.box import BoxConfig
from octetrl.system.errors import UserError
from tests.required import missing

BUBBLEWRAP = BoxConfig(kind="bubblewrap", memory_mib=512)
IMAGE = "octetrl-test-busybox:1"
BUSYBOX = "/bin/busybox"
# What a container with root's name and few of its rights lets podman do: no control groups, no limits above its own.
NARROW = ("--cgroups=no-conmon", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000")
RUNC = ("podman", "--runtime", "runc")
ENGINES: dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = {  # programs and options to try
    "podman": ((("podman",), ()), (RUNC, NARROW), ((*RUNC, "--storage-driver", "vfs"), NARROW)),
    "docker": ((("docker",), ()),),
}


def config_of(kind: str, folder: Path) -> BoxConfig:
    """Settings with which a box of this kind starts here; skips the test if there are none."""
    if kind in ENGINES:
        return _engine(kind)
    config = BUBBLEWRAP
    if kind == "folder":
        if not os.path.exists(BUSYBOX):
            missing("podman", "busybox-static is not installed, for a folder with a root file system")
        config = config.model_copy(update={"image": str(root_folder(folder / "root"))})
    if (reason := _no_bubblewrap()) is not None:
        missing("bubblewrap", reason)
    return config


def root_folder(folder: Path) -> Path:
    """A root file system of 2 MB."""
    for name in ("bin", "tmp", "proc", "dev", "etc", "root"):
        (folder / name).mkdir(parents=True)
    shutil.copy(BUSYBOX, folder / "bin/busybox")
    names = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True).stdout.split()
    for name in set(names) - {"busybox"}:
        (folder / "bin" / name).symlink_to("busybox")
    return folder


@cache
def _engine(kind: str) -> BoxConfig:
    if shutil.which(kind) is None or not os.path.exists(BUSYBOX):
        missing(kind, f"{kind} or busybox-static is not installed")
    reason: str | None = None
    for program, options in ENGINES[kind]:
        _import(program)
        config = BoxConfig(
            kind=cast("Any", kind),
            image=IMAGE,
            program=program,
            options=options,
            memory_mib=512,
        )
        if (reason := _refused(config)) is None:
            return config
    missing(kind, reason or "")


def _import(program: tuple[str, ...]) -> None:
    if subprocess.run([*program, "image", "inspect", IMAGE], capture_output=True, check=False).returncode == 0:
        return
    with TemporaryDirectory() as folder:
        root, archive = root_folder(Path(folder) / "root"), Path(folder) / "root.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(root, arcname=".")
        subprocess.run([*program, "import", str(archive), IMAGE], capture_output=True, check=False)


@cache
def _no_bubblewrap() -> str | None:
    return _refused(BUBBLEWRAP)


def _refused(config: BoxConfig) -> str | None:
    try:
        try_box(config, None, calls_policy=True)
    except UserError as error:
        return str(error)
    return None
