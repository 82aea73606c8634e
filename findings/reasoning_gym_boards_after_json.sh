#!/usr/bin/env bash
# reasoning-gym 0.1.25: arc_agi and rearc score their own reference answer 0.05 once the entry was stored as JSON.
#
# Behaviour: the scorer reads a board into nested tuples and compares it with `entry["metadata"]["output"]`. JSON has no
# tuples, so after a round trip that is a list of lists, which never equals a tuple.
# Surprise: an entry is otherwise plain data, and writing a data set to JSON Lines first, or sending an entry to a
# reward server, is a common way to train on it. Every answer is then wrong, with no error and a reward that is not 0.
# Seen:
#   arc_agi: as generated 1.0, after JSON 0.05
#   rearc: as generated 1.0, after JSON 0.05
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" reasoning-gym==0.1.25
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import json

import reasoning_gym

for task in ("arc_agi", "rearc"):
    dataset = reasoning_gym.create_dataset(task, size=1, seed=1)
    entry = dataset[0]
    stored = json.loads(json.dumps(entry))
    scores = [dataset.score_answer(entry["answer"], problem) for problem in (entry, stored)]
    print(f"{task}: as generated {scores[0]}, after JSON {scores[1]}")
    assert scores == [1.0, 0.05], "the behaviour has changed"
PYTHON
