"""Which class of decoder computes a spec: ours, or the one around transformers' modules."""

from __future__ import annotations

from octetrl.models.decoder import Decoder
from octetrl.shapes.spec import ModelSpec


def decoder_class(spec: ModelSpec) -> type[Decoder]:
    """Our decoder, or the one of transformers' modules, whose import takes seconds."""
    if spec.hf_config is None:
        return Decoder
    from octetrl.models.transformers_decoder import TransformersDecoder

    return TransformersDecoder
