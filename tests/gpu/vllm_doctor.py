"""`octetrl doctor --backend vllm` on a GPU: `python -m tests.gpu.vllm_doctor fp8_full --attribute`. Prints the report.

A process of its own, and each precision in one more, because vLLM's memory for sleeping can be used by one engine of a
process.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import yaml

from octetrl.cli.main import run_command
from tests.e2e import tiny_run

SHAPE = {  # the smallest sizes of which vLLM's FP8 kernels take each part
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
CHANGES = {
    "model.context_length": 512,
    "cluster.device": "cuda",
    "engine.page_size": 32,
    "engine.max_batch": 16,
    "engine.kv_cache_tokens": 32_768,
    "rollout.temperature": 0.8,
}
SIZE = ["--prompts", "8", "--sequences", "4", "--answer-tokens", "128"]


def main(precision: str, *words: str) -> int:
    """The doctor's exit code: 0 or 1 by how far the log-probs are, 2 where vLLM cannot run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = tiny_run.make_model(folder / "model", **SHAPE)
        tree = tiny_run.recipe_tree(model, folder / "run", CHANGES | {"precision": precision})
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return run_command(["doctor", str(folder / "recipe.yaml"), "--backend", "vllm", *SIZE, *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *sys.argv[2:]))
