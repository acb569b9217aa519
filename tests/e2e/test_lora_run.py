"""Runs with adapters: both sides see one policy, a checkpoint holds the adapter alone, and it can be gone on from,
evaluated, generated from, exported merged or as it is, and begun from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec
from octetrl.models.hf_weights import load_weights
from octetrl.models.peft_adapters import load_adapter, read_adapter_config
from octetrl.run.build import build_run, full_precision
from octetrl.run.evaluate import evaluate_checkpoint
from octetrl.run.export import export_run
from octetrl.run.loop import one_step, train
from octetrl.system.errors import UserError
from octetrl.trainer import checkpoint
from tests.e2e.tiny_run import read_lines, run, timeless, tiny_recipe
from tests.house.tree import REPO

pytestmark = pytest.mark.usefixtures("rewards_here")

LORA: dict[str, Any] = {
    "model.lora": {"rank": 4, "alpha": 16.0},
    "trainer.optimizer.lr": 2e-2,
    "algorithm.kl_coefficient": 0.01,
}
FILES = {"adapter_config.json", "adapter_model.safetensors"}
Finished = Callable[[str], Path]


def of(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines]


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The folder of a finished run of four steps, by precision. To be read, not written."""

    @cache
    def run_folder(precision: str) -> Path:
        folder = tmp_path_factory.mktemp("lora") / precision
        run(model, folder, LORA | {"precision": precision, "checkpoint.every": 1, "steps": 4})
        return folder

    return run_folder


def adapter_of(folder: Path, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(folder / f"checkpoints/step_{step:06d}/adapter_model.safetensors")


# --- both sides see one policy ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_both_sides_are_equal_to_the_bit_in_every_step(precision: str, adapted: Finished) -> None:
    folder = adapted(precision)
    lines = read_lines(folder / "metrics.jsonl")
    assert of(lines, "mismatch/max_abs_diff") == [0.0] * 4
    assert of(lines, "mismatch/unequal_tokens") == [0.0] * 4
    assert precision == "fp8_full" or of(lines, "kl")[0] == 0.0, "the reference is what the run began with"
    assert all(value != 0.0 for value in of(lines, "kl")[1:]), "the policy moved"
    assert all(value > 0 for value in of(lines, "grad_norm"))
    assert all(tensor.any() for tensor in adapter_of(folder).values())


def test_fp8_in_the_rollout_alone_has_a_mismatch(model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", LORA | {"precision": "fp8_rollout", "steps": 2})
    assert all(0.001 < value < 0.1 for value in of(lines, "mismatch/max_abs_diff"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model.lora": {"rank": 1, "targets": ["k_proj", "gate_proj"]}},
        {"fp8.ignore": ["*.down_proj"], "trainer.minibatches": 2},
        {"trainer.activation_checkpointing": "layer", "trainer.optimizer.master": "stochastic_rounding"},
        {"engine.prefill_chunk": 16, "engine.max_batch": 3, "engine.kv_cache_tokens": 256},
    ],
)
def test_no_mismatch_whatever_the_options(changes: dict[str, Any], model: Path, tmp_path: Path) -> None:
    lines = run(model, tmp_path / "run", LORA | {"steps": 2} | changes)
    assert of(lines, "mismatch/unequal_tokens") == [0.0] * 2


def test_the_optimizer_holds_the_adapters_alone_and_nothing_else_changes(model: Path, tmp_path: Path) -> None:
    live = build_run(tiny_recipe(model, tmp_path / "run", LORA | {"fp8.kv_cache": "dynamic"}))
    try:
        worker = live.workers.worker
        assert all(".lora." in slot.name for slot in worker.trainer.optimizer.slots)
        assert len(worker.trainer.optimizer.slots) == 4 * 2
        reference = worker.trainer.reference.model
        assert reference is not None
        frozen = {name: p for name, p in worker.trainer_model.named_parameters() if ".lora." not in name}
        for name, parameter in frozen.items():
            assert reference.get_parameter(name) is parameter is worker.engine_model.get_parameter(name), name
        codes = {name: linear.codes for name, linear in worker.trainer_model.float8_linears()}
        before = {name: tensor.clone() for name, tensor in (frozen | codes).items()}
        digests = set()
        for step in (1, 2, 3):
            one_step(live, step)
            digests.add(live.workers.publish(step).weights_digest)
        assert len(digests) == 3
        for name, tensor in (frozen | codes).items():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
        for name, adapter in worker.engine_model.adapters():
            theirs = dict(worker.trainer_model.adapters())[name]
            assert adapter.a is theirs.a and adapter.b is theirs.b and theirs.b.any()
            own = dict(reference.adapters())[name]
            assert own.b.data_ptr() != theirs.b.data_ptr() and not own.b.any()
    finally:
        live.close()


def test_sft_learns_with_adapters(model: Path, tmp_path: Path) -> None:
    examples = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(9)]
    (tmp_path / "worked.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    sft = {
        "precision": "fp8",
        "model.lora": {"rank": 8},
        "algorithm": {"name": "sft", "conversations": str(tmp_path / "worked.jsonl"), "batch_size": 4},
        "trainer.optimizer.lr": 3e-2,
        "steps": 20,
    }
    lines = run(model, tmp_path / "run", sft)
    assert of(lines, "loss")[-1] < 0.9 * of(lines, "loss")[0]


# --- checkpoints --------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_adapter_and_not_the_model(adapted: Finished, model: Path) -> None:
    saved = checkpoint.load(adapted("fp8_full") / "checkpoints" / "step_000004")
    assert set(saved.files) >= FILES and not any(name.startswith("model") for name in saved.files)
    lora, base, _ = read_adapter_config(saved.folder)
    assert (lora.rank, lora.alpha, base) == (4, 16.0, str(model))
    names = {name.split("/", 1)[-1] for name in saved.tensors("optimizer.safetensors")}
    assert all(".lora." in name or name == "step_count" for name in names)


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_resumed_it_is_the_run_that_was_never_cut_off(
    precision: str, adapted: Finished, model: Path, tmp_path: Path
) -> None:
    whole, folder = adapted(precision), tmp_path / "run"
    changes = LORA | {"precision": precision, "checkpoint.every": 1}
    run(model, folder, changes | {"steps": 2})
    train(tiny_recipe(model, folder, changes | {"steps": 4}), resume=True)
    assert timeless(read_lines(folder / "metrics.jsonl")) == timeless(read_lines(whole / "metrics.jsonl"))
    last = "checkpoints/step_000004"
    names = sorted(path.name for path in (whole / last).iterdir())
    assert names == sorted(path.name for path in (folder / last).iterdir())
    for name in names:
        if name not in ("manifest.json",):
            assert (folder / last / name).read_bytes() == (whole / last / name).read_bytes(), name


def test_a_reference_that_moves_is_adapters_alone_and_survives_a_resume(model: Path, tmp_path: Path) -> None:
    changes = LORA | {"precision": "fp8", "algorithm.reference_every": 2, "checkpoint.every": 3}
    expected = run(model, tmp_path / "whole", changes | {"steps": 4})
    assert of(expected, "kl")[2] == 0.0 and all(of(expected, "kl")[at] != 0.0 for at in (1, 3))
    run(model, tmp_path / "run", changes | {"steps": 3})
    train(tiny_recipe(model, tmp_path / "run", changes | {"steps": 4}), resume=True)
    assert timeless(read_lines(tmp_path / "run" / "metrics.jsonl")) == timeless(expected)
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / "step_000003").tensors("reference.safetensors")
    assert len(saved) == 4 * 2 and all(".lora." in name for name in saved)


