#!/usr/bin/env bash
# datasets 5.2.0: `Dataset.from_list` gives every tool the parameters of all others; reading the same rows from a JSON
# Lines file does not.
#
# Behaviour: a list of dictionaries becomes an Arrow list of one struct type with the union of the keys, and absent keys
# come back as None. The JSON loader of the same release stores such differing dictionaries as JSON and keeps them.
# Surprise: the same rows give two data sets. From the first, a chat template writes into the prompt that the tool
# `weather` has parameters `a` and `b` (null), which is no valid JSON Schema; the arguments of tool calls gain null
# values the same way, and the model is trained to write them.
# Seen:
#   from_list: weather ['city', 'a', 'b'], add ['city', 'a', 'b']
#   load_dataset("json"): weather ['city'], add ['a', 'b']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$folder"

HF_HUB_OFFLINE=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python <<'PYTHON'
import json
from pathlib import Path

import datasets


def make_tool(name, **types):
    properties = {key: {"type": value} for key, value in types.items()}
    return {"name": name, "parameters": {"type": "object", "properties": properties}}


rows = [{"tools": [make_tool("weather", city="string"), make_tool("add", a="integer", b="integer")]}]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
ways = {
    "from_list": datasets.Dataset.from_list(rows),
    'load_dataset("json")': datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache"),
}
seen = {}
for way, dataset in ways.items():
    seen[way] = [list(tool["parameters"]["properties"]) for tool in dataset[0]["tools"]]
    names = [tool["name"] for tool in dataset[0]["tools"]]
    print(f"{way}:", ", ".join(f"{name} {keys}" for name, keys in zip(names, seen[way], strict=True)))
merged, own = [["city", "a", "b"]] * 2, [["city"], ["a", "b"]]
assert list(seen.values()) == [merged, own], "the behaviour has changed"
PYTHON
