"""Measures vLLM's generation speed beside ours: the same requests, and a fresh process for every turn.

Each turn starts a process that measures one precision and workload and ends (backends/vllm/measure.py; ours in
bench/rollout.py), so no turn finds memory, graphs or kernels of another. Weights are random; vLLM gets a folder with a
config.json and no weights. Its prefix cache is on, and empty when the time begins, as ours is. The whole workload runs
once before it is timed: vLLM compiles FP8 kernels while it runs, which on a new machine took as long as the workload.

| our precision | vLLM's, in the results | linears | KV cache |
|---|---|---|---|
| `bf16` | `bf16` | BF16 | BF16 |
| `fp8_rollout` | `fp8` | E4M3, 128 x 128 blocks | BF16 |
| `fp8`, `fp8_full` | `fp8_kv` (`fp8`: BF16 cache) | E4M3, 128 x 128 blocks | E4M3; attention in FP8 too |
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from octetrl.backends.vllm.measure import Asked, AskedRequest, Measured
from octetrl.backends.vllm.names import model_config
from octetrl.backends.vllm.start import write_model
from octetrl.bench.rollout import Bench, Turn, take_turn
from octetrl.bench.turns import Row, take_in_turn
from octetrl.bench.workload import Workload
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.records import GenerationRequest
from octetrl.system.errors import RunFailed


@dataclass(frozen=True, slots=True)
class VllmTurn:
    """One measurement of vLLM. `precision` is our name of it."""

    precision: str
    workload: Workload
    max_batch: int
    measured: Measured

    @property
    def tokens_per_second(self) -> float:
        return self.measured.generated_tokens / self.measured.seconds


def measure_beside(
    bench: Bench, backends: Sequence[str], on_turn: Callable[[int, Turn | VllmTurn], None] | None = None
) -> list[Turn | VllmTurn]:
    """Measure all turns of these backends, and return them in order."""

    def take(_: int, arm: tuple[Workload, str, str]) -> Turn | VllmTurn:
        workload, precision, backend = arm
        if backend == "vllm":
            return vllm_turn(bench, precision, workload)
        return _in_fresh_process(bench, precision, workload)

    return take_in_turn(product(bench.workloads, bench.precisions, backends), bench.rounds, take, on_turn)


def vllm_turn(bench: Bench, precision: str, workload: Workload) -> VllmTurn:
    """Measure one precision of vLLM in a process of its own. Raises RunFailed if that process fails."""
    rows = bench.rows_of(workload)
    with tempfile.TemporaryDirectory(prefix="octetrl-vllm-") as name:
        folder = Path(name)
        asked_file, result = folder / "asked.json", folder / "result.json"
        asked = asked_of(replace(bench, max_batch=rows), precision, workload, folder)
        asked_file.write_text(json.dumps(asdict(asked)), encoding="utf-8")
        command = [sys.executable, "-m", "octetrl.backends.vllm.measure", str(asked_file), str(result)]
        done = subprocess.run(command, check=False)
        if done.returncode != 0 or not result.is_file():
            raise RunFailed(
                f"bench: vLLM's process for {precision} at {workload.name} ended with code {done.returncode}; its"
                " messages above say why"
            )
        measured = Measured(**json.loads(result.read_text(encoding="utf-8")))
    return VllmTurn(precision, workload, rows, measured)


def asked_of(bench: Bench, precision: str, workload: Workload, folder: Path) -> Asked:
    """What the process measures. Writes the model's config.json into `folder`."""
    spec = bench.model.spec
    policy = precision_policy(spec, Fp8Config(**PRECISIONS[precision]))
    longest = workload.longest
    requests = [
        AskedRequest(
            prompt=list(one.prompt_token_ids),
            answer=answer,
            siblings=siblings,
            seed=one.seed + number,
            temperature=one.sampling.temperature,
        )
        for one in workload.requests
        for number, (answer, siblings) in enumerate(_answers_of(one))
    ]
    return Asked(
        folder=str(write_model(model_config(spec, policy), folder)),
        kv_cache_dtype="auto" if policy.kv_mode == "none" else "fp8_e4m3",
        context_length=longest.prompt + longest.answer,
        max_batch=bench.max_batch,
        memory_fraction=bench.kv_fraction,
        requests=requests,
    )


def _answers_of(request: GenerationRequest) -> list[tuple[int, int]]:
    """(length, siblings) of vLLM's requests for this one. Siblings of different lengths are requests of their own."""
    limits = request.answer_limits
    return [(limit, 1) for limit in limits] or [(request.sampling.max_new_tokens, request.num_siblings)]


def _in_fresh_process(bench: Bench, precision: str, workload: Workload) -> Turn:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(take_turn, bench, precision, workload).result()
        except BrokenProcessPool:
            raise RunFailed(
                f"bench: the process for {precision} at {workload.name} died; its last lines say why, or it ran out of"
                " memory"
            ) from None


def vllm_rows(turns: Sequence[VllmTurn]) -> list[Row]:
    """A row for each workload and precision: medians over its rounds."""
    by_arm: dict[tuple[str, str], list[VllmTurn]] = {}
    for turn in turns:
        by_arm.setdefault((turn.workload.name, turn.precision), []).append(turn)
    return [_row(rounds) for rounds in by_arm.values()]


def precision_in_vllm(precision: str) -> str:
    """The name of a precision in vLLM's results."""
    fp8 = Fp8Config(**PRECISIONS[precision])
    return ("fp8" if fp8.rollout else "bf16") + ("" if fp8.kv_cache == "none" else "_kv")


def _row(rounds: Sequence[VllmTurn]) -> Row:
    first, measured = rounds[0], [turn.measured for turn in rounds]
    lengths = [answer for _, answer in first.workload.siblings]
    speeds = [turn.tokens_per_second for turn in rounds]
    return {
        "precision": precision_in_vllm(first.precision),
        "workload": first.workload.name,
        "rollout/backend": f"vllm {measured[0].version}",
        "weights": "drawn",
        "rounds": len(rounds),
        "rollout/tokens_per_second": statistics.median(speeds),
        "rollout/tokens_per_second_min": min(speeds),
        "rollout/tokens_per_second_max": max(speeds),
        "time/rollout": statistics.median(one.seconds for one in measured),
        "time/startup": measured[0].startup_seconds,
        "time/first_token": statistics.median(one.first_token_seconds for one in measured),
        "rollout/generated_tokens": measured[0].generated_tokens,
        "rollout/mean_length": statistics.fmean(lengths),
        "rollout/max_length": max(lengths),
        "rollout/kv_capacity_tokens": min(one.kv_capacity_tokens for one in measured),
        "rollout/max_batch": first.max_batch,
    }
