"""Host memory and time of several CPU workers while they load one model for training.

    python -m lab.loading --workers 2
    python -m lab.loading --workers 2 --whole    each worker reads and quantises the whole model

It makes a model folder of about 1 GB in BF16 with 8,192 tokens, and loads it in so many processes, which exchange rows
over gloo: codes and scales of all FP8 linears, the rows that a worker owns, and then the optimizer (8-bit moments, no
master weights, BF16 gradient sums of the owned rows). `read` is what the worker with the most has read from files,
`quantised` what it has quantised, in GB of BF16. `peak` is the largest memory of a process without mapped files
(RssAnon) above that before loading, sampled every 5 ms; `weights` up to the loaded model, `worker` up to the optimizer;
`after` what is left then. The seconds are those up to the loaded model: of the clock, and of the CPU, the largest of
all workers. One thread a worker. Nothing stays on the disk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from octetrl.config.algorithm import SftConfig
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import Fp8Config, ModelConfig, OptimizerConfig, Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.layers.weight_memory import Loading
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.trainer.peers import join_store, serve_store
from octetrl.trainer.shards import Share
from octetrl.trainer.shared_weights import optimizer_of
from octetrl.trainer.tensor_peers import connect_grid
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


@dataclass(frozen=True)
class Setting:
    folder: str
    precision: str
    address: str
    share: Share
    whole: bool


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


def load(setting: Setting, found: Connection) -> None:
    torch.set_num_threads(1)
    spec, device = load_spec(setting.folder), torch.device("cpu")
    fp8 = Fp8Config(**PRECISIONS[setting.precision])
    recipe = Recipe(model=ModelConfig(path=setting.folder), algorithm=SftConfig(name="sft", batch_size=1), fp8=fp8)
    peers = connect_grid(join_store(setting.address), setting.share, 1, device, gradients="sharded")
    policy = precision_policy(spec, fp8)

    def fill(model: Decoder, loading: Loading) -> None:
        load_weights(model, setting.folder, loading=Loading(count=loading.count) if setting.whole else loading)

    builder = ModelBuilder(recipe, spec, policy, device, fill, peers)
    peers.agree(None, "start")
    memory, cpu, began = Memory(), time.process_time(), time.perf_counter()
    model = builder.trainer_model()
    seconds, cpu, weights = time.perf_counter() - began, time.process_time() - cpu, memory.gb
    optimizer = OptimizerConfig(states="8bit", master="stochastic_rounding")
    held = optimizer_of(model, optimizer, seed=0, peers=peers, gradients="bfloat16")
    time.sleep(2 * SAMPLE_SECONDS)
    after = (anonymous_bytes() - memory.before) / 1e9
    count = builder.count
    found.send((count.read_bytes / 1e9, count.quantized_bytes / 1e9, weights, memory.gb, after, seconds, cpu))
    peers.agree(None, "end")
    del held


def measure(folder: str, workers: int, precision: str, *, whole: bool) -> None:
    store, address = serve_store("127.0.0.1")
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(workers)]
    settings = [Setting(folder, precision, address, Share(rank, workers), whole) for rank in range(workers)]
    processes = [
        spawn.Process(target=load, args=(setting, pipe[1])) for setting, pipe in zip(settings, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)
    read, quantized, weights, worker, after, seconds, cpu = (
        max(values) for values in zip(*(pipe[0].recv() for pipe in pipes), strict=True)
    )
    print(
        f"{precision}, {workers} workers{', each the whole model' if whole else ''}: read {read:.2f} GB, quantised"
        f" {quantized:.2f} GB; peak GB: weights {weights:.2f}, worker {worker:.2f}; after {after:.2f};"
        f" {seconds:.1f} s, {cpu:.1f} s of CPU time"
    )
    del store


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
    parser.add_argument("--whole", action="store_true", help="each worker reads and quantises everything")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        in_process(make, folder)
        for workers in arguments.workers:
            measure(folder, workers, arguments.precision, whole=arguments.whole)


if __name__ == "__main__":
    main()
