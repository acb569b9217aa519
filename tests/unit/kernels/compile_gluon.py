"""Compiles every Gluon kernel for Hopper, on a machine without a GPU, and prints their names.

    python -m tests.unit.kernels.compile_gluon

The launchers run as on a GPU, on CPU tensors (offline.py). `compile_kernels` does the same for all kernels.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from octetrl.fp8.quantize import Quantized
from tests.unit.kernels.offline import Compiler, zeros

BF16, E4M3, FLOAT = torch.bfloat16, torch.float8_e4m3fn, torch.float32
TOKENS, HEADS = 300, 16
BOUNDS = torch.tensor([0, 100, TOKENS], dtype=torch.int32)


def attention() -> None:
    from octetrl.kernels.attention.attention_rows_gluon import attention_rows_gluon as rows

    q_THD, out_THD, lse2_TH = zeros(TOKENS, 8, 128), zeros(TOKENS, 8, 128), zeros(8, TOKENS, dtype=FLOAT).T
    packed = zeros(TOKENS, 2, 128)
    rows(q_THD, packed, packed, BOUNDS, 200, 0.1, None, None, None, None, (1, TOKENS), out_THD, lse2_TH)
    table, contexts = zeros(2, 4, dtype=torch.int32), torch.tensor([100, 200], dtype=torch.int32)
    pages, scale = zeros(6, 2, 128, 128, dtype=E4M3), zeros(2, dtype=FLOAT)
    rows(q_THD, pages, pages, BOUNDS, 200, 0.1, scale, scale, table, contexts, (0, 0), out_THD, None)


def latent_attention() -> None:
    from octetrl.kernels.attention import latent_backward
    from octetrl.kernels.attention.latent_decode_gluon import latent_decode_gluon
    from octetrl.kernels.attention.latent_rows_gluon import latent_rows_gluon

    q_latent_THC, q_rotary_THR = zeros(TOKENS, HEADS, 512), zeros(TOKENS, HEADS, 64)
    value_TC, key_TR = zeros(TOKENS, 512), zeros(TOKENS, 64)
    latent_rows_gluon(
        q_latent_THC, q_rotary_THR, value_TC, key_TR, BOUNDS, 200, 0.1, zeros(HEADS, TOKENS, 512).transpose(0, 1)
    )
    pages = zeros(8, 128, 512, dtype=E4M3), zeros(8, 128, 64), zeros(8, 1, 128, dtype=FLOAT)
    table, contexts = zeros(4, 4, dtype=torch.int32), zeros(4, dtype=torch.int32)
    decode = q_latent_THC[:4], q_rotary_THR[:4], *pages, table, contexts, 0.1
    sums = zeros(4, 1, HEADS, dtype=FLOAT)
    latent_decode_gluon(*decode, (sums, sums, zeros(4, 1, HEADS, 512, dtype=FLOAT)))
    latent_backward.gluon_can_run = lambda *_: True
    kv_THX = zeros(TOKENS, HEADS, 256)
    latent_backward.latent_backward_triton(
        zeros(TOKENS, HEADS, 128), zeros(TOKENS, HEADS, 128), q_rotary_THR, kv_THX, key_TR, BOUNDS, 0.1
    )


def gemm() -> None:
    from octetrl.kernels.gemm import few_rows_gluon, fp8_gemm_gluon
    from octetrl.kernels.gemm.grouped_fp8_gemm_gluon import grouped_fp8_gemm_gluon

    x = SimpleNamespace(codes=zeros(256, 512, dtype=E4M3), scale=zeros(4 * 256, dtype=FLOAT))
    w = SimpleNamespace(codes=zeros(512, 512, dtype=E4M3), scale=zeros(4, 4, dtype=FLOAT))
    fp8_gemm_gluon.fp8_gemm_gluon(x, w, 256, 128, 128, 5)  # type: ignore[arg-type]
    few = SimpleNamespace(codes=x.codes[:9], scale=x.scale)
    few_rows_gluon.few_rows_fp8(few, w, 12, few_rows_gluon.FewRows(32, 16, 2, 4, swap=True))  # type: ignore[arg-type]
    few_rows_gluon.few_rows_fp8(few, w, 12, few_rows_gluon.FewRows(32, 64, 4, 2))  # type: ignore[arg-type]
    few_rows_gluon.few_rows_bf16(zeros(9, 512), zeros(512, 512), few_rows_gluon.FewRows(32, 16, 2, 4, True, True))
    for depth in (256, 384):
        rows = Quantized(zeros(TOKENS, depth, dtype=E4M3), zeros(depth // 128, TOKENS, dtype=FLOAT).t())
        experts = Quantized(zeros(2 * 512, depth, dtype=E4M3), zeros(8, depth // 128, dtype=FLOAT))
        grouped_fp8_gemm_gluon(rows, experts, zeros(4, 3, dtype=torch.int32), (512, 0), zeros(TOKENS, 512))


def launch_all() -> None:
    attention()
    latent_attention()
    gemm()


if __name__ == "__main__":
    compiler = Compiler(90, each=99)
    compiler.install()
    launch_all()
    print(*compiler.compiled, sep="\n")
