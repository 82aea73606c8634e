#!/usr/bin/env bash
# Transformers 5.24.0's `apply_chat_template` makes DeepSeek-V3's chat template fail on tool calls without text.
#
# Behaviour: it removes every key of a message whose value is None before the template runs. The DeepSeek-V3 template
# (here the copy in TRL 1.16.0) branches on `message['content'] is none`; an absent key is undefined, which is not
# none, so the template goes on to join it to a string and raises. With "" for None it renders, and so does
# Transformers 4.57.6, which leaves the key in.
# Surprise: `"content": null` beside `tool_calls` is what the chat completions API itself returns, the template is
# written for exactly that, and it worked in the release series before.
# Seen:
#   5.24.0 content None: UndefinedError
#   5.24.0 content '': rendered
#   4.57.6 content None: rendered
#   4.57.6 content '': rendered
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/new" transformers==5.24.0 jinja2==3.1.6
python3 -m pip install --quiet --target "$folder/old" transformers==4.57.6 jinja2==3.1.6
python3 -m pip install --quiet --no-deps --target "$folder/trl" trl==1.16.0
cd "$folder"

cat >render.py <<'PYTHON'
from pathlib import Path

import jinja2
import tokenizers
import transformers

words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
tokenizer.chat_template = Path("trl/trl/chat_templates/deepseekv3.jinja").read_text(encoding="utf-8")
function = {"name": "add", "arguments": '{"a": 1, "b": 1}'}
calls = [{"id": "call_1", "type": "function", "function": function}]
for content in (None, ""):
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    messages = [{"role": "user", "content": "What is 1 + 1?"}, answer]
    try:
        tokenizer.apply_chat_template(messages, tokenize=False)
        outcome = "rendered"
    except jinja2.UndefinedError as error:
        outcome = type(error).__name__
    print(f"{transformers.__version__} content {content!r}: {outcome}")
PYTHON
PYTHONPATH=new python3 render.py | tee seen.txt
PYTHONPATH=old python3 render.py | tee -a seen.txt
diff seen.txt - <<'SEEN' || { echo "the behaviour has changed" >&2; exit 1; }
5.24.0 content None: UndefinedError
5.24.0 content '': rendered
4.57.6 content None: rendered
4.57.6 content '': rendered
SEEN
