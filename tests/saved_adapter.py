"""An adapter's folder with the files that a checkpoint has of it."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from octetrl.models.decoder import Decoder
from octetrl.models.peft_adapters import trained_files


def save_adapter(model: Decoder, folder: Path, base: str | None) -> None:
    """`base`: the model folder that the adapter was trained beside; None: it has none."""
    assert model.lora is not None
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in trained_files(model, base).items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            tensors = {key: tensor.cpu().contiguous() for key, tensor in content.items()}
            save_file(tensors, folder / name, metadata={"format": "pt"})
