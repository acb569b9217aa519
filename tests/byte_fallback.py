"""A tokenizer with the decoder of Llama 2, Mistral and Phi-3: bytes as tokens, `▁` for a space, one space stripped."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers

SPECIAL = ("<unk>", "<s>", "</s>")
PIECES = ("▁", "▁▁", "▁a", "b", "a", "c▁", "é", "▁é", "the", "▁the", ".", "#", "中", "\ufffd")
FIRST_BYTE = len(SPECIAL)
FIRST_PIECE = FIRST_BYTE + 256
SIZE = FIRST_PIECE + len(PIECES)


@lru_cache(maxsize=1)
def byte_fallback() -> Any:
    """transformers' tokenizer. Ids: SPECIAL, then the 256 bytes, then PIECES."""
    from transformers import PreTrainedTokenizerFast

    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    model = models.BPE({name: id for id, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def id_of(piece: str) -> int:
    """The id of one of PIECES, or of the byte of an ASCII letter that is none."""
    return FIRST_PIECE + PIECES.index(piece) if piece in PIECES else FIRST_BYTE + ord(piece)
