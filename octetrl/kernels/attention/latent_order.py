"""The one order in which MLA's attention is summed, for rollout and training alike.

It is the order of `attention_order.py` with these differences:

- All heads read one latent and one rotary key of each token. A score is one sum over the latent's C elements and then
  over the R of the rotary key, into one accumulator.
- V is the latent, so a tile has one matrix in two roles. Tiles have `LATENT_TILE` keys; chunks have `KV_CHUNK` keys.
- Latents are BF16 values, so there are no scales of keys. An FP8 cache's codes become values before they are multiplied
  (`latent_store.py`).
- The row sum's tree adds over bits 3 and 0 of a key's place in its tile, which has six bits. The other four bits are
  the 16 classes.
"""

from __future__ import annotations

LATENT_TILE = 64
