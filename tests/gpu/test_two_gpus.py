"""Two workers on GPUs of their own: collectives over NCCL, and whole runs on Ray against one worker's.

One Ray serves the file. The model is small; what differs between one GPU and two does not depend on its size.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.config.cluster import ClusterConfig
from octetrl.engine.forward_graphs import ForwardGraphs
from octetrl.records import RolloutGroup
from octetrl.run.build import build_run
from octetrl.run.loop import train
from octetrl.trainer.peers import Peers, ProcessGroupPeers, join_store, serve_store
from octetrl.trainer.shards import Cut, Share, cut_rows
from octetrl.workers import transfer
from octetrl.workers.roles import SeparateWorkers
from octetrl.workers.status import STATUS_FILE
from tests.e2e.tiny_run import make_model, read_lines, tiny_recipe
from tests.gpu.test_doctor import WIDE
from tests.grid import WIDE as WIDE_ENOUGH_TO_CUT
from tests.required import missing
from tests.team import run_team
from tests.unit.workers.thread_team import steps_of, unspread

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("two GPUs")]
SHAPES = ((300, 64), (5,), (1100, 3), (128, 2), (512, 16), (1024, 8))  # the last two are even
DEADLINE_SECONDS = 60.0
COUNT = 2
ON_TWO: dict[str, Any] = {"cluster.device": "auto", "cluster.gpus": COUNT, "cluster.address": "auto"}
ROLES: dict[str, Any] = {"cluster.device": "auto", "cluster.trainer_gpus": 1, "cluster.engine_gpus": 1}
ROLES |= {"cluster.address": "auto"}
ON_ONE: dict[str, Any] = {"cluster.device": "cuda"}
RUN: dict[str, Any] = {
    "engine.kv_cache_tokens": 1 << 14,  # not a share of what is free, as runs stand side by side
    "rollout.prompts_per_step": 4,
    "trainer.tokens_per_micro_batch": 128,  # several for each worker
    "checkpoint.every": 1,
}


@pytest.fixture(scope="module", autouse=True)
def two_gpus() -> None:
    if torch.cuda.device_count() < COUNT:
        missing("two-gpus", "fewer than two GPUs are visible")


@pytest.fixture(scope="module")
def running(two_gpus: None) -> Iterator[None]:
    if find_spec("ray") is None:
        missing("ray", "ray is not installed")
    from octetrl.workers.ray_cluster import connect

    cluster = connect(ClusterConfig(gpus=COUNT), None)
    yield
    cluster.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("two") / "model", tie_word_embeddings=False, **WIDE)


@pytest.fixture(scope="module")
def finished(running: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps on two GPUs."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tiny_recipe(model, folder, RUN | ON_TWO))
    return folder


# --- collectives --------------------------------------------------------------------------------------------


def exchanged(peers: Peers, device: torch.device) -> list[Any]:
    """The results of every collective, on the CPU."""
    rank, count = peers.share.rank, peers.share.count

    def tensors(seed: int, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]

    table = cut_rows(SHAPES, count)
    found: list[Any] = []
    sums = peers.sum_to_owners([Cut(*cut) for cut in zip(tensors(rank, torch.float32), table, strict=True)], "sums")
    found.append([(rank, part.cpu()) for part in sums])
    assert isinstance(peers, ProcessGroupPeers)
    peers.bucket_elements = 2000  # more exchanges than are in flight at once
    for dtype, in_place_from in product((torch.float32, torch.bfloat16, torch.float8_e4m3fn), (0, 1 << 20)):
        mine = tensors(rank, dtype)
        peers.in_place_from = in_place_from
        peers.gather_from_owners([Cut(*cut) for cut in zip(mine, table, strict=True)], "rows")
        found.append([one.cpu().view(torch.uint8) for one in mine])
    nan = torch.tensor([torch.nan if rank else 0.0, float(rank)], device=device)
    found += [peers.sum(torch.tensor([1.0, 1e-9 * rank], device=device), "sum").cpu()]
    found += [peers.maximum(nan, "amax").cpu().nan_to_num(7.0)]
    found += [[one.cpu() for one in peers.gather(torch.arange(3 * rank + 1, device=device), "tokens")]]
    found += [peers.gather_records({"rank": rank, "x": 0.1}, "records")]
    found += [peers.agree("broken" if rank else None, "check"), peers.agree(None, "check")]
    return found


def on_one_gpu(rank: int, address: str, folder: Path) -> None:
    """The process of one worker, which sees its own GPU alone, as Ray's do."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    device = torch.device("cuda", 0)
    peers = ProcessGroupPeers(join_store(address), Share(rank, COUNT), device, deadline_seconds=DEADLINE_SECONDS)
    assert peers.link_speed() > 1.0, "GB/s"
    torch.save(exchanged(peers, device), folder / f"{rank}.pt")
    peers.close()


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
    else:
        assert one == other


