"""Arms and seeds of the study trained side by side, and what FP8 does to a model (lab/study/README.md).

`runs` trains, `table` compares; `real_model` and `kv_formats` measure a pretrained model without training.
"""
