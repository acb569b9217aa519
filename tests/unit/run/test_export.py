"""Export: the weights of a run as they were saved, and no folder half written or written over."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoConfig

from octetrl.config.fp8_settings import Fp8Config
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config, load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights, take_published_codes
from octetrl.run.export import export_run
from octetrl.run.folder.layout import CHECKPOINTS
from octetrl.run.folder.output_folder import write_run_id
from octetrl.run.trained_model import weights_folder
from octetrl.shapes.presets import preset_config
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.trainer import checkpoint
from tests.saved_checkpoint import save_checkpoint

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 40}
SPEC = spec_from_config(preset_config("tiny") | SMALL)
WIDE = spec_from_config(
    preset_config("tiny")
    | {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 384}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 40}
)


def model(seed: int, spec: ModelSpec = SPEC) -> Decoder:
    decoder = Decoder(spec, precision_policy(spec, Fp8Config()), "train")
    decoder.random_init(seed)
    return decoder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with checkpoints of steps 1 and 2, whose weights differ."""
    (tmp_path / "run").mkdir()
    for step in (1, 2):
        save_checkpoint(
            tmp_path / "run" / CHECKPOINTS,
            step,
            {"optimizer.safetensors": {"exp_avg": torch.ones(3)}, "cursor.json": {"step": step}},
            write_more=lambda folder, step=step: save_weights(model(seed=step), folder),
        )
    return tmp_path / "run"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    loaded = model(seed=9)
    load_weights(loaded, folder)
    return dict(loaded.named_parameters())


def same(weights: dict[str, torch.Tensor], expected: Decoder) -> bool:
    return all(torch.equal(weights[name], parameter) for name, parameter in expected.named_parameters())


def test_a_run_exports_its_own_newest_checkpoint_or_the_one_that_is_named(run: Path, tmp_path: Path) -> None:
    """The export can be named wherever a model can, and has nothing of the training. An empty folder may be given."""
    (tmp_path / "first").mkdir()
    for asked, step, out in ((run, 2, "last"), (run / CHECKPOINTS / "step_000001", 1, "first")):
        assert export_run(str(asked), str(tmp_path / out)) == tmp_path / out == weights_folder(tmp_path / out)
        assert same(weights_of(tmp_path / out), model(seed=step))
        names = {path.name for path in (tmp_path / out).iterdir()}
        assert not {"optimizer.safetensors", "cursor.json", checkpoint.MANIFEST} & names
    # Checkpoints of steps 98 and 100 of another run lie in the folder.
    for step in (98, 100):
        save_checkpoint(run / CHECKPOINTS, step, {}, write_more=lambda f: save_weights(model(seed=5), f), run_id="old")
    with pytest.raises(UserError, match="checkpoints of 2 runs"):
        export_run(str(run), str(tmp_path / "out"))
    write_run_id(run, "new", {})
    save_checkpoint(run / CHECKPOINTS, 3, {}, write_more=lambda f: save_weights(model(seed=3), f), run_id="new")
    export_run(str(run), str(tmp_path / "out"))
    assert same(weights_of(tmp_path / "out"), model(seed=3))


@pytest.mark.parametrize(
    ("fp8", "value", "dtype"),
    [(False, math.nan, torch.bfloat16), (False, math.inf, torch.float16), (True, -math.inf, torch.float32)],
)
def test_weights_that_are_not_finite_are_refused(fp8: bool, value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    broken = model(seed=1, spec=WIDE if fp8 else SPEC).to(dtype)
    next(one for one in broken.parameters() if one.ndim == 2).data[0, 0] = value
    folder = tmp_path / "run" / CHECKPOINTS
    folder.parent.mkdir()
    save_checkpoint(folder, 1, {}, write_more=lambda to: save_weights(broken, to))
    with pytest.raises(UserError, match="is not finite everywhere"):
        export_run(str(tmp_path / "run"), str(tmp_path / "out"), fp8=fp8)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space left")])
def test_a_full_disk_leaves_what_was_there(
    was_there: bool, error: Exception, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    if was_there:
        target.mkdir()

    def copyfile(source: Path, to: Path) -> None:
        to.write_text("half")
        raise error

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    with pytest.raises(UserError, match=r"cannot write in .*No space left"):
        export_run(str(run), str(target))
    assert target.is_dir() == was_there and list(tmp_path.glob("out/*")) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out", "run"] if was_there else ["run"])


def test_nothing_is_written_over(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("the only copy")
    with pytest.raises(UserError, match="exists and is not empty; give a new folder"):
        export_run(str(run), str(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_an_altered_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    weights = run / CHECKPOINTS / "step_000002" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors was altered"):
        export_run(str(run), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("made", ["nothing", "run without a checkpoint"])
def test_what_is_no_run_is_refused(made: str, tmp_path: Path) -> None:
    if made != "nothing":
        (tmp_path / "run" / CHECKPOINTS).mkdir(parents=True)
    with pytest.raises(UserError, match=r"no checkpoint yet|does not exist; give a run folder"):
        export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def trained_wide(folder: Path) -> Decoder:
    """A model with FP8 codes, saved as the checkpoint of a run."""
    decoder = Decoder(WIDE, precision_policy(WIDE, Fp8Config(rollout=True, train=True)), "train")
    decoder.random_init(3)
    folder.mkdir()
    save_checkpoint(
        folder / CHECKPOINTS, 1, {"cursor.json": {"step": 1}}, write_more=lambda f: save_weights(decoder, f)
    )
    return decoder


def test_an_fp8_export_has_the_codes_that_the_run_had(tmp_path: Path) -> None:
    trained = trained_wide(tmp_path / "run")
    out = export_run(str(tmp_path / "run"), str(tmp_path / "out"), fp8=True)
    config = AutoConfig.from_pretrained(out)
    assert config.quantization_config["quant_method"] == "fp8" and load_spec(out) == WIDE
    again = Decoder(WIDE, trained.policy, "train")
    load_weights(again, out)
    assert take_published_codes(again, out) == len(dict(trained.float8_linears())) > 0
    for (name, mine), (_, read) in zip(trained.float8_linears(), again.float8_linears(), strict=True):
        assert torch.equal(mine.codes.view(torch.uint8), read.codes.view(torch.uint8)), name
        assert torch.equal(mine.scale, read.scale), name
    assert torch.equal(trained.embedding.weight, again.embedding.weight)
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]


def test_what_has_no_fp8_form_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--fp8: an adapter alone has no FP8 form; leave out --adapter"):
        export_run(str(run), str(tmp_path / "out"), adapter=True, fp8=True)
    with pytest.raises(UserError, match=r"whole blocks of 128, and this model has hidden size 32.*export BF16"):
        export_run(str(run), str(tmp_path / "out"), fp8=True)
    (tmp_path / "scorer").mkdir()
    save_checkpoint(
        tmp_path / "scorer" / CHECKPOINTS,
        1,
        {"config.json": hf_config(WIDE, scalar=True)},
        write_more=lambda folder: None,
    )
    with pytest.raises(UserError, match="is a reward model, which has no FP8 form; export it without --fp8"):
        export_run(str(tmp_path / "scorer"), str(tmp_path / "out"), fp8=True)
    assert not (tmp_path / "out").exists()
