"""The examples for clusters: the Slurm script starts Ray on all machines, and both run a recipe with settings that a
recipe has."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from octetrl.config.load import load_recipe
from tests.house.tree import REPO

EXAMPLES = REPO / "examples"


def manifest() -> Any:
    return yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())


def test_the_manifest_is_a_ray_job() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay's map of strings"
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def workers(job: Any) -> Any:
    return job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]


def test_the_job_asks_for_the_gpus_that_the_pods_have() -> None:
    job = manifest()
    command = shlex.split(job["spec"]["entrypoint"])
    assert command[:2] == ["octetrl", "train"] and command[-2:] == ["--resume", "auto"]
    cluster = load_recipe("grpo_chain-sum_qwen3-0.6b_1gpu_fp8-full", command[3:-2]).cluster
    (container,) = workers(job)["template"]["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert (cluster.address, cluster.nodes, str(cluster.gpus_per_node)) == ("auto", workers(job)["replicas"], gpus)


def test_the_slurm_script_is_bash_and_its_settings_are_a_recipes() -> None:
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    (line,) = [line.removesuffix("\\") for line in script.read_text().splitlines() if line.startswith("octetrl train")]
    line = line.replace('"$address"', "host:6379").replace('"$SLURM_JOB_NUM_NODES"', "2").replace('"$gpus"', "8")
    cluster = load_recipe("grpo_chain-sum_qwen3-0.6b_1gpu_fp8-full", shlex.split(line)[3:]).cluster
    assert (cluster.address, cluster.nodes, cluster.gpus_per_node, cluster.num_workers) == ("host:6379", 2, 8, 16)


STAND_INS = {  # each notes how it was called
    "scontrol": "echo first; sleep 0.1; echo second",  # a reader of the first line alone would close the pipe
    "hostname": "echo 10.0.0.1 fe80::1",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "ray": """case $1 in
        get-auth-token) echo secret ;;
        status) [ -s started ] || exit 1; sed 's/^/ node_/' started ;;
        start) if [ "$2" = "$FAILS" ]; then exit 1; fi
            echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >> started; exec sleep 20 >/dev/null 2>&1 ;;
        esac""",
    "octetrl": "cp started at_the_start",
}


def slurm(folder: Path, fails: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script with stand-ins. `fails`: the first argument of the `ray start` that does."""
    for name, body in STAND_INS.items():
        program = folder / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >> {folder}/calls\n{body}\n')
        program.chmod(0o755)
    nodes = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "FAILS": fails}
    environment = {**os.environ, **nodes, "PATH": f"{folder}:{os.environ['PATH']}"}
    script = ["bash", str(EXAMPLES / "slurm.sh"), "r.yaml", "trainer.optimizer.lr=2e-6"]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("fails", ["--head", "--address=10.0.0.1:6379"])
def test_a_machine_whose_ray_does_not_start_ends_the_job(fails: str, tmp_path: Path) -> None:
    assert slurm(tmp_path, fails).returncode == 1
    assert not (tmp_path / "at_the_start").exists()


def test_the_slurm_script_starts_ray_on_all_machines_and_then_the_run(tmp_path: Path) -> None:
    done = slurm(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "at_the_start").read_text() == "token secret\n" * 2, "both machines had joined"
    calls = (tmp_path / "calls").read_text().splitlines()
    starts = [call for call in calls if call.startswith("ray start")]
    assert starts == [
        "ray start --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=8 --block",
        "ray start --address=10.0.0.1:6379 --num-gpus=8 --block",
    ]
    (head, others) = [call for call in calls if call.startswith("srun") and "ray start" in call]
    assert "--nodelist=first ray" in head
    assert "--nodes=1 --ntasks=1 --overlap --kill-on-bad-exit --exclude=first ray" in others
    run = "octetrl train r.yaml trainer.optimizer.lr=2e-6 cluster.address=10.0.0.1:6379 cluster.nodes=2"
    assert calls[-1] == f"{run} cluster.gpus_per_node=8 --resume auto"
