"""Names of Gluon that differ between versions of Triton: `thread_barrier` of 3.6 is `barrier` since 3.7."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
