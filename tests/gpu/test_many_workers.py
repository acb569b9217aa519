"""Workers on GPUs: the shards of an optimizer; and two that train one model over NCCL, with parity on both."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from octetrl.config.schema import OptimizerConfig
from octetrl.trainer import optimizer_states as optimizer_offload
from octetrl.trainer.peers import PeersLost, ProcessGroupPeers, join_store, serve_store
from octetrl.trainer.shards import GradientMode, Share
from tests.gpu.test_parity import SMALL
from tests.gpu.test_two_gpus import assert_equal, exchanged
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.required import missing
from tests.team import run_team
from tests.unit.trainer.test_shards import updated

pytestmark = pytest.mark.gpu
STEPS, DEADLINE_SECONDS = 3, 60.0


def on_one_gpu(rank: int, address: str, precision: str, gradients: GradientMode, folder: Path) -> None:
    """The process of one worker, which sees its own GPU alone, as Ray's do."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    device = torch.device("cuda", 0)
    peers = ProcessGroupPeers(
        join_store(address), Share(rank, 2), device, gradients=gradients, deadline_seconds=DEADLINE_SECONDS
    )
    run = short_run(SMALL["qwen3"], precision, "cuda", STEPS, peers=peers, tokens_per_micro_batch=512, releases=True)
    assert_equal_in_every_step(run)
    torch.save(run, folder / f"{rank}.pt")
    peers.sum(torch.ones(1, device=device), "the last sum")
    if rank == 0:
        peers._deadline_seconds = 2.0  # the other has ended, or does not answer
        with pytest.raises(PeersLost, match="phase 'nobody answers'"):
            peers.sum(torch.ones(1, device=device), "nobody answers")
    else:
        time.sleep(4.0)
    os._exit(0)  # a collective that was given up must not be waited for


def test_workers_on_one_gpu_exchange_through_the_host() -> None:
    """As those of cluster.workers_per_gpu do."""
    on_cpu, on_gpu = (run_team(2, partial(exchanged, device=torch.device(name))) for name in ("cpu", "cuda"))
    assert_equal(on_gpu, on_cpu)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("master", ["float32", "stochastic_rounding"])
def test_shards_have_the_bits_of_the_whole(
    states: str, master: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_offload, "PIECE_ELEMENTS", 1 << 12)
    config = OptimizerConfig(states=states, master=master, offload=offload)
    whole = updated(config, Share(), torch.bfloat16, "cuda")
    shards = [updated(config, Share(rank, 3), torch.bfloat16, "cuda") for rank in range(3)]
    torch.cuda.synchronize()
    for name, tensor in whole.items():
        together = torch.cat([shard[name] for shard in shards if name in shard])
        assert torch.equal(together, tensor), name


@pytest.mark.parametrize(("precision", "gradients"), [("fp8_full", "local"), ("bf16", "sharded")])
def test_two_gpus_train_one_model(precision: str, gradients: GradientMode, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        missing("two-gpus", "fewer than two GPUs are visible")
    store, address = serve_store("127.0.0.1")
    torch.multiprocessing.spawn(on_one_gpu, (address, precision, gradients, tmp_path), nprocs=2)
    assert store is not None
    mine, theirs = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert_same(mine, theirs)
    assert mine.digests == theirs.digests
    assert_learned(mine)
