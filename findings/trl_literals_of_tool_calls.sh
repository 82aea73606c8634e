#!/usr/bin/env bash
# The templates of Qwen3.5 and Nemotron 3 in TRL 1.16.0 write the same value of a tool call in two languages.
#
# Behaviour: an argument true or null is written as Python prints it (True, None), but inside a list or an object as
# JSON prints it (true, null). Qwen3.6's template writes JSON in both places.
# Surprise: models of one family are shown different text for the same call, and a parser of calls must read both
# languages: JSON alone fails on `True`, Python literals alone fail on `[true]`.
# Seen:
#   qwen3_5_think: True, [true, null], None
#   nemotron_3_nano: True, [true, null], None
#   qwen3_6: true, [true, null], null
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" transformers==5.24.0 jinja2==3.1.6
python3 -m pip install --quiet --no-deps --target "$folder/trl" trl==1.16.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import re
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

WRITTEN = {
    "qwen3_5_think": ["True", "[true, null]", "None"],
    "nemotron_3_nano": ["True", "[true, null]", "None"],
    "qwen3_6": ["true", "[true, null]", "null"],
}
function = {"name": "search", "arguments": {"exact": True, "flags": [True, None], "limit": None}}
call = {"id": "call_1", "type": "function", "function": function}
messages = [
    {"role": "user", "content": "Search."},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Nothing."},
]
seen = {}
for model in WRITTEN:
    template = Path("trl/trl/chat_templates", f"{model}.jinja").read_text(encoding="utf-8")
    texts, _ = render_jinja_template([messages], chat_template=template)
    seen[model] = re.findall(r"<parameter=\w+>\n(.*)\n</parameter>", texts[0])
    print(f"{model}:", ", ".join(seen[model]))
assert seen == WRITTEN, "the behaviour has changed"
PYTHON
