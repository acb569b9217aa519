"""The kinds of block that a decoder layer is composed of, a folder each.

    layout.py      linears and other parameters, memory while training, the doctor's sites (no torch: shapes/blocks.py)
    module.py      the definition, and which functions are its fused forms
    rollout.py     the fused form for rollout on a GPU: the module's bits in fewer passes over memory
    training.py    the fused form for training on a GPU: forward with the same bits, backward written out

`block.py` is the interface of a block. `products.py` has the linears' products and operands for the fused forms.

A new kind is a folder with these four files. `models/families.py` lists the models that have it.
"""
