"""Writes a tiny model and SFT conversations for examples/tool_agent.py: half of them call the tool, half guess.

python -m examples.tool_conversations runs/tools
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from examples.tool_agent import Shop, price
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.records import Task
from octetrl.run.build import full_precision
from octetrl.run.tiny_model import TOOL_TEMPLATE, save_tokenizer
from octetrl.shapes.presets import preset_config

NUM_CONVERSATIONS, ASKING = 6000, 0.5
VOCAB_SIZE = 512
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 256, "head_dim": 32, "vocab_size": VOCAB_SIZE}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def asks(task: Task) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "price", "arguments": {"thing": task.metadata["thing"]}}}
    return [
        {"role": "user", "content": task.prompt},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": task.answer},
        {"role": "assistant", "content": task.answer},
    ]


def guesses(task: Task, chance: random.Random) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": task.prompt},
        {"role": "assistant", "content": str(chance.randrange(10))},
    ]


def main(folder: Path) -> None:
    """Write `folder/model` and `folder/conversations.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    chance, tools = random.Random(1), [price.schema()]
    tasks = [chance.choice(Shop.tasks) for _ in range(NUM_CONVERSATIONS)]
    rows = [
        {"messages": asks(task) if chance.random() < ASKING else guesses(task, chance), "tools": tools}
        for task in tasks
    ]
    (folder / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [json.dumps(tools[0]) + task.prompt for task in tasks[:500]]
    texts += [f'<tool_call>{{"name": "price", "arguments": {{"thing": "{t.metadata["thing"]}"}}}}' for t in tasks[:500]]
    texts += ["</tool_call>", "<tool_response>", "</tool_response>"] * 200
    tokenizer = save_tokenizer(texts, folder / "model", VOCAB_SIZE, TOOL_TEMPLATE)
    spec = spec_from_config(preset_config("tiny") | SHAPE | {"eos_token_id": tokenizer.eos_token_id})
    model = Decoder(spec, full_precision(spec), "train")
    model.random_init(1)
    save_weights(model, folder / "model")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
