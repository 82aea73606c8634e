#!/usr/bin/env bash
# Transformers 4.57.6 reads a Qwen3 configuration saved by Transformers 5.24.0 with the wrong base of the rotary
# embedding, without a warning.
#
# Behaviour: 5.24.0 saves the base as config.json's `rope_parameters.rope_theta` alone. 4.57.6 looks for a top-level
# `rope_theta`, finds none, and takes its default of 10,000; `rope_parameters` stays on the object as an unused extra.
# Surprise: the file loads, the weights fit (no shape depends on the base), and nothing is said. A checkpoint trained
# with Transformers 5 and run by a stack that is still on 4 has other positions than the ones it was trained with.
# Seen:
#   5.24.0 saved {'rope_parameters': {'rope_theta': 1000000.0, 'rope_type': 'default'}}
#   4.57.6 read rope_theta 10000.0, said of rope: nothing
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/new" transformers==5.24.0
python3 -m pip install --quiet --target "$folder/old" transformers==4.57.6
cd "$folder"

PYTHONPATH=new python3 <<'PYTHON'
import json

import transformers

parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
transformers.Qwen3Config(rope_parameters=parameters).save_pretrained("saved")
with open("saved/config.json") as file:
    rope = {key: value for key, value in json.load(file).items() if "rope" in key}
print(transformers.__version__, "saved", rope)
assert rope == {"rope_parameters": parameters}, "the behaviour has changed"
PYTHON

PYTHONPATH=old python3 2>warnings.txt <<'PYTHON'
import transformers

config = transformers.Qwen3Config.from_pretrained("saved")
print(transformers.__version__, "read rope_theta", config.rope_theta, end=", ")
assert config.rope_theta == 10_000.0, "the behaviour has changed"
PYTHON
if grep -i rope warnings.txt; then
  echo "the behaviour has changed: there is a warning" >&2
  exit 1
fi
echo "said of rope: nothing"
