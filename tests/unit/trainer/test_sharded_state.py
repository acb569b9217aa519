"""State that several workers wrote: any other number of workers reads the same rows, and export the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config, spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.models.row_shards import RowShards
from octetrl.run.export import export_run
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError
from octetrl.trainer import checkpoint
from octetrl.trainer.optimizer_states import meta_moment, named_tensors
from octetrl.trainer.sharded_state import (
    OwnedState,
    own_optimizer,
    own_weights,
    read_optimizer,
    read_weights,
    shard_files,
)
from octetrl.trainer.shards import Share, cut_rows
from octetrl.trainer.state_writer import Content, write_files
from tests.saved_checkpoint import save_checkpoint

SHAPES = {"wide.weight": (300, 96), "norm.weight": (77,), "tall.weight": (1000, 5), "one.bias": (1,)}


@dataclass(frozen=True)
class Slot:
    name: str
    parameter: Tensor
    first: int


def whole_state(states: str, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments and masters of random bytes, as one worker has them."""
    chance = torch.Generator().manual_seed(5)
    state = {"step_count": torch.tensor(7)}
    for name, parameter in parameters.items():
        for kind in ("exp_avg", "exp_avg_sq"):
            for key, like in named_tensors(kind, name, meta_moment(parameter, states)):  # type: ignore[arg-type]
                state[key] = torch.randint(0, 100, like.shape, generator=chance).to(like.dtype)
        state[f"master/{name}"] = torch.randn(parameter.shape, generator=chance)
    return state


def owned(whole: Mapping[str, Tensor], parameters: Mapping[str, Tensor], share: Share) -> OwnedState:
    """A worker's rows of the weights and of the state."""
    table = cut_rows([parameter.shape for parameter in parameters.values()], share.count)
    slots, weights, state = [], {}, {"step_count": whole["step_count"]}
    for (name, parameter), cut in zip(parameters.items(), table, strict=True):
        start, stop = cut[share.rank]
        if start == stop:
            continue
        width = parameter[0].numel()
        slots.append(Slot(name, parameter, start * width))
        weights[name] = parameter[start:stop]
        for key, tensor in whole.items():
            kind, _, of = key.partition("/")
            if of == name:
                is_blocks = kind.endswith("_exponents")
                first, end = (start * width // 128, -(-stop * width // 128)) if is_blocks else (start, stop)
                state[key] = tensor[first:end]
    return OwnedState(weights, state, slots, share)


def write(folder: Path, whole: Mapping[str, Tensor], parameters: Mapping[str, Tensor], count: int) -> Path:
    files: dict[str, Content] = {}
    for rank in range(count):
        files |= shard_files(owned(whole, parameters, Share(rank, count)))
    assert len(files) == 2 * count
    return save_checkpoint(folder, 1, {}, write_more=lambda place: write_files(place, files))


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == one.dtype and torch.equal(found[name], one) for name, one in expected.items()
    )


@pytest.fixture
def parameters() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=chance).bfloat16() for name, shape in SHAPES.items()}


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_any_number_of_workers_reads_what_another_wrote(
    states: str, count: int, parameters: dict[str, Tensor], tmp_path: Path
) -> None:
    whole = whole_state(states, parameters)
    path = write(tmp_path, whole, parameters, count)
    shards = RowShards.find(checkpoint.load(path).folder)
    assert shards is not None
    for share in (Share(rank, readers) for readers in (1, 2, 3, 4) for rank in range(readers)):
        own = owned(whole, parameters, share)
        blank = replace(own, optimizer={name: torch.zeros_like(tensor) for name, tensor in own.optimizer.items()})
        assert same(read_optimizer(shards, blank), own.optimizer)
        assert same(read_weights(shards, own), own.weights)
        assert same(own_optimizer(whole, blank), own.optimizer)  # of a checkpoint with whole tensors
        assert same(own_weights(parameters, own), own.weights)
    other = Slot("none.weight", torch.ones(2), 0)
    with pytest.raises(UserError, match=r"another model or optimizer .*'exp_avg/none.weight' is missing"):
        read_optimizer(shards, OwnedState({}, {"exp_avg/none.weight": torch.ones(2)}, [other], Share()))
    other = Slot("norm.weight", torch.ones(78), 0)
    with pytest.raises(UserError, match=r"'weight/norm.weight' is \[77\], not \[78\]"):
        read_weights(shards, OwnedState({"norm.weight": torch.ones(78)}, {}, [other], Share()))
    shards.close()


def test_a_worker_whose_files_are_missing_is_one_line(parameters: dict[str, Tensor], tmp_path: Path) -> None:
    path = write(tmp_path, whole_state("8bit", parameters), parameters, 3)
    index = json.loads((path / "state-00002-of-00003.json").read_bytes())
    name = next(iter(index))
    (path / "state-00002-of-00003.json").unlink()
    with pytest.raises(UserError, match=r"does not have the state of all workers .*, but state-00001-of-00003.json, "):
        RowShards.find(path)
    (path / "state-00002-of-00003.json").write_text(json.dumps({key: one for key, one in index.items() if key != name}))
    shards = RowShards.find(path)
    assert shards is not None
    with pytest.raises(UserError, match=f"no worker's file has row {index[name]['start']} of '{name}'"):
        shards.rows(name)
    (path / "state-00002-of-00003.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="does not say which rows its tensors are"):
        RowShards.find(path)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest) -> Decoder:
    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 160, "vocab_size": 300}
    spec = spec_from_config(preset_config("tiny") | small | {"tie_word_embeddings": request.param})
    decoder = Decoder(spec, precision_policy(spec, Fp8Config()), "train", dtype=torch.bfloat16)
    decoder.random_init(3)
    return decoder


def files_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    return ((path.name, path.read_bytes()) for path in sorted(folder.iterdir()))


def test_weights_of_several_workers_load_and_export_as_the_models(model: Decoder, tmp_path: Path) -> None:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    path = write(tmp_path / "checkpoints", whole_state("8bit", parameters), parameters, 3)
    (path / "config.json").write_text(json.dumps(hf_config(model.spec, "bfloat16")))
    (path / checkpoint.MANIFEST).unlink()
    loaded = Decoder(model.spec, model.policy, "train", dtype=torch.bfloat16)
    load_weights(loaded, path)
    assert same({name: one.detach() for name, one in loaded.named_parameters()}, parameters)
    save_weights(model, tmp_path / "expected")
    export_run(str(path), str(tmp_path / "out"))
    assert dict(files_of(tmp_path / "out")) == dict(files_of(tmp_path / "expected"))
    other = spec_from_config(preset_config("tiny") | {"vocab_size": 300})
    with pytest.raises(UserError, match="does not hold the tensors that its config"):
        load_weights(Decoder(other, precision_policy(other, Fp8Config()), "train"), path)