def test_collectives_over_nccl_have_the_bits_of_gloo(tmp_path: Path) -> None:
    """The sum of two numbers has one order, so sums are equal as well."""
    store, address = serve_store("127.0.0.1")
    torch.multiprocessing.spawn(on_one_gpu, (address, tmp_path), nprocs=COUNT)
    assert store is not None
    expected = run_team(COUNT, lambda peers: exchanged(peers, torch.device("cpu")))
    for rank in range(COUNT):
        assert_equal(torch.load(tmp_path / f"{rank}.pt", weights_only=False), expected[rank])


# --- weights beside an open session -------------------------------------------------------------------------

SENT = ((1 << 21, torch.bfloat16), (300, torch.float8_e4m3fn), (70_000, torch.float32), (1 << 20, torch.float8_e4m3fn))


def sent(number: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(size, generator=generator).to(device, dtype) for size, dtype in SENT]


def receive_beside_graphs(rank: int, address: str, folder: Path) -> None:
    """The process of a sender, or of a receiver in which another thread captures and replays graphs like a session."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    device = torch.device("cuda", 0)
    transfer.BUCKET_BYTES = 1 << 20  # the first tensor, larger than a bucket, travels in place
    link = transfer.Transfer(join_store(address), Share(rank, COUNT), device, deadline_seconds=60.0, name="weights")
    ends, errors, captured = threading.Event(), list[BaseException](), [0]

    def run_graphs() -> None:
        ones_N = torch.ones(1 << 20, device=device)
        graphs = ForwardGraphs(device)

        def forward(size: int, *_: object) -> Tensor:
            return sum((ones_N[:size] * one for one in range(50)), ones_N[:size] * 0)

        try:
            while not ends.is_set():
                cache: Any = object()  # a new one drops the graphs
                for size in (1 << 10, 1 << 20, 1 << 10, 1 << 20):  # captured, then replayed
                    assert graphs.run(forward, size, False, False, cache).eq(1225.0).all()
                    captured[0] += 1
        except BaseException as error:
            errors.append(error)

    beside = threading.Thread(target=run_graphs)
    if rank:
        beside.start()
    held = [torch.zeros_like(one) for one in sent(0, device)]
    equal = []
    for number in range(20):
        header = torch.tensor([number if rank == 0 else 0])  # on the host
        tensors = sent(number, device) if rank == 0 else held
        assert link.broadcast([header]) == 8 and link.broadcast(tensors) == sum(one.nbytes for one in held)
        expected = sent(number, device)
        equal.append(header.item() == number)
        equal += [
            one.view(torch.uint8).equal(other.view(torch.uint8)) for one, other in zip(tensors, expected, strict=True)
        ]
    ends.set()
    if rank:
        beside.join()
    (folder / f"{rank}.json").write_text(json.dumps([all(equal), captured[0], [repr(one) for one in errors]]))
    link.close()


def test_weights_arrive_beside_graphs_that_are_captured_and_replayed(tmp_path: Path) -> None:
    store, address = serve_store("127.0.0.1")
    torch.multiprocessing.spawn(receive_beside_graphs, (address, tmp_path), nprocs=COUNT)
    assert store is not None
    sender, receiver = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(COUNT))
    assert sender == [True, 0, []]
    assert receiver[0] and receiver[1] > 0 and receiver[2] == []


# --- runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_two_workers_sample_what_one_samples_and_publish_equal_weights(
    precision: str, running: None, model: Path, tmp_path: Path
) -> None:
    changes = RUN | {"precision": precision, "trainer.optimizer.lr": 0.0, "checkpoint.every": 0}
    runs = []
    for name, where in (("one", ON_ONE), ("two", ON_TWO)):
        run = build_run(tiny_recipe(model, tmp_path / name, changes | where))
        try:
            runs.append(steps_of(run, 2))
            if where is ON_TWO:
                published = run.workers._team.ask("publish", "publish", run.workers.policy_version)
                assert len({one.weights_digest for one in published}) == 1 and len(published) == COUNT
        finally:
            run.close()
    (expected, lines), (drawn, shared) = runs
    assert drawn == expected
    for line, mine in zip(lines, shared, strict=True):
        assert mine["mismatch/max_abs_diff"] == line["mismatch/max_abs_diff"] == 0.0
        assert mine["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-3)


def without_step(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return unspread([{name: line[name] for name in line if name != "step"} for line in lines])


def steps_on(
    where: dict[str, Any], steps: int, model: Path, folder: Path
) -> tuple[list[tuple[RolloutGroup, ...]], list[dict[str, Any]], list[str]]:
    """What each step sampled, its metrics, and the digests of the weights that all workers hold at the end."""
    changes = RUN | {"precision": "fp8_full", "checkpoint.every": 0, "steps": steps}
    run = build_run(tiny_recipe(model, folder, changes | where))
    try:
        drawn, lines = steps_of(run, steps)
        teams = [run.workers._team]
        if isinstance(run.workers, SeparateWorkers):
            run.workers.adopt()
            teams.append(run.workers._engine_team)
        held = [one for team in teams for one in team.ask("publish", "publish", run.workers.policy_version)]
    finally:
        run.close()
    for line in lines:
        sent_gb = line.pop("publish/sent_gb", None)
        assert (sent_gb is not None and sent_gb > 0.0) == ("cluster.trainer_gpus" in where)
    lines = [{name: line[name] for name in line if not name.startswith("memory/")} for line in lines]
    return drawn, lines, [one.weights_digest for one in held]


def test_roles_on_gpus_of_their_own_change_no_bit(running: None, model: Path, tmp_path: Path) -> None:
    drawn, lines, _ = steps_on(ON_TWO | {"cluster.gpus": 1}, 2, model, tmp_path / "both")
    apart, separate, held = steps_on(ROLES, 2, model, tmp_path / "apart")
    assert apart == drawn and separate == lines
    assert [line["mismatch/max_abs_diff"] for line in separate] == [0.0, 0.0]
    assert len(held) == COUNT and len(set(held)) == 1


def test_weights_ahead_arrive_in_a_second_buffer_and_in_place_with_the_same_bits(
    running: None, model: Path, tmp_path: Path
) -> None:
    ahead = ROLES | {"cluster.max_staleness": 1}
    runs = [steps_on(ahead | {"cluster.weight_buffer": one}, 3, model, tmp_path / one) for one in ("double", "single")]
    assert runs[0] == runs[1]
    _, lines, held = runs[0]
    assert [line["rollout/staleness"] for line in lines] == [0.0, 1.0, 1.0]
    assert lines[0]["mismatch/max_abs_diff"] == 0.0 and len(held) == COUNT and len(set(held)) == 1


def test_weights_in_flight_reach_the_other_gpu(running: None, model: Path, tmp_path: Path) -> None:
    changes = ROLES | {"cluster.max_staleness": 1, "cluster.weights_in_flight": "recompute_cache"}
    _, lines, held = steps_on(changes, 3, model, tmp_path / "run")
    assert [line["publish/policy_version"] for line in lines] == [1.0, 2.0, 3.0]
    assert lines[0]["mismatch/max_abs_diff"] == 0.0 and all(line["rollout/staleness"] <= 1.0 for line in lines)
    assert all(line.get("mismatch/age_0/max_abs_diff", 0.0) == 0.0 for line in lines)
    assert len(held) == COUNT and len(set(held)) == 1


def test_a_killed_worker_changes_nothing(finished: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill_one() -> None:
        until = time.monotonic() + DEADLINE_SECONDS
        lines = folder / "metrics.jsonl"
        while not (lines.exists() and read_lines(lines)) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(int(json.loads((folder / STATUS_FILE).read_text())["workers"][1]["pid"]), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    train(tiny_recipe(model, folder, RUN | ON_TWO | {"cluster.max_restarts": 1, "steps": 6}))
    killer.join()
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert without_step(lines)[:1] == without_step(read_lines(finished / "metrics.jsonl"))[:1]
    assert {line["publish/policy_version"] for line in lines} == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    assert (folder / "logs" / "worker_1.log").exists()


def test_what_two_gpus_wrote_goes_on_on_one(finished: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    train(tiny_recipe(model, folder, RUN | ON_ONE | {"steps": 4}), resume=True)
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[:3] == read_lines(finished / "metrics.jsonl")
    assert lines[3]["mismatch/max_abs_diff"] == 0.0


def test_workers_that_share_a_model_draw_what_one_gpu_draws(running: None, tmp_path: Path) -> None:
    """The verbs of a run, and resuming with the whole model on one GPU; the rest is in test_tensor_parallel.py."""
    shape = WIDE_ENOUGH_TO_CUT | {"vocab_size": 16_424}
    model = make_model(tmp_path / "model", tie_word_embeddings=False, **shape)
    changes = RUN | {"precision": "fp8_full", "steps": 3}
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    train(tiny_recipe(model, shared, changes | ON_TWO | {"cluster.tensor_parallel": 2}))
    train(tiny_recipe(model, alone, changes | ON_ONE | {"steps": 1}))
    lines, (line,) = read_lines(shared / "metrics.jsonl"), read_lines(alone / "metrics.jsonl")
    assert [one["mismatch/max_abs_diff"] for one in [*lines, line]] == [0.0] * 4
    paths = [lines[0][name] for name in ("rollout/fused", "rollout/captured", "train/fused")]
    assert paths == [1.0, 1.0, 0.0], "training runs kernel by kernel, and says so"
    assert lines[0]["grad_norm"] == pytest.approx(line["grad_norm"], rel=0.02)
    first = "rollouts/step_000001.jsonl"
    assert (shared / first).read_bytes() == (alone / first).read_bytes()
    train(tiny_recipe(model, shared, changes | ON_ONE | {"steps": 4}), resume=True)
    last = read_lines(shared / "metrics.jsonl")[-1]
    assert (last["step"], last["mismatch/max_abs_diff"], last["rollout/fused"]) == (4, 0.0, 1.0)
