"""What workers that share a model save: the same groups go on to the bit, and one worker has the same state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, Recipe, TrainerConfig
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.trainer import checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.worker import Worker
from tests.grid import run_grid, smallest_shape
from tests.objectives import objective
from tests.parity.short_run import worker_of
from tests.parity.sides import PRECISIONS
from tests.unit.workers.test_checkpoint_state import owned, step

SPEC = smallest_shape("qwen3", 2)


def worker(peers: Peers, kind: str) -> Worker:
    recipe = Recipe(
        model=ModelConfig(
            preset="tiny",
            init="random",
            context_length=SPEC.max_positions,
            lora=LoraConfig(rank=4) if kind == "lora" else None,
        ),
        fp8=PRECISIONS["fp8_full" if kind == "fp8" else "bf16"],
        algorithm=objective(),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(lr=1e-3, states="8bit" if kind == "fp8" else "float32"),
            tokens_per_micro_batch=64,
        ),
        engine=EngineConfig(kv_cache_tokens=1 << 10, max_batch=4),
        steps=9,
    )
    one = worker_of(recipe, SPEC, "cpu", peers)
    if one.needs_calibration:
        one.calibrate([[1, 2, 3, 4]])
    return one


def assert_parts_of(
    whole: Mapping[str, Tensor], part: Mapping[str, Tensor], rank: int, lora: LoraConfig | None
) -> None:
    """`whole`: all that one worker owns; `part`: of a worker that has rows of the model."""
    cut = cut_rows_of(SPEC.cut(TensorCut(rank, 2)), lora)
    assert whole.keys() == part.keys()
    for name, tensor in part.items():
        rows, theirs = cut.get(name.partition("/")[2] or name.removeprefix("codes ") + ".weight"), whole[name]
        if rows is not None and tensor.dim():
            step = sum(one.rows for one in rows.pieces) / tensor.shape[0]  # of 8-bit moments' exponents: 128 elements
            bounds = [(round(one.whole / step), round((one.whole + one.rows) / step)) for one in rows.pieces]
            theirs = torch.cat([theirs[first:stop] for first, stop in bounds])
        assert torch.equal(tensor, theirs), name


@pytest.mark.parametrize("kind", ["bf16", "fp8", "lora"])
def test_the_same_groups_go_on_and_one_worker_has_the_same_state(kind: str, tmp_path: Path) -> None:
    lora = LoraConfig(rank=4) if kind == "lora" else None
    folder = tmp_path / "parts"
    folder.mkdir()

    def begun(peers: Peers) -> tuple[dict[str, Tensor], list[WrittenFile], str, Tensor | None]:
        one = worker(peers, kind)
        step(one, 1)
        state = owned(one)
        assert one.copy_state() is None
        written = one.write_state(folder, copied=True)
        scales = one.kv_scales
        return state, written, step(one, 2), None if scales is None else scales.scale_LS

    def resumed(peers: Peers) -> tuple[dict[str, Tensor], str]:
        one = worker(peers, kind)
        one.load(checkpoint.load(path), 1)
        return owned(one), step(one, 2)

    def moved(place: Path) -> list[WrittenFile]:
        for file in folder.iterdir():
            file.rename(place / file.name)
        return [file for _, written, _, _ in team for file in written]

    team = run_grid(1, 2, begun)
    path = checkpoint.save(tmp_path / "saved", 1, {}, write_more=moved)
    for (state, _, digest, _), (again, other) in zip(team, run_grid(1, 2, resumed), strict=True):
        assert digest == other
        assert all(torch.equal(one, again[name]) for name, one in state.items())
    alone = worker(ALONE, kind)
    alone.load(checkpoint.load(path), 1)
    whole = owned(alone)
    for rank, (state, _, _, _) in enumerate(team):
        assert_parts_of(whole, state, rank, lora)
    if kind == "fp8":
        parts = [scale_LS.unflatten(1, (2, -1)) for *_, scale_LS in team if scale_LS is not None]  # K's heads, then V's
        assert alone.kv_scales is not None
        assert torch.equal(alone.kv_scales.scale_LS, torch.cat(parts, dim=2).flatten(1))
    assert alone.copy_state() is None
    one = tmp_path / "one"
    one.mkdir()
    path = checkpoint.save(tmp_path / "alone", 1, {}, write_more=lambda place: alone.write_state(place, copied=True))
    for rank, (state, _) in enumerate(run_grid(1, 2, resumed)):
        assert_parts_of(whole, state, rank, lora)
