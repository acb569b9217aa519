"""How vLLM is started: its environment, its settings, its room beside the trainer, and what it refuses.

`vllm` is a package of this test (`installed`), with the names that start.py imports. Its constructors check the names
of settings against those of vLLM 0.25.1.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.backends.vllm.calls import block_pool_of
from octetrl.backends.vllm.settings import cache_bytes_per_token, cache_tokens, check_room, engine_arguments
from octetrl.backends.vllm.start import start_vllm, write_model
from octetrl.config.backends import RESERVE, vllm_weight_bytes
from octetrl.config.schema import EngineConfig, Recipe
from octetrl.config.worker_memory import sent_bytes
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.layers.tensor_group import OneWorker
from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.system.errors import UserError
from octetrl.workers.build_engine import build_vllm
from tests.grid import smallest_shape
from tests.parity.sides import PRECISIONS
from tests.unit.backends.setting import CONTEXT_LENGTH, SPEC, Letters
from tests.unit.backends.vllm_double import VllmDouble, installed_vllm, tensors_of
from tests.unit.config.test_validate import recipe_with

GIB = 1 << 30
SEEDS = (random.seed, np.random.seed, torch.manual_seed)
CONFIG = EngineConfig(page_size=16, max_batch=4, prefill_chunk=64)
# of `EngineArgs` in vllm/engine/arg_utils.py, those that a recipe decides
ENGINE_ARGUMENTS = {
    *("model", "load_format", "skip_tokenizer_init", "generation_config", "dtype", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "block_size", "enable_prefix_caching", "kv_cache_dtype", "kv_cache_memory_bytes"),
    *("gpu_memory_utilization", "logprobs_mode", "enable_sleep_mode", "disable_log_stats", "enforce_eager", "seed"),
}
ON_RANKS = {
    *("tensor_parallel_size", "distributed_executor_backend", "disable_custom_all_reduce", "compilation_config")
}  # those of a tensor-parallel vLLM


def policy_of(precision: str) -> PrecisionPolicy:
    return precision_policy(SPEC, PRECISIONS[precision])


class Kind(Enum):
    """`RequestOutputKind`."""

    CUMULATIVE = 0
    DELTA = 1


class Installed:
    """What the test's vllm was asked for."""

    arguments: SimpleNamespace
    config: dict[str, Any]  # the model folder's
    environment: dict[str, str]  # when vllm was imported
    refuses: Exception | None = None

    def start(self, arguments: SimpleNamespace, *, enable_multiprocessing: bool) -> VllmDouble:
        """`LLMEngine.from_engine_args`. vLLM seeds the generators and sets the precision of products."""
        assert not enable_multiprocessing
        self.arguments = arguments
        self.environment = dict(os.environ)
        self.config = json.loads((Path(arguments.model) / "config.json").read_text())
        for seed in SEEDS:
            seed(0)  # type: ignore[operator]
        torch.set_float32_matmul_precision("high")
        if self.refuses is not None:
            raise self.refuses
        policy = policy_of("fp8_full" if arguments.kv_cache_dtype == "fp8_e4m3" else "bf16")
        if hasattr(arguments, "tensor_parallel_size"):
            return VllmDouble(torch.nn.Module(), vocab_size=90)
        ours = dict(Decoder(SPEC, policy, "train", device="meta", backend="emulated").named_parameters())
        pages = arguments.kv_cache_memory_bytes // arguments.block_size // cache_bytes_per_token(SPEC, policy) - 1
        return VllmDouble(tensors_of(SPEC, policy, ours), vocab_size=90, num_pages=pages)  # type: ignore[arg-type]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    found = Installed()

    def engine_args(**given: Any) -> SimpleNamespace:
        assert set(given) - ON_RANKS == ENGINE_ARGUMENTS and ON_RANKS & set(given) in (set(), ON_RANKS)
        return SimpleNamespace(**given)

    contents = {
        "vllm": {"EngineArgs": engine_args, "SamplingParams": lambda **given: given},
        "vllm.inputs": {},
        "vllm.inputs.engine": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": ids}},
        "vllm.sampling_params": {"RequestOutputKind": Kind},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.llm_engine": {"LLMEngine": SimpleNamespace(from_engine_args=found.start)},
    }
    with installed_vllm(monkeypatch, contents):
        yield found


def arguments_of(precision: str, folder: Path) -> dict[str, Any]:
    policy = policy_of(precision)
    write_model({"model_type": "qwen3"}, folder)
    how: dict[str, Any] = {"folder": str(folder), "context_length": 64, "cache_bytes": 1 << 16}
    return dict(engine_arguments(CONFIG, policy, **how))


