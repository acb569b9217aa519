"""The embedding's gradient is summed in float32, whatever the weight's dtype."""

from __future__ import annotations

import torch

from octetrl.layers.embedding import Embedding


def test_rows_and_gradient_equal_torch() -> None:
    embedding = Embedding(11, 4, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(embedding.weight)
    token_ids_T = torch.tensor([3, 3, 0, 10])
    dy_TE = torch.randn(4, 4)
    reference = embedding.weight.detach().clone().requires_grad_()
    torch.nn.functional.embedding(token_ids_T, reference).backward(dy_TE)
    embedding(token_ids_T).backward(dy_TE)
    assert torch.equal(embedding(token_ids_T), embedding.weight[token_ids_T])
    assert embedding.weight.grad is not None
    torch.testing.assert_close(embedding.weight.grad, reference.grad)


def test_a_frequent_token_does_not_stop_growing_in_bfloat16() -> None:
    embedding = Embedding(2, 1, dtype=torch.bfloat16, device="cpu")
    embedding(torch.zeros(4096, dtype=torch.int64)).backward(torch.ones(4096, 1, dtype=torch.bfloat16))
    assert embedding.weight.grad is not None and embedding.weight.grad[0].item() == 4096
