#!/usr/bin/env bash
# A message of the role `developer` is shown, refused or left out without a word, by template (TRL 1.16.0's copies).
#
# Behaviour: OpenAI's clients send instructions as `developer`, where they used to send `system`. The templates of Llama
# 3, Gemma 4 and GPT-OSS write such a message. Those of Gemma 3 and Qwen3.5 raise an error. Those of Qwen2.5, Qwen3,
# DeepSeek-V3, GLM-4-MoE and Phi-3 render the conversation as if it were not there, and raise none.
# Surprise: within one family, Qwen2.5 and Qwen3 drop what Qwen3.5 refuses. Instructions are gone from training and from
# prompts alike, and nothing says so.
# Seen:
#   shown: gemma4 gptoss llama3
#   refused: gemma3 qwen3_5_think
#   dropped: deepseekv3 glm4moe phi3 qwen2_5 qwen3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" transformers==5.24.0 jinja2==3.1.6
python3 -m pip install --quiet --no-deps --target "$folder/trl" trl==1.16.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
from pathlib import Path

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

ORDER = "Answer in verse."
EXPECTED = {
    "shown": ["gemma4", "gptoss", "llama3"],
    "refused": ["gemma3", "qwen3_5_think"],
    "dropped": ["deepseekv3", "glm4moe", "phi3", "qwen2_5", "qwen3"],
}


def outcome_of(model: str, role: str) -> str:
    template = Path("trl/trl/chat_templates", f"{model}.jinja").read_text(encoding="utf-8")
    messages = [{"role": role, "content": ORDER}, {"role": "user", "content": "Hi"}]
    try:
        texts, _ = render_jinja_template([messages], chat_template=template, bos_token="", eos_token="")
    except TemplateError:
        return "refused"
    return "shown" if ORDER in texts[0] else "dropped"


seen = {outcome: [] for outcome in EXPECTED}
for model in sorted(model for models in EXPECTED.values() for model in models):
    seen[outcome_of(model, "developer")].append(model)
    assert outcome_of(model, "system") == "shown", f"{model}: a system message was shown"
for outcome, models in seen.items():
    print(f"{outcome}: {' '.join(models)}")
assert seen == EXPECTED, "the behaviour has changed"
PYTHON
