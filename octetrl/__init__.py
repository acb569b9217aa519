"""OctetRL: RL post-training of language models with FP8 end to end."""

__version__ = "0.1.0"
