#!/usr/bin/env bash
# reasoning-gym 0.1.25: the task game_of_life_halting rewards every answer that is not empty, the wrong one too.
#
# Behaviour: its scorer compares `bool(answer)` with `bool(entry["answer"])`. Both are strings, and a string is true
# unless it is empty, so "True", "False" and "I do not know" all score 1 whatever the reference is.
# Surprise: the task looks solved from the first step on. Its mean reward is 1 in every group, so in group-relative
# algorithms it has no advantage and silently trains nothing, and in a mixture it raises the average.
# Seen:
#   reference 'False': True 1.0, False 1.0, I do not know 1.0, empty 0.0
#   reference 'True': True 1.0, False 1.0, I do not know 1.0, empty 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" reasoning-gym==0.1.25
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import reasoning_gym

dataset = reasoning_gym.create_dataset("game_of_life_halting", size=8, seed=1)
entries = {entry["answer"]: entry for entry in dataset}
for reference in ("False", "True"):
    answers = ("True", "False", "I do not know", "")
    scores = [dataset.score_answer(answer, entries[reference]) for answer in answers]
    line = ", ".join(f"{answer or 'empty'} {score}" for answer, score in zip(answers, scores, strict=True))
    print(f"reference {reference!r}: {line}")
    assert scores == [1.0, 1.0, 1.0, 0.0], "the behaviour has changed"
PYTHON
