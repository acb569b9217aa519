"""Files of tensors: the safetensors library's bytes, whatever the chunks, and checksums that see every change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from octetrl.trainer import file_digests, state_writer
from octetrl.trainer.file_digests import altered_files, digest_file, hashing_threads
from octetrl.trainer.state_writer import StateWriter, write_files


def tensors() -> dict[str, Tensor]:
    """Every dtype of a state; no elements, no dimension, a transposed view, a name outside ASCII."""
    chance = torch.Generator().manual_seed(1)
    wide = torch.randn(37, 53, generator=chance)
    return {
        "b.weight": wide.bfloat16(),
        "a.weight": wide.t(),
        "codes": wide.to(torch.float8_e4m3fn),
        "exponents": torch.arange(99, dtype=torch.uint8),
        "half": wide[3:5].half(),
        "none": torch.empty(0, 4),
        "step_count": torch.tensor(7),
        "kl_scale": torch.tensor(0.5, dtype=torch.float64),
        "rows": torch.arange(6, dtype=torch.int32).view(2, 3),
        "größe": wide[1],
    }


@pytest.mark.parametrize(("chunk", "small"), [(64 << 20, 1 << 20), (1000, 300), (1000, 0), (64, 64), (7, 3)])
def test_files_are_those_of_the_library_whatever_the_chunks(
    chunk: int, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_writer, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(state_writer, "SMALL_BYTES", small)
    monkeypatch.setattr(file_digests, "CHUNK_BYTES", chunk)
    save_file({name: one.contiguous() for name, one in tensors().items()}, tmp_path / "theirs", {"format": "pt"})
    expected = (tmp_path / "theirs").read_bytes()
    files = {"a.safetensors": tensors(), "none.safetensors": {}, "b.json": b"{}", "empty": b""}
    written = {file.name: file for file in write_files(tmp_path, files)}
    assert (tmp_path / "a.safetensors").read_bytes() == expected
    assert (tmp_path / "b.json").read_bytes() == b"{}" and (tmp_path / "empty").read_bytes() == b""
    parts = [expected[first : first + chunk] for first in range(0, len(expected), chunk)]
    digest = xxhash.xxh3_128(b"".join(xxhash.xxh3_128_digest(part) for part in parts)).hexdigest()
    assert written["a.safetensors"].digest == digest and written["a.safetensors"].size == len(expected)
    with hashing_threads() as pool:
        assert all(digest_file(tmp_path / name, pool) == file for name, file in written.items())
    entries = {name: file.entry() for name, file in written.items()}
    assert altered_files(tmp_path, entries) == []
    for place in (0, len(expected) // 2, len(expected) - 1):
        (tmp_path / "a.safetensors").write_bytes(expected[:place] + b"~" + expected[place + 1 :])
        assert altered_files(tmp_path, entries) == ["a.safetensors"]


def test_a_copy_keeps_the_state_while_the_live_one_moves_on(tmp_path: Path) -> None:
    """Also when the state grows, as with the first KV scales; and one block of memory serves all copies."""
    live = tensors()
    files = {"state.safetensors": live, "cursor.json": b"1"}
    writer = StateWriter(lambda: dict(files), torch.device("cpu"))
    writer.prepare()
    for number in range(3):
        assert writer.copy() is None
        before = {name: tensor.clone() for name, tensor in live.items()}
        for tensor in live.values():
            tensor.copy_(tensor.float() * 0.5 + 1)
        folder, expected = tmp_path / str(number), tmp_path / f"expected {number}"
        folder.mkdir(), expected.mkdir()
        writer.write(folder, copied=True)
        write_files(expected, {"state.safetensors": before})
        assert (folder / "state.safetensors").read_bytes() == (expected / "state.safetensors").read_bytes()
        (folder / "state.safetensors").unlink()
        (folder / "cursor.json").unlink()
        writer.write(folder, copied=False)
        assert (folder / "state.safetensors").read_bytes() != (expected / "state.safetensors").read_bytes()
        if number == 1:
            live["kv_scale"] = torch.ones(5)


def test_a_host_without_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_writer, "available_host_bytes", lambda: 1 << 20)
    live = {"state.safetensors": {"w": torch.ones(1 << 18)}}
    writer = StateWriter(lambda: live, torch.device("cpu"))
    writer.prepare()
    refusal = writer.copy()
    assert refusal == "a copy takes 0.00 GiB of host memory, 0.00 are free"
    live["state.safetensors"]["w"] = torch.ones(1 << 10)
    assert writer.copy() is None
