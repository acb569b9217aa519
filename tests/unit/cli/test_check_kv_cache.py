"""What `octetrl check` says of the KV cache's formats: what stays BF16 and why, and what cannot be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from octetrl.shapes.presets import preset_config
from tests.unit.cli.test_check import check, folder, tokenizer, write_config  # noqa: F401


def test_a_model_without_qk_norm_keeps_k_in_bf16(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    write_config(folder, architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=4096)
    code, out, _ = check(capsys)
    assert code == 0
    assert "K bf16, V fp8" in out
    assert "K stays BF16" in out


def test_k_or_v_alone_in_fp8(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Both leave 3 bytes of 4; a model whose K stays BF16 has no K to choose."""
    code, out, _ = check(capsys, "precision=fp8_full", "fp8.kv_cache_tensors=k")
    assert code == 0 and "K fp8, V bf16" in out and "V stays BF16: fp8.kv_cache_tensors is k" in out
    code, out, _ = check(capsys, "precision=fp8_full", "fp8.kv_cache_tensors=v")
    assert code == 0 and "K bf16, V fp8" in out and "K stays BF16: fp8.kv_cache_tensors is v" in out
    write_config(folder, architectures=["Qwen2ForCausalLM"], model_type="qwen2", max_position_embeddings=4096)
    code, _, err = check(capsys, "precision=fp8_full", "fp8.kv_cache_tensors=k")
    assert code == 2 and "'k' would leave nothing in FP8, because K stays BF16" in err and "use 'both'" in err
    code, out, _ = check(capsys, "precision=fp8_full", "fp8.kv_cache_tensors=v")
    assert code == 0 and "K bf16, V fp8" in out


def test_latent_attention_caches_no_k_and_v(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    write_config(folder, **(preset_config("tiny-mla-moe") | {"max_position_embeddings": 4096}))
    code, _, err = check(capsys, "precision=fp8_full", "fp8.kv_cache_tensors=k")
    assert code == 2 and "'k' is not available for latent attention" in err and "use 'both'" in err
