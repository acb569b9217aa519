"""Two workers on one GPU that generate with vLLM: `python -m tests.gpu.vllm_two_workers both fp8_full`, or `roles`.

    both    each worker trains, and generates with a vLLM of its own
    roles   one worker trains, the other generates

Their tensors travel through the host, because NCCL needs a GPU for each worker. It prints each step's mismatch.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from octetrl.run.build import build_run
from tests.e2e.tiny_run import make_model, tiny_recipe
from tests.gpu.vllm_smoke import LARGEST, Clock
from tests.unit.workers.thread_team import steps_of

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 128}
CLUSTERS: dict[str, dict[str, int]] = {"both": {"gpus": 1}, "roles": {"trainer_gpus": 1, "engine_gpus": 1}}
STEPS = 2


def main(kind: str, precision: str) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", tie_word_embeddings=False, **SHAPE)
        changes: dict[str, Any] = {f"cluster.{field}": value for field, value in CLUSTERS[kind].items()}
        changes |= {"cluster.device": "auto", "cluster.workers_per_gpu": 2, "precision": precision, "steps": STEPS}
        changes |= {"engine.backend": "vllm", "engine.kv_cache_tokens": 16_384, "engine.page_size": 32}
        changes["engine.max_batch"] = 16  # fewer graphs to capture
        run = build_run(tiny_recipe(model, folder / "run", changes | {"rollout.prompts_per_step": 8}))
        try:
            clock.say(f"{kind}, {precision}: the workers have started")
            drawn, lines = steps_of(run, STEPS)
        finally:
            run.close()
        clock.say("steps")
        for step, (groups, line) in enumerate(zip(drawn, lines, strict=True)):
            error = line["mismatch/token_mult_prob_error"]
            print(f"step {step}: token_mult_prob_error {error:.5f}, max_abs_diff {line['mismatch/max_abs_diff']:.4f}")
            answers = [turn.completion for group in groups for one in group.rollouts for turn in one.turns]
            assert {one.policy_version for one in answers} == {step}
            assert len({one.token_ids for one in answers}) > len(answers) // 2, "siblings drew the same tokens"
            assert error < LARGEST[precision] and "mismatch/unequal_tokens" not in line
    print(f"{kind}, {precision}: passed", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
