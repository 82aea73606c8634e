#!/usr/bin/env bash
# Transformers 5.24.0 writes a Mamba 2 configuration that its own `from_dict` refuses: infinity becomes an object.
#
# Behaviour: `save_pretrained` writes the upper limit of `time_step_limit`, which is infinite, as
# {"__float__": "Infinity"}, since JSON has no infinity. `from_pretrained` turns that back. `from_dict`, given the very
# content of the file, raises, since the field is not a list of numbers.
# Surprise: tools that read config.json, replace a field and build the configuration of the result work with every
# model but those of state-space layers, and the error names a field that nobody has touched.
# Seen:
#   in the file: [0.0, {'__float__': 'Infinity'}]
#   from_pretrained: [0.0, inf]
#   from_dict: StrictDataclassFieldValidationError for time_step_limit
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet transformers==5.24.0
cd "$folder"

cat >read.py <<'PYTHON'
import json
from pathlib import Path

from transformers import Mamba2Config

Mamba2Config().save_pretrained("model")
content = json.loads(Path("model/config.json").read_text())
print("in the file:", content["time_step_limit"])
print("from_pretrained:", list(Mamba2Config.from_pretrained("model").time_step_limit))
try:
    print("from_dict:", list(Mamba2Config.from_dict(content).time_step_limit))
except Exception as error:
    names = [name for name in ("time_step_limit", "time_step_min") if f"'{name}'" in str(error)]
    print("from_dict:", type(error).__name__, "for", *names)
PYTHON
"$folder/venv/bin/python" read.py 2>"$folder/errors" >output.txt || { cat "$folder/errors"; exit 1; }
cat output.txt
diff output.txt - <<'SEEN'
in the file: [0.0, {'__float__': 'Infinity'}]
from_pretrained: [0.0, inf]
from_dict: StrictDataclassFieldValidationError for time_step_limit
SEEN