# ---------------------------------------------------------------- starting


def test_weights_keep_their_scales_and_the_core_runs_in_this_process(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", "1")  # would requantise the weights
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_DEEP_GEMM_WARMUP", raising=False)
    start_vllm(arguments_of("bf16", tmp_path))
    found = installed.environment
    assert found["VLLM_USE_DEEP_GEMM_E8M0"] == "0" and found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert found["VLLM_LOGGING_LEVEL"] == "DEBUG", "the user's"
    assert found["VLLM_DEEP_GEMM_WARMUP"] == "skip" and found["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


@pytest.mark.parametrize("given", [None, "/given"])
def test_workers_have_folders_of_compiled_graphs_of_their_own(
    given: str | None, installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM writes their list without a lock."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_CACHE_ROOT", given)
    start_vllm(arguments_of("bf16", tmp_path))
    assert installed.environment.get("VLLM_CACHE_ROOT") == given, "of one worker it is vLLM's"
    start_vllm(arguments_of("bf16", tmp_path), 2)
    assert installed.environment["VLLM_CACHE_ROOT"] == f"{given or '/caches/vllm'}/worker_2"


def test_a_sibling_asks_for_its_new_tokens_and_their_log_probs(installed: Installed, tmp_path: Path) -> None:
    started = start_vllm(arguments_of("bf16", tmp_path))
    asked = {"output_kind": Kind.DELTA, "detokenize": False, "flat_logprobs": True}
    assert started.sampling(seed=5, logprobs=0) == {**asked, "seed": 5, "logprobs": 0}
    assert started.prompt([4, 5]) == {"type": "token", "prompt_token_ids": [4, 5]}


@pytest.mark.parametrize("refuses", [None, ValueError("the model's\n  heads do not divide")])
def test_the_trainers_process_keeps_its_state(refuses: Exception | None, installed: Installed, tmp_path: Path) -> None:
    installed.refuses = refuses
    for seed in SEEDS:
        seed(5)  # type: ignore[operator]
    torch.set_float32_matmul_precision("highest")
    states = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]
    if refuses is None:
        start_vllm(arguments_of("bf16", tmp_path))
    else:
        with pytest.raises(UserError, match=r"vLLM refuses this model or its settings: the model's heads do not div"):
            start_vllm(arguments_of("bf16", tmp_path))
    after = [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]
    assert after == states and torch.get_float32_matmul_precision() == "highest"


OOM, WRAPPED = torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA out of memory while warming up")
WRAPPED.__cause__ = OOM


@pytest.mark.parametrize(
    ("refuses", "expected"),
    [
        (AssertionError("window\n layers"), r"vLLM did not start \(AssertionError: window layers\); its lines above"),
        (RuntimeError("Engine core"), r"vLLM did not start \(RuntimeError: Engine core\)"),
        (None, r"vLLM did not start \(ModuleNotFoundError: "),
        (
            OOM,
            r"vLLM's weights, graphs and cache do not fit beside the trainer \(CUDA out of memory\); lower engine.kv",
        ),
        (WRAPPED, r"vLLM's weights, graphs and cache do not fit beside the trainer \(CUDA out of memory while"),
    ],
)
def test_any_error_of_its_start_is_one_line(
    refuses: Exception | None, expected: str, installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.refuses = refuses
    if refuses is None:
        monkeypatch.setitem(sys.modules, "vllm.v1.engine.llm_engine", None)
    with pytest.raises(UserError, match=expected) as error:
        start_vllm(arguments_of("bf16", tmp_path))
    assert "\n" not in str(error.value)


def test_another_version_is_refused_before_anything_starts(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octetrl.config.backends.version", lambda _: "0.26.0")
    with pytest.raises(UserError, match=r"vllm 0.26.0 is installed, and only 0.25.1 was tried"):
        start_vllm(arguments_of("bf16", tmp_path))
    assert not hasattr(installed, "arguments")


class TwoRanks(OneWorker):
    """The second of two workers on one machine. The first one answers what the test gives it."""

    rank, size = 1, 2
    has_joined = False
    most_tokens = 1 << 40  # of the first's cache

    def __init__(self, first: Any = None) -> None:
        self.commands, self.first = self, first

    def join_default_group(self) -> None:
        assert "vllm" in sys.modules and os.environ["RANK"] == "1"
        self.has_joined = True

    def gather_records(self, record: Any, phase: str) -> list[Any]:
        return [record if record == socket.gethostname() else self.first, record]

    def maximum(self, values: torch.Tensor, phase: str) -> torch.Tensor:
        return values.clamp(min=-self.most_tokens)


def test_a_rank_starts_by_the_external_launcher_in_a_group_that_was_made_before(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER", "VLLM_DISTRIBUTED_USE_SPLIT_GROUP")
    for name in forced:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    write_model({}, tmp_path)
    how: dict[str, Any] = {"folder": str(tmp_path), "context_length": 64, "cache_bytes": 1 << 16}
    ranks = TwoRanks()
    start_vllm(engine_arguments(CONFIG, policy_of("bf16"), ranks=2, **how), 3, ranks)
    found, arguments = installed.environment, installed.arguments
    assert ranks.has_joined and arguments.distributed_executor_backend == "external_launcher"
    assert arguments.tensor_parallel_size == 2 and arguments.disable_custom_all_reduce
    assert not any(arguments.compilation_config["pass_config"].values())
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["1", "2", "5"]
    assert [found[name] for name in forced] == ["0"] * 3 and found["VLLM_CACHE_ROOT"].endswith("/worker_3")


def test_a_rank_does_not_start_where_another_has_no_vllm(installed: Installed, tmp_path: Path) -> None:
    ranks = TwoRanks(["engine.backend: vllm is not installed", True])
    with pytest.raises(UserError, match="vllm is not installed"):
        start_vllm(arguments_of("bf16", tmp_path), 3, ranks)
    assert not ranks.has_joined and not hasattr(installed, "arguments")


# ---------------------------------------------------------------- settings


def test_settings_that_decide_what_is_computed(tmp_path: Path) -> None:
    plain, full = (arguments_of(precision, tmp_path) for precision in ("bf16", "fp8_full"))
    assert plain["kv_cache_dtype"] == "auto" and full["kv_cache_dtype"] == "fp8_e4m3"
    assert plain["logprobs_mode"] == "processed_logprobs", "after the temperature"
    assert plain["load_format"] == "dummy" and plain["skip_tokenizer_init"] and plain["enable_sleep_mode"]
    assert plain["generation_config"] == "vllm", "else its defaults would change sampling"
    assert (plain["block_size"], plain["max_num_seqs"], plain["max_num_batched_tokens"]) == (16, 4, 64)
    assert plain["enable_prefix_caching"] and plain["max_model_len"] == 64
    config = CONFIG.model_copy(update={"prefix_cache": "off", "max_batch": 128})
    how: dict[str, Any] = {"folder": "f", "context_length": 64, "cache_bytes": 1}
    other = engine_arguments(config, policy_of("bf16"), **how)
    assert not other["enable_prefix_caching"] and other["max_num_batched_tokens"] == 128


def test_the_cache_gets_a_share_of_what_the_others_leave() -> None:
    for precision, per_value in (("bf16", 2), ("fp8_full", 1)):
        policy = policy_of(precision)
        per_token = cache_bytes_per_token(SPEC, policy)
        shape = hf_config(SPEC)
        values = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
        assert per_token == per_value * values
        weights = vllm_weight_bytes(SPEC, policy.precisions().fp8_rollout)
        taken = 10 * GIB
        tokens = cache_tokens(CONFIG, taken, SPEC, policy, taken + weights + RESERVE + 1000 * per_token)
        assert tokens == int(1000 * CONFIG.kv_memory_fraction) // 16 * 16
        assert cache_tokens(CONFIG, taken, SPEC, policy, taken) <= 0
    assert cache_tokens(CONFIG.model_copy(update={"kv_cache_tokens": 100}), 0, SPEC, policy, 0) == 96, "whole pages"


def test_a_cache_without_room_for_one_context_is_refused() -> None:
    check_room(64, 64, 0, GIB)
    with pytest.raises(UserError, match=r"12.0 GiB of 13.0 leave room for 0 tokens of its KV cache, less than") as no:
        check_room(-500, 64, 12 * GIB, 13 * GIB)
    assert "trainer.optimizer.offload=true" in str(no.value) and "\n" not in str(no.value)


# ---------------------------------------------------------------- a worker's backend


def device_with(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """A GPU of 40 GiB, of which the process has taken all but `free` bytes."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=40 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 40 * GIB))


def vllm_recipe(*changes: tuple[str, Any]) -> Recipe:
    recipe = recipe_with(("engine.backend", "vllm"), ("engine.page_size", 16), *changes)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"context_length": CONTEXT_LENGTH})})


def built(recipe: Recipe, precision: str, device: str = "cuda", *, trains: bool = False) -> VllmBackend:
    policy = policy_of(precision)
    where = torch.device(device)
    return build_vllm(recipe, SPEC, policy=policy, tokenizer=Letters(), device=where, trains=trains)


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_a_backend_is_started_with_the_model_and_the_room_that_is_left(
    precision: str, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_with(monkeypatch, free=8 * GIB)
    backend = built(vllm_recipe(), precision)
    policy, arguments = policy_of(precision), installed.arguments
    assert ("quantization_config" in installed.config) == (precision == "fp8_full")
    assert installed.config["num_hidden_layers"] == SPEC.num_layers and not Path(arguments.model).exists()
    left = 8 * GIB - vllm_weight_bytes(SPEC, policy.precisions().fp8_rollout) - RESERVE
    share = arguments.kv_cache_memory_bytes / left
    assert share == pytest.approx(EngineConfig().kv_memory_fraction, rel=1e-3)
    assert backend._vllm.engine.awake == set(), "it sleeps until the first weights"  # type: ignore[attr-defined]
    given = built(vllm_recipe(("engine.kv_cache_tokens", 8192)), precision)
    assert block_pool_of(given._vllm.engine).num_gpu_blocks == 8192 // 16 + 1, "one is never used"
    # what a trainer will allocate later is taken off
    built(vllm_recipe(), precision, trains=True)
    beside_trainer = installed.arguments.kv_cache_memory_bytes
    assert beside_trainer < arguments.kv_cache_memory_bytes
    # of several trainers each owns a part of the states
    built(vllm_recipe(("cluster.gpus", 4)), precision, trains=True)
    assert beside_trainer < installed.arguments.kv_cache_memory_bytes < arguments.kv_cache_memory_bytes
    # weights that wait beside those that generate
    roles = (("cluster.trainer_gpus", 1), ("cluster.engine_gpus", 1))
    for none_waits in ([], [("cluster.max_staleness", 1), ("cluster.weight_buffer", "single")]):
        built(vllm_recipe(*roles, *none_waits), precision)
        assert installed.arguments.kv_cache_memory_bytes == arguments.kv_cache_memory_bytes
    ahead = vllm_recipe(*roles, ("cluster.max_staleness", 1))
    built(ahead, precision)
    waiting = (arguments.kv_cache_memory_bytes - installed.arguments.kv_cache_memory_bytes) / 0.85
    sent = sent_bytes(ahead, SPEC, policy.precisions())
    assert waiting == pytest.approx(sent, abs=3 * 16 * cache_bytes_per_token(SPEC, policy))


def test_ranks_are_started_with_the_whole_models_config_and_the_smallest_cache(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_with(monkeypatch, free=8 * GIB)
    whole = smallest_shape("qwen3", 2)
    part, policy = whole.cut(TensorCut(1, 2)), precision_policy(whole, PRECISIONS["bf16"])
    where: dict[str, Any] = {"device": torch.device("cuda"), "trains": False, "rank": 1}
    for most_tokens in (1 << 40, 1600):
        ranks = TwoRanks()
        ranks.most_tokens = most_tokens
        build_vllm(vllm_recipe(), part, policy=policy, tokenizer=Letters(), ranks=ranks, **where)
        arguments, tokens = installed.arguments, cache_bytes_per_token(part, policy)
        assert ranks.has_joined and arguments.tensor_parallel_size == 2
        assert installed.environment["VLLM_CACHE_ROOT"].endswith("/worker_1")
        shape = hf_config(whole)
        assert {name: installed.config[name] for name in shape} == shape and shape != hf_config(part)
        is_smallest = arguments.kv_cache_memory_bytes == (1600 + 16) * tokens
        assert is_smallest == (most_tokens == 1600), "a page is unused"


def test_a_worker_without_a_gpu_or_without_room_is_refused(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"engine.backend: vllm needs an NVIDIA GPU; use engine.backend: octetrl on a"):
        built(vllm_recipe(), "bf16", "cpu")
    device_with(monkeypatch, free=2 * GIB)
    with pytest.raises(UserError, match=r"41.0 GiB of 40.0 leave room for 0 tokens of its KV cache, less than model"):
        built(vllm_recipe(), "bf16")
    assert not hasattr(installed, "arguments"), "refused before vLLM starts"


def test_memory_that_is_gone_when_vllm_wakes_is_one_line(installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    device_with(monkeypatch, free=8 * GIB)
    backend = built(vllm_recipe(), "bf16")

    def full(tags: list[str]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(backend._vllm.engine, "wake_up", full)
    with pytest.raises(UserError, match=r"vLLM's weights do not fit beside the trainer \(CUDA out of memory\); lower"):
        backend._wake_memory("weights")
    assert not backend._has_weights, "it may be tried again"
