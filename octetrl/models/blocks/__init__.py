"""The kinds of block that a decoder layer is composed of, a folder each.

    layout.py      linears and other parameters, memory while training, the doctor's sites (no torch: config/blocks.py)
    module.py      the definition, and which functions are its fused forms
    rollout.py     the block as a GPU runs it for rollout: the module's bits in fewer passes over memory
    training.py    the block as a GPU trains it: forward with the same bits, backward written out

`block.py` says what a block must have. `products.py` has what the fused forms share: the linears and their operands.

A new kind is a folder with these four files. `models/families.py` says which models have it.
"""
