#!/usr/bin/env bash
# reasoning-gym 0.1.25: the task gsm_symbolic marks 1,585 wrong and -1585 right where the answer is 1585.
#
# Behaviour: its scorer takes the first digits it finds. The pattern starts with a word boundary before an optional
# minus, and at the start of a text there is no boundary before a minus, so the sign is never taken; and it stops at a
# thousands separator.
# Surprise: the tasks are about money and amounts, where models write 1,585. Such an answer scores 0.01 as if it were
# wrong, while a wrong sign scores 1.
# Seen:
#   reference 1585: 1585 1.0, $1585 1.0, 1,585 0.01, -1585 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" reasoning-gym==0.1.25
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import reasoning_gym

dataset = reasoning_gym.create_dataset("gsm_symbolic", size=100, seed=1)
entry = next(entry for entry in dataset if float(entry["answer"]) >= 1000)
number = int(entry["answer"])
answers = (f"{number}", f"${number}", f"{number:,}", f"-{number}")
scores = {answer: dataset.score_answer(answer, entry) for answer in answers}
print(f"reference {number}:", ", ".join(f"{answer} {score}" for answer, score in scores.items()))
assert list(scores.values()) == [1.0, 1.0, 0.01, 1.0], "the behaviour has changed"
PYTHON
