#!/usr/bin/env bash
# The templates of Llama 3.1 and GPT-OSS in TRL 1.16.0 show the model a tool's JSON as a quoted, escaped string.
#
# Behaviour: they pass the text of a tool message through `tojson` although it is text already, so JSON is encoded twice
# and plain text gets quotation marks. Qwen3's template writes the text as it is.
# Surprise: nearly every tool returns JSON, and the same message costs more tokens and reads differently on these
# models. An engine that builds the prompt without the template shows the model other text than training on the
# template does.
# Seen:
#   qwen3: {"sum": 2}
#   llama3_1: "{\"sum\": 2}"
#   gptoss: "{\"sum\": 2}"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" transformers==5.24.0 jinja2==3.1.6
python3 -m pip install --quiet --no-deps --target "$folder/trl" trl==1.16.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

RESULT = '{"sum": 2}'
ENCODED = r'"{\"sum\": 2}"'
FORMS = {"qwen3": RESULT, "llama3_1": ENCODED, "gptoss": ENCODED}
call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
messages = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "tool_call_id": "call_1", "content": RESULT},
]
seen = {}
for model in FORMS:
    template = Path("trl/trl/chat_templates", f"{model}.jinja").read_text(encoding="utf-8")
    texts, _ = render_jinja_template([messages], chat_template=template, bos_token="")
    seen[model] = next((form for form in (ENCODED, RESULT) if form in texts[0]), "another form")
    print(f"{model}: {seen[model]}")
assert seen == FORMS, "the behaviour has changed"
PYTHON
