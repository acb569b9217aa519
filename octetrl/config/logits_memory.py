"""Bytes of the logits of one micro-batch in training: in the forward, or their gradients and that of lm_head. No torch.

On a CPU the plain forms of the kernels compute log-probs and entropy of a chunk in float64, with 37 bytes for each
logit, and gradients in float32. A run of 29M parameters with a vocabulary of 32,000 and micro-batches of 2,048 tokens
used 2.20 GiB at its peak; the estimate is 2.10 GiB.
"""

from __future__ import annotations

from octetrl.shapes.spec import ModelSpec

GATHERED_CHUNKS = 4  # chunks whose logits' gradients share one GEMM (kernels/gemm/linear_logprobs_backward.py)


def logits_bytes(spec: ModelSpec, tokens: int, value_bytes: int, chunk: int, *, frozen: bool, on_gpu: bool) -> int:
    """value_bytes: of the model's dtype. chunk: `trainer.logprob_chunk`. frozen: lm_head is not trained."""
    rows, group = min(chunk, tokens), min(GATHERED_CHUNKS * chunk, tokens)
    weight = 0 if frozen else spec.vocab_rows * spec.hidden_size
    if on_gpu:
        while_summed = (4 * rows + value_bytes * group) * spec.vocab_size + 4 * weight
        most = max(while_summed, (4 + (value_bytes if value_bytes < 4 else 0)) * weight)
    else:
        wide = 4 * spec.vocab_rows * spec.hidden_size  # lm_head in float32
        most = max(37 * rows * spec.vocab_size, (16 * rows + 4 * group) * spec.vocab_size + wide + 4 * weight)
    return most + 4 * value_bytes * tokens * spec.hidden_size
