"""Host memory and time of one of several CPU workers while it loads a model for training.

    python -m benchmarks.loading --workers 2

It makes a model folder of about 1 GB in BF16 with 8,192 tokens, and loads it as the first of so many workers does:
codes and scales of all FP8 linears, the rows that it owns, and then the optimizer (8-bit moments, no master weights,
BF16 gradient sums of the owned rows). No other worker runs. `peak` is the largest memory of the process without mapped
files (RssAnon) above that before loading, sampled every 5 ms; `weights` up to the loaded model, `worker` up to the
optimizer; `after` what is left then. The seconds are the CPU time up to the loaded model. Nothing stays on the disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path

import torch

from octetrl.config.algorithm import SftConfig
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import Fp8Config, ModelConfig, OptimizerConfig, Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.trainer.peers import Alone
from octetrl.trainer.shards import Share
from octetrl.trainer.shared_weights import optimizer_of
from octetrl.workers.models import ModelBuilder

SAMPLE_SECONDS = 0.005
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}


class FirstOf(Alone):
    """The first of `count` workers, of which nothing is asked while a model is loaded."""

    def __init__(self, count: int) -> None:
        self.share = Share(0, count)
        self.gradients = "sharded"


class Memory:
    """The largest RssAnon of this process since `begin`, in bytes above what it was then."""

    def __init__(self) -> None:
        self.before = self.peak = anonymous_bytes()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, anonymous_bytes())
            time.sleep(SAMPLE_SECONDS)

    @property
    def gb(self) -> float:
        return (self.peak - self.before) / 1e9


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def make(folder: str) -> None:
    spec = spec_from_config(CONFIG)
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    model.random_init(0)
    save_weights(model, folder)


def load(folder: str, workers: int, precision: str) -> None:
    torch.set_num_threads(1)
    spec = load_spec(folder)
    fp8 = Fp8Config(**PRECISIONS[precision])
    recipe = Recipe(model=ModelConfig(path=folder), algorithm=SftConfig(name="sft", batch_size=1), fp8=fp8)
    peers = FirstOf(workers)
    policy = precision_policy(spec, fp8)
    memory, began = Memory(), time.process_time()
    builder = ModelBuilder(recipe, spec, policy, torch.device("cpu"), lambda model: load_weights(model, folder), peers)
    model = builder.trainer_model()
    seconds, weights = time.process_time() - began, memory.gb
    optimizer = OptimizerConfig(states="8bit", master="stochastic_rounding")
    held = optimizer_of(model, optimizer, seed=0, peers=peers, gradients="bfloat16")
    time.sleep(2 * SAMPLE_SECONDS)
    after = (anonymous_bytes() - memory.before) / 1e9
    peaks = f"peak GB: weights {weights:.2f}, worker {memory.gb:.2f}; after {after:.2f}"
    print(f"{precision}, {workers} workers: {peaks}; {seconds:.1f} s of CPU time")
    del held


def in_process(target: object, *arguments: object) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)  # type: ignore[arg-type]
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2])
    parser.add_argument("--precision", choices=sorted(PRECISIONS), default="fp8_full")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        in_process(make, folder)
        for workers in arguments.workers:
            in_process(load, folder, workers, arguments.precision)


if __name__ == "__main__":
    main()
