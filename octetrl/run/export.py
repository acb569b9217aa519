"""A run's weights as a Hugging Face folder: `octetrl export`.

A checkpoint keeps the weights in Hugging Face form already (config.json, safetensors, tokenizer), so that exporting is
copying: what was trained, evaluated and exported are the same bytes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from octetrl.config.errors import UserError
from octetrl.run.resume import OF_THE_RUN, weights_folder


def export_run(run_or_checkpoint: str, to: str) -> Path:
    """Copy the model of a run's last checkpoint (or of a checkpoint) to `to`, a folder that is new or empty."""
    source, target = weights_folder(Path(run_or_checkpoint)), Path(to)
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"--to: '{target}' exists and is not empty; give a new folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            if file.is_file() and not file.name.startswith(OF_THE_RUN):
                shutil.copyfile(file, target / file.name)  # not the mode: safetensors writes 0600
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise UserError(f"--to: cannot write in '{target}' ({error.strerror}); choose another folder") from error
    return target
