#!/usr/bin/env bash
# The template of DeepSeek-R1's distilled models in TRL 1.16.0 leaves out tool calls that stand beside text.
#
# Behaviour: it writes an assistant message's calls only where the content is none, and otherwise its text alone; even
# an empty text counts. The result of the tool is still written. DeepSeek-V3's template writes both.
# Surprise: there is no error; the conversation shows a result that nobody asked for, and training on it teaches
# to stop where the call should be. Content of "" for null, a usual way around templates that reject null, loses calls.
# Seen:
#   deepseekv3, content 'Let me add.': call True, result True
#   deepseekv3, content '': call True, result True
#   deepseek_r1_distill, content 'Let me add.': call False, result True
#   deepseek_r1_distill, content '': call False, result True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" transformers==5.24.0 jinja2==3.1.6
python3 -m pip install --quiet --no-deps --target "$folder/trl" trl==1.16.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
for model, kept in {"deepseekv3": True, "deepseek_r1_distill": False}.items():
    template = Path("trl/trl/chat_templates", f"{model}.jinja").read_text(encoding="utf-8")
    for content in ("Let me add.", ""):
        messages = [
            {"role": "user", "content": "What is 1 + 1?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "RESULT"},
        ]
        texts, _ = render_jinja_template([messages], chat_template=template, bos_token="")
        seen = ('{"a": 1, "b": 1}' in texts[0], "RESULT" in texts[0])
        print(f"{model}, content {content!r}: call {seen[0]}, result {seen[1]}")
        assert seen == (kept, True), "the behaviour has changed"
PYTHON
