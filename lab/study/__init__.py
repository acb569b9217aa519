"""The study of FP8 and learning (docs/study.md): arms and seeds trained side by side, and what FP8 does to a model.

`runs` trains, `table` compares; `real_model` and `kv_formats` measure a pretrained model without training.
"""
