"""What Transformers 4 reads in folders of models: ``python older_transformers.py FOLDER...`` prints it as JSON.

It runs as a program of its own, with `PYTHONPATH` naming an installation of Transformers 4, and imports nothing else of
this project.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TEXTS = ("2+2=?", " Hello  world,\nnaïve 漢字", "<|im_end|><eos></s> a\t\n")
MESSAGES = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3+3?"},
]
TOKEN_IDS = [[3, 5, 7, 11, 4, 6, 8, 10, 3, 9]]


def read_tokenizer(tokenizer: Any, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the token ids and texts that a tokenizer makes of what is above."""
    prompt = None
    if tokenizer.chat_template is not None:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return {
        "texts": [tokenizer.encode(text) for text in TEXTS],
        "decoded": [tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) for text in TEXTS],
        "prompt": prompt,
        "prompt_ids": None if prompt is None else tokenizer.encode(prompt, add_special_tokens=False),
        "special": sorted(tokenizer.all_special_tokens),
        "eos": tokenizer.eos_token_id,
        "size": len(tokenizer),
    }


def read_logits(model: Any) -> list[Any]:
    """Return a model's logits for the token ids above."""
    import torch

    with torch.no_grad():
        logits: list[Any] = model.eval()(torch.tensor(TOKEN_IDS), use_cache=False).logits[0].tolist()
    return logits


def main() -> None:
    """Read each folder's tokenizer, or its model if it has one."""
    import transformers

    read: dict[str, Any] = {"release": transformers.__version__}
    for folder in map(Path, sys.argv[1:]):
        if (folder / "config.json").is_file():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
            read[str(folder)] = read_logits(model)
        else:
            messages = json.loads((folder / "messages.json").read_text())
            read[str(folder)] = read_tokenizer(transformers.AutoTokenizer.from_pretrained(folder), messages)
    print(json.dumps(read))


if __name__ == "__main__":
    main()