def test_it_can_be_begun_from_an_adapter(adapted: Finished, model: Path, tmp_path: Path) -> None:
    first = adapted("bf16") / "checkpoints" / "step_000004"
    lora = LORA["model.lora"] | {"path": str(first)}
    lines = run(model, tmp_path / "run", LORA | {"precision": "bf16", "model.lora": lora, "steps": 2})
    assert of(lines, "kl")[0] == 0.0 and of(lines, "kl")[1] != 0.0
    before, after = adapter_of(adapted("bf16")), adapter_of(tmp_path / "run", 2)
    assert (
        0
        < (
            after["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].float()
            - before["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"].float()
        )
        .abs()
        .max()
        < 0.1
    )
    with pytest.raises(UserError, match=r"model\.lora\.rank: 2, but the adapter in .* has 4; give it that"):
        build_run(tiny_recipe(model, tmp_path / "other", LORA | {"model.lora": lora | {"rank": 2}}))


# --- what becomes of it -------------------------------------------------------------------------------------


def hidden_of(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    from octetrl.layers.context import PackedContext

    spec = load_spec(folder)
    lora = None if adapter is None else read_adapter_config(adapter).lora
    model = Decoder(spec, full_precision(spec), "train", lora=lora)
    load_weights(model, folder)
    if adapter is not None:
        load_adapter(model, adapter)
    tokens = torch.arange(5, 25)
    states: torch.Tensor = model(tokens, torch.arange(20), PackedContext(torch.tensor([0, 20], dtype=torch.int32), 20))
    return states.detach().double()


def test_exported_it_is_merged_and_stands_alone(adapted: Finished, model: Path, tmp_path: Path) -> None:
    out = export_run(str(adapted("fp8_full")), str(tmp_path / "out"))
    assert not FILES & {path.name for path in out.iterdir()}
    apart = hidden_of(model, adapted("fp8_full") / "checkpoints" / "step_000004")
    base, merged = hidden_of(model), hidden_of(out)
    moved = float((apart - base).norm() / base.norm())
    assert float((merged - apart).norm() / base.norm()) < min(0.02, moved / 3)
    lines = run(out, tmp_path / "run", {"precision": "bf16", "steps": 1})
    assert of(lines, "mismatch/max_abs_diff") == [0.0]


def test_exported_as_it_is_it_is_a_peft_folder(
    adapted: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapted("bf16")
    assert run_command(["export", str(folder), "--to", str(tmp_path / "out"), "--adapter"]) == 0
    assert set(path.name for path in (tmp_path / "out").iterdir()) >= FILES | {"tokenizer_config.json"}
    weights = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    assert weights == (folder / "checkpoints/step_000004/adapter_model.safetensors").read_bytes()
    assert not (tmp_path / "out" / "optimizer.safetensors").exists()
    with pytest.raises(UserError, match="exists and is not empty"):
        export_run(str(folder), str(tmp_path / "out"))
    assert "PEFT" not in capsys.readouterr().err
    of_experts = tmp_path / "experts"
    shutil.copytree(folder / "checkpoints" / "step_000004", of_experts)
    (of_experts / "manifest.json").unlink()
    config = of_experts / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"octetrl_experts": True}))
    assert run_command(["export", str(of_experts), "--to", str(tmp_path / "new"), "--adapter"]) == 0
    assert "PEFT with transformers 5 leaves out the adapters of experts" in capsys.readouterr().err


