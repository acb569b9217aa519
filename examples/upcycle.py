"""Turn a dense Qwen3 into a mixture of experts: every expert begins as a copy of the layer's MLP, a little changed.

python -m examples.upcycle runs/demo/sft/export runs/demo/moe

The routing weights of a token add up to 1, so the mixture begins as nearly the model that it was made from
(arXiv:2212.05055). The router is random.
"""

import argparse
import shutil
import sys
from pathlib import Path

import torch

from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config, load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.run.build import full_precision
from octetrl.system.errors import UserError

EXPERTS, CHOSEN, NOISE = 8, 2, 0.02  # noise: of a weight's standard deviation
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@torch.no_grad()
def upcycle(source: Path, target: Path) -> None:
    """Writes the mixture and the tokenizer of the dense model in `source` as a Hugging Face folder. Raises UserError
    if the source is no dense Qwen3, or the target is not empty."""
    dense_spec = load_spec(source)
    if dense_spec.family != "qwen3":
        raise UserError(f"'{source}' holds a model of the family {dense_spec.family}; give a dense Qwen3")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"'{target}' exists and is not empty; give a new folder, or remove this one")
    dense = Decoder(dense_spec, full_precision(dense_spec), "train")
    load_weights(dense, source)
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    changes = {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": dense_spec.intermediate_size}
    spec = spec_from_config(hf_config(dense_spec) | experts | changes)
    mixture = Decoder(spec, full_precision(spec), "train")
    mixture.random_init(0)
    copied = dict(dense.named_parameters())
    for name, parameter in mixture.named_parameters():
        theirs = copied.get(name.replace(".experts.", "."))
        if name.endswith(".mlp.gate.weight"):
            assert theirs is None
            continue
        if theirs is None:
            raise UserError(f"'{source}' has nothing for {name}; give a dense Qwen3")
        if ".experts." in name:
            noise = NOISE * theirs.std() * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            parameter.copy_(theirs.repeat(EXPERTS, 1) + noise)
        else:
            parameter.copy_(theirs)
    save_weights(mixture, target)
    for file in TOKENIZER_FILES:
        if (source / file).exists():
            shutil.copy(source / file, target / file)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes a mixture of experts from a dense Qwen3.")
    parser.add_argument("source", type=Path, help="the dense model's folder, such as runs/demo/sft/export")
    parser.add_argument("target", type=Path, help="a new folder for the mixture, such as runs/demo/moe")
    given = parser.parse_args()
    try:
        upcycle(given.source, given.target)
    except UserError as error:
        print(f"upcycle: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"wrote {given.target}: {EXPERTS} experts a layer, {CHOSEN} of them for each token")


if __name__ == "__main__":
    main()
