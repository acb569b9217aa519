"""One vLLM on two GPUs by its own tensor parallelism: `python -m tests.gpu.vllm_tensor_parallel fp8_full`.

Two workers on Ray share a model (`cluster.tensor_parallel: 2`). Before the steps they answer greedily, and one GPU's
vLLM does so too, in a process beside them (`--one MODEL`). If the run fails, or takes longer than `SECONDS`, the last
lines of its workers' logs follow: ranks that do not meet would wait for each other without end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octetrl.records import GenerationRequest, SamplingParams
from octetrl.run.build import build_run
from octetrl.run.state import Run
from octetrl.workers import ray
from octetrl.workers.status import last_lines
from tests.e2e.tiny_run import make_model, tiny_recipe
from tests.gpu.vllm_smoke import LARGEST, Clock
from tests.unit.workers.thread_team import steps_of

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPE |= {"head_dim": 128, "vocab_size": 8200}  # three chunks of the vocabulary, so that the shares differ
STEPS, PROMPTS, ANSWER = 2, 32, 16
SECONDS = 260.0  # of everything; with nothing compiled yet FP8 needs more than 170
FURTHEST = {"bf16": 0.03, "fp8_full": 0.1}  # mean difference of the first tokens' log-probs, two GPUs against one
Drawn = list[tuple[list[int], list[float]]]


def recipe_of(precision: str, model: Path, folder: Path, gpus: int) -> Any:
    changes: dict[str, Any] = {"cluster.device": "cuda"}
    if gpus > 1:
        changes = {"cluster.device": "auto", "cluster.gpus": gpus, "cluster.tensor_parallel": gpus}
    changes |= {"precision": precision, "steps": STEPS, "rollout.prompts_per_step": 8, "engine.backend": "vllm"}
    changes |= {"engine.kv_cache_tokens": 16_384, "engine.page_size": 32, "engine.max_batch": 16}
    return tiny_recipe(model, folder, changes)


def greedy(run: Run) -> Drawn:
    """Greedy answers of the first weights."""
    prompts = [tuple(5 + (7 * number + place) % 300 for place in range(20)) for number in range(PROMPTS)]
    if run.workers.needs_calibration:
        run.workers.calibrate(prompts)
    sampling = SamplingParams(ANSWER, temperature=0.0, ignore_eos=True)
    asked = [GenerationRequest(f"g{number}", prompt, sampling) for number, prompt in enumerate(prompts)]
    drawn = run.workers.generate(asked)
    return [(list(one.token_ids), list(one.logprobs)) for (one,) in drawn]


def cancelled(run: Run) -> None:
    """Ranks stay in step when a request is cancelled while its answers run."""
    sampling = SamplingParams(64, temperature=1.0, ignore_eos=True)
    with run.workers.session() as session:
        for name in ("kept", "cancelled"):
            session.submit(GenerationRequest(name, (5, 6, 7), sampling, 4))
        session.events(0.05)
        session.cancel("cancelled")
        events = []
        while session.has_work:
            events += [event for event in session.events(1.0) if event.completion is not None]
    assert [event.request_id for event in events] == ["kept"] * 4, events


def compare(precision: str, two: Drawn, one: Drawn) -> None:
    pairs = list(zip(two, one, strict=True))
    first = [(ours[1][0], theirs[1][0]) for ours, theirs in pairs if ours[0][0] == theirs[0][0]]
    whole = sum(ours[0] == theirs[0] for ours, theirs in pairs)
    mean = sum(abs(ours - theirs) for ours, theirs in first) / max(1, len(first))
    print(f"greedy on two GPUs and on one: {len(first)} of {PROMPTS} first tokens and {whole} answers are equal,")
    print(f"log-probs of equal first tokens differ by {mean:.5f} in the mean", flush=True)
    assert len(first) > PROMPTS // 2, "most first tokens differ: the ranks have wrong parts of the weights"
    assert mean < FURTHEST[precision]


@contextmanager
def logs_shown(folder: Path, beside: subprocess.Popen[str]) -> Iterator[None]:
    """If a run fails, or does not end, what its workers printed last."""

    def show() -> None:
        for log in sorted(folder.glob("logs/worker_*.log")):
            print(f"--- {log.name}", *last_lines(log, 30), sep="\n", flush=True)

    def give_up() -> None:
        print(f"not done after {SECONDS:.0f} s", flush=True)
        show()
        beside.kill()
        os._exit(2)  # its processes end with it

    ray.remove_logs = lambda *_: None  # type: ignore[attr-defined]
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    clock = threading.Timer(SECONDS, give_up)
    clock.start()
    try:
        yield
    except BaseException:
        show()
        raise
    finally:
        clock.cancel()


def begin_one(precision: str, model: Path, folder: Path) -> subprocess.Popen[str]:
    """One GPU's answers, by a process whose compiled graphs have a folder of their own. It prints into one.log."""
    command = [sys.executable, "-m", "tests.gpu.vllm_tensor_parallel", precision, "--one", str(model)]
    environment = os.environ | {"VLLM_CACHE_ROOT": str(folder / "compiled")}
    with (folder / "one.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment)


def one_gpu(precision: str, model: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        run = build_run(recipe_of(precision, model, Path(name) / "run", 1))
        try:
            (model / "greedy.json").write_text(json.dumps(greedy(run)))
        finally:
            run.close()


def two_gpus(precision: str, model: Path, folder: Path, clock: Clock) -> Drawn:
    run = build_run(recipe_of(precision, model, folder, 2))
    try:
        clock.say(f"{precision}: two ranks have started")
        answers = greedy(run)
        cancelled(run)
        clock.say("greedy answers, a cancelled request")
        drawn, lines = steps_of(run, STEPS)
        clock.say("steps")
    finally:
        run.close()
    for step, (groups, line) in enumerate(zip(drawn, lines, strict=True)):
        error = line["mismatch/token_mult_prob_error"]
        print(f"step {step}: token_mult_prob_error {error:.5f}, max_abs_diff {line['mismatch/max_abs_diff']:.4f}")
        turns = [turn.completion for group in groups for one in group.rollouts for turn in one.turns]
        assert {one.policy_version for one in turns} == {step}
        assert len({one.token_ids for one in turns}) > len(turns) // 2, "siblings drew the same tokens"
        assert error < LARGEST[precision] and "mismatch/unequal_tokens" not in line
    return answers


def main(precision: str, options: Sequence[str]) -> None:
    if options:
        one_gpu(precision, Path(options[1]))
        return
    clock = Clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", tie_word_embeddings=False, **SHAPE)
        beside = begin_one(precision, model, folder)
        try:
            with logs_shown(folder / "run", beside):
                answers = two_gpus(precision, model, folder / "run", clock)
            beside.wait(timeout=120)
        finally:
            beside.kill()
        assert beside.returncode == 0, "\n".join(["one GPU's vLLM failed:", *last_lines(folder / "one.log", 30)])
        clock.say("one GPU's answers")
        compare(precision, answers, json.loads((model / "greedy.json").read_text()))
    print(f"{precision}: passed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