def test_adapters_without_base_and_runs_without_adapters_are_not_exported(
    adapted: Finished, tmp_path: Path, finished: Finished
) -> None:
    shutil.copytree(adapted("bf16") / "checkpoints" / "step_000004", tmp_path / "adapter")
    (tmp_path / "adapter" / "manifest.json").unlink()
    file = tmp_path / "adapter" / "adapter_config.json"
    for base, what in (
        (None, "names no base model"),
        ("gone/away", "beside 'gone/away', but that folder has no model now"),
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
        with pytest.raises(UserError, match=what):
            export_run(str(tmp_path / "adapter"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"--adapter: .* was trained without model\.lora"):
        export_run(str(finished("bf16")), str(tmp_path / "out"), adapter=True)


def test_it_is_evaluated_and_generated_from(
    adapted: Finished, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = adapted("bf16")
    report = evaluate_checkpoint(str(folder), tiny_recipe(model, tmp_path / "x", {"precision": "bf16"}))
    assert report.accuracy is not None and report.tasks == 4
    texts = []
    for target in (folder, model):
        command = ["generate", str(target), "-p", "1 + 2 =", "--max-new-tokens", "24", "--temperature", "0"]
        assert run_command([*command, "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


# --- the recipe ---------------------------------------------------------------------------------------------


@pytest.fixture
def demo(model: Path, tmp_path: Path) -> Path:
    """The shipped recipe for adapters, of a tiny model and for two steps."""
    recipe = tmp_path / "grpo_lora.yaml"
    recipe.write_text(
        f"extends: {REPO / 'recipes' / 'demo_grpo_lora.yaml'}\nmodel: {{path: {model}, context_length: 128}}\n"
        f"rollout: {{prompts_per_step: 2, group_size: 4, max_prompt_tokens: 100, max_new_tokens: 12}}\n"
        f"engine: {{page_size: 16}}\nenvironment: {{reward: 'tests.e2e.tiny_rewards:by_text', train_size: 64,"
        f" eval_size: 4}}\nevaluation: {{every: 0}}\ncheckpoint: {{every: 0, keep_best: 0}}\n"
        f"mismatch: {{fail_on_difference: true}}\n"
        f"logging: {{console: quiet, tensorboard: false}}\nsteps: 2\noutput_dir: {tmp_path / 'run'}\n"
    )
    return recipe


def test_the_shipped_recipe_is_sound_and_runs(demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["check", str(demo)]) == 0
    shown = capsys.readouterr().out
    assert "LoRA" in shown and "no problems" in shown and "adapters" in shown
    assert run_command(["train", str(demo)]) == 0
    assert of(read_lines(tmp_path / "run" / "metrics.jsonl"), "mismatch/unequal_tokens") == [0.0] * 2
    resolved = load_recipe(tmp_path / "run" / "config.yaml")
    assert resolved.model.lora is not None
    assert load_recipe(tmp_path / "run" / "config.yaml", ["model.lora="]).model.lora is None
