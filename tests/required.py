"""What a group of tests needs of the machine, and whether its absence is a skip or a failure.

A group that can't run says so in one line at the end (`not run: bubblewrap: bwrap is not installed (75 tests)`). Where
OCTETRL_REQUIRE names the need, its absence is a failure: `make test-gpu` asks for `gpu`, `.ci/run` for what it has.

    OCTETRL_REQUIRE=landlock,bubblewrap make test
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import pytest

VARIABLE = "OCTETRL_REQUIRE"
NEEDS = {
    "gpu": "a Hopper GPU",
    "landlock": "sandboxes of that level",
    "bubblewrap": "sandboxes of that level",
    "podman": "podman and busybox-static: boxes as containers",
    "docker": "a Docker daemon and busybox-static: setup/docker.sh starts one",
    "another-user": "root, and an interpreter and a tree that another user can read: sandboxes without root's rights",
    "serve": "the packages of `octetrl serve` and the official client",
    "verifiers": "verifiers 0.4 or later: setup/outside_packages.sh runs its tests",
    "templates": "TRL's chat templates and litellm's tokenizers: setup/outside_packages.sh runs their tests",
    "vllm-parsers": "vLLM's parsers of tool calls and litellm: setup/outside_packages.sh runs their tests",
    "openenv": "openenv and websockets: setup/outside_packages.sh runs their tests",
    "lm-eval": "lm-eval, the judge of the server: setup/outside_packages.sh runs its tests",
    "agents": "Anthropic's client and the OpenAI Agents SDK: setup/outside_packages.sh runs their tests",
    "mini-swe-agent": "mini-swe-agent: setup/outside_packages.sh runs its test",
    "harbor": "Harbor, on Python 3.12 or later: setup/outside_packages.sh runs its test",
    "s3": "s3fs and moto, a server of S3: setup/outside_packages.sh runs their tests",
    "trackers": "wandb, mlflow, trackio, swanlab: setup/outside_packages.sh runs their tests",
    "ray": "Ray: runs on several workers",
    "real-model": "a pretrained model's folder, which setup/smollm2.sh makes",
    "machines": "root and network namespaces: runs on several machines",
    "two-gpus": "two GPUs of one machine: workers on GPUs of their own",
}
_MARK = "not run: "


def is_required(need: str) -> bool:
    return need in _required()


def check_names() -> None:
    """Raises UsageError for an unknown need: a misspelt one would require nothing."""
    if unknown := _required() - NEEDS.keys():
        known = ", ".join(NEEDS)
        raise pytest.UsageError(f"{VARIABLE}: '{', '.join(sorted(unknown))}' is not one of {known}; give some of these")


def missing(need: str, why: str, *, whole_module: bool = False) -> NoReturn:
    """End a test, or the import of its module, that can't run without `need`."""
    assert need in NEEDS
    if is_required(need):
        pytest.fail(f"{VARIABLE} asks for {need}, which this machine does not give: {why}", pytrace=False)
    pytest.skip(skip_reason(need, why), allow_module_level=whole_module)


def skip_reason(need: str, why: str) -> str:
    return f"{_MARK}{need}: {why}"


def not_run(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line a need and reason, of the reports of skipped tests."""
    counts: Counter[str] = Counter()
    for report in reports:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason.startswith(_MARK):
            counts[reason] += 1
    return [f"{reason} ({count} {'test' if count == 1 else 'tests'})" for reason, count in sorted(counts.items())]


def lines_of(output: str) -> list[str]:
    """The lines of `not_run` in what a run of pytest printed."""
    return [line for line in output.splitlines() if line.startswith(_MARK)]


def _required() -> set[str]:
    return {word.strip() for word in os.environ.get(VARIABLE, "").split(",")} - {""}
