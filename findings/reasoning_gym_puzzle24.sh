#!/usr/bin/env bash
# reasoning-gym 0.1.25: the task puzzle24 accepts numbers other than the four it gives.
#
# Behaviour: its scorer checks that four numbers occur, that each lies in the range the data set was made with, and that
# the value is 24, after cutting it to an integer (10+10+9/2 is 24.5). It does not look at the numbers of the question.
# Surprise: the question says to use the given numbers once each, and they stand in the entry's metadata. "6+6+6+6" is
# a full answer to every question; reinforcement learning finds such an answer soon and stops reasoning.
# Seen:
#   numbers [8, 5, 10, 6]: 6+6+6+6 1.0, 10+10+9/2 1.0, 8+5+10+6 0.01
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" reasoning-gym==0.1.25
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import reasoning_gym

dataset = reasoning_gym.create_dataset("puzzle24", size=1, seed=1)
entry = dataset[0]
answers = ("6+6+6+6", "10+10+9/2", "8+5+10+6")
scores = [dataset.score_answer(answer, entry) for answer in answers]
line = ", ".join(f"{answer} {score}" for answer, score in zip(answers, scores, strict=True))
print(f"numbers {entry['metadata']['numbers']}: {line}")
assert scores == [1.0, 1.0, 0.01], "the behaviour has changed"
PYTHON
