#!/usr/bin/env bash
# mistral-common 1.13.1 shows the model other tool results and tool calls than it was given.
#
# Behaviour: text of a tool's result (tokenizer v3) and of a call's arguments (v3 and v7) that is valid JSON is parsed
# and printed again. Numbers become Python floats on the way: trailing zeros and exponents go, long decimals are cut.
# With tokenizer v7 a result is passed on as it is.
# Surprise: a result is a string in the interface, not JSON: a price 0.10 or a version 1.20 reads as 0.1 and 1.2. And a
# call in the history is not the text that the model wrote, so tokens of a rollout and of its messages differ.
# Seen:
#   0.10: result by v3 0.1, argument by v7 0.1, result by v7 unchanged
#   1e3: result by v3 1000.0, argument by v7 1000.0, result by v7 unchanged
#   3.14159265358979323846: result by v3 3.141592653589793, argument by v7 3.141592653589793, result by v7 unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" mistral-common==1.13.1 sentencepiece==0.2.3
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import re

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

TEXTS = {"0.10": "0.1", "1e3": "1000.0", "3.14159265358979323846": "3.141592653589793"}


def render(tokenizer, arguments, result):
    call = {"id": "abcdef123", "type": "function", "function": {"name": "price", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "What does it cost?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdef123", "name": "price", "content": result},
    ]
    function = {"name": "price", "description": "", "parameters": {"type": "object", "properties": {}}}
    request = ChatCompletionRequest(messages=messages, tools=[{"type": "function", "function": function}])
    tokens = tokenizer.encode_chat_completion(request).tokens
    return tokenizer.decode(tokens, special_token_policy=SpecialTokenPolicy.KEEP).replace("\u2581", " ")


for text, changed in TEXTS.items():
    old, new = (render(make(), f'{{"at": {text}}}', text) for make in (MistralTokenizer.v3, MistralTokenizer.v7))
    call = re.search(r'"at": ?([^}]*)}', new)[1]
    result_3 = re.search(r'"content": ?([^,]*),', old)[1]
    result_7 = re.search(r"\[TOOL_CONTENT\] ?([^\[]*)\[", new)[1]
    last = "unchanged" if result_7 == text else result_7
    print(f"{text}: result by v3 {result_3}, argument by v7 {call}, result by v7 {last}")
    assert (result_3, call, result_7) == (changed, changed, text), "the behaviour has changed"
PYTHON
