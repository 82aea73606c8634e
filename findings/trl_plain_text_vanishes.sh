#!/usr/bin/env bash
# The templates of SmolVLM and Idefics3 in TRL 1.16.0 render a conversation of plain strings without any of its text.
#
# Behaviour: they walk over a message's content as a list of parts. Of a string they walk over the characters, none of
# which has a type, so only the roles and end markers are written. Qwen3-VL's template takes both forms.
# Surprise: a string is the plain form of content in chat data, and these models also answer text alone. Nothing
# fails: the assistant mask has a span with the end marker only, and training on it teaches to answer nothing.
# Seen:
#   qwen3_vl: as string True, as parts True
#   smolvlm: as string False, as parts True
#   idefics3: as string False, as parts True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" transformers==5.24.0 jinja2==3.1.6
python3 -m pip install --quiet --no-deps --target "$folder/trl" trl==1.16.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

TEXT = {"user": "What is 1 + 1?", "assistant": "It is 2."}
FORMS = (
    [{"role": role, "content": text} for role, text in TEXT.items()],
    [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in TEXT.items()],
)
for model, kept in {"qwen3_vl": True, "smolvlm": False, "idefics3": False}.items():
    template = Path("trl/trl/chat_templates", f"{model}.jinja").read_text(encoding="utf-8")
    texts, _ = render_jinja_template(list(FORMS), chat_template=template)
    seen = [all(text in rendered for text in TEXT.values()) for rendered in texts]
    print(f"{model}: as string {seen[0]}, as parts {seen[1]}")
    assert seen == [kept, True], "the behaviour has changed"
PYTHON
