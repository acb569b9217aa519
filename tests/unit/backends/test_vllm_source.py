"""vLLM's own source has the names that the adapter calls and that the double has. It is read, not imported.

It needs vLLM installed, or the folder of an unpacked wheel in OCTETRL_VLLM_SOURCE, and no GPU.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from octetrl.backends.vllm import calls, start
from octetrl.backends.vllm.settings import ON_RANKS
from octetrl.backends.vllm.weights import ATTENTION, LETTERS
from octetrl.config.backends import VLLM_VERSION, VOCABULARY_PAD
from tests.unit.backends.test_vllm_start import ENGINE_ARGUMENTS
from tests.unit.backends.test_vllm_start import ON_RANKS as ARGUMENTS_ON_RANKS
from tests.unit.backends.vllm_double import Sampling


def folder_of_vllm() -> Path | None:
    given, found = os.environ.get("OCTETRL_VLLM_SOURCE"), find_spec("vllm")
    if given:
        return Path(given) / "vllm"
    return None if found is None or found.origin is None else Path(found.origin).parent


VLLM = folder_of_vllm()
pytestmark = pytest.mark.skipif(VLLM is None, reason="vllm is not installed, and OCTETRL_VLLM_SOURCE names no folder")


@cache
def parsed(module: str) -> ast.Module:
    assert VLLM is not None
    path = VLLM.parent.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def class_of(module: str, name: str) -> ast.ClassDef:
    return next(one for one in parsed(module).body if isinstance(one, ast.ClassDef) and one.name == name)


def parameters(module: str, name: str) -> dict[str, list[str]]:
    """Names of the parameters of each method of a class."""
    return {
        one.name: [argument.arg for argument in (*one.args.args, *one.args.kwonlyargs)]
        for one in class_of(module, name).body
        if isinstance(one, ast.FunctionDef)
    }


def attributes(module: str, name: str) -> set[str]:
    """Fields of a class, its properties and methods, and what its methods set on self."""
    found = {one.target.id for one in class_of(module, name).body if isinstance(one, ast.AnnAssign | ast.AugAssign)
             if isinstance(one.target, ast.Name)}  # fmt: skip
    for one in ast.walk(class_of(module, name)):
        if isinstance(one, ast.FunctionDef):
            found.add(one.name)
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            found.add(one.attr)
    return found


def methods(protocol: type) -> Iterator[tuple[str, list[str]]]:
    for name, member in vars(protocol).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            yield name, list(inspect.signature(member).parameters)


def test_settings_and_limits_have_these_names() -> None:
    (found,) = re.findall(r"^__version__ = version = '(.*)'$", _text("_version.py"), re.MULTILINE)
    assert found == VLLM_VERSION
    assert attributes("vllm.engine.arg_utils", "EngineArgs") >= ENGINE_ARGUMENTS | ARGUMENTS_ON_RANKS
    own = {one.name for one in fields(Sampling)} | {"output_kind", "detokenize", "flat_logprobs"}
    assert own <= attributes("vllm.sampling_params", "SamplingParams")
    assert "DELTA" in ast.unparse(class_of("vllm.sampling_params", "RequestOutputKind"))
    text = ast.unparse(class_of("vllm.sampling_params", "SamplingParams"))
    assert "self.temperature > 2.0" in text and "0 < self.temperature < _MAX_TEMP" in text
    assert "_MAX_TEMP = 0.01" in ast.unparse(parsed("vllm.sampling_params"))
    names = attributes("vllm.config.compilation", "PassConfig")
    assert names >= set(ON_RANKS["compilation_config"]["pass_config"])


def _text(file: str) -> str:
    assert VLLM is not None
    return (VLLM / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("protocol", "module"),
    [
        (calls.LLMEngine, "vllm.v1.engine.llm_engine"),
        (calls.Scheduler, "vllm.v1.core.sched.scheduler"),
        (calls.BlockPool, "vllm.v1.core.block_pool"),
        (calls.RequestOutput, "vllm.outputs"),
        (calls.CompletionOutput, "vllm.outputs"),
        (calls.FlatLogprobs, "vllm.logprobs"),
    ],
)
def test_what_the_adapter_calls_is_there(protocol: type, module: str) -> None:
    theirs, own = parameters(module, protocol.__name__), attributes(module, protocol.__name__)
    for name, wanted in methods(protocol):
        assert name in theirs and wanted == theirs[name][: len(wanted)], f"{protocol.__name__}.{name}"
    properties = {name for name, member in vars(protocol).items() if isinstance(member, property)}
    assert properties <= own, f"{protocol.__name__} has no {properties - own}"


def test_what_start_imports_is_there() -> None:
    imports = [one for one in ast.walk(ast.parse(inspect.getsource(start))) if isinstance(one, ast.ImportFrom)]
    found = [one for one in imports if (one.module or "").partition(".")[0] == "vllm"]
    assert len(found) == 4
    for one in found:
        text = ast.unparse(parsed(one.module or ""))
        assert all(re.search(rf"\b{alias.name}\b", text) for alias in one.names), one.module
    for name in start.FORCED | start.FORCED_ON_RANKS | start.ENVIRONMENT:
        assert not name.startswith("VLLM_") or f'"{name}"' in _text("envs.py"), name


def test_attention_reads_its_scales_on_the_device_where_they_are_written() -> None:
    text = _text("model_executor/layers/attention/attention.py")
    for letter in LETTERS:
        assert f'layer.register_buffer("_{letter}_scale"' in text and f"layer._{letter}_scale_float = 1.0" in text
    for runner in ("v1/worker/gpu_model_runner.py", "v1/worker/gpu/model_runner.py"):  # `_clear_cache`
        assert "self.kv_caches" in _text(runner)
    text, flash = _text("model_executor/layers/attention/attention.py"), _text("v1/attention/backends/flash_attn.py")
    assert "self.attn_backend.get_name()" in text and f'return "{ATTENTION}"' in flash
    assert not re.search(r"_[kvq]_scale_float", flash) and "layer._k_scale.expand(descale_shape)" in flash
    assert re.search(r"_[kvq]_scale_float", _text("v1/attention/backends/flashinfer.py")), "it is refused for this"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_what_is_refused_of_a_family_is_what_its_model_lacks(family: str) -> None:
    text = ast.unparse(parsed(f"vllm.model_executor.models.{family}"))
    (output,) = re.findall(r"self.o_proj = RowParallelLinear\((.*)\)", text)
    assert "bias=False" in output
    if family == "qwen2":
        assert "self.head_dim = hidden_size // self.total_num_heads" in text
        assert "assert config.max_window_layers == config.num_hidden_layers" in text


def test_sleep_and_waking_are_as_the_adapter_takes_them() -> None:
    """The adapter wakes weights and cache one after the other, and never says that it may go on."""
    text = ast.unparse(class_of("vllm.v1.engine.core", "EngineCore"))
    assert "if not self.model_executor.is_sleeping:\n            self.resume_scheduler()" in text
    text = ast.unparse(class_of("vllm.v1.worker.gpu_worker", "Worker"))
    assert text.count("torch.accelerator.get_memory_info()") >= 2 and "Memory usage increased after sleeping." in text


# ---------------------------------------------------------------- ranks of a tensor-parallel vLLM


def test_ranks_share_a_group_the_vocabulary_and_all_logits() -> None:
    text = _text("distributed/parallel_state.py")
    assert "if not torch.distributed.is_initialized():" in text
    executor = ast.unparse(class_of("vllm.v1.executor.uniproc_executor", "ExecutorWithExternalLauncher"))
    assert "os.environ['RANK']" in executor and "os.environ['LOCAL_RANK']" in executor
    place = "vllm.model_executor.layers.vocab_parallel_embedding"
    assert f"DEFAULT_VOCAB_PADDING_SIZE = {VOCABULARY_PAD}" in ast.unparse(parsed(place))
    text = ast.unparse(class_of(place, "VocabParallelEmbedding"))
    assert "divide(self.num_embeddings_padded, self.tp_size)" in text
    assert "pad_vocab_size(self.org_vocab_size, self.padding_size)" in text
    # So that each samples the same tokens.
    text = ast.unparse(class_of("vllm.platforms.interface", "Platform"))
    assert re.search(r"def use_all_gather\(cls\).*?return True", text, re.DOTALL)
    assert "use_all_gather" not in _text("platforms/cuda.py")
    # The adapter aborts one request at a time, because the order of a set differs between ranks.
    assert "request_ids = set(request_ids)" in ast.unparse(class_of("vllm.v1.core.sched.scheduler", "Scheduler"))
