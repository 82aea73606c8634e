#!/usr/bin/env bash
# reasoning-gym 0.1.25: the task coin_flip accepts 0 for a probability that is not 0.
#
# Behaviour: an answer within 1e-4 of the reference scores 1. With the default settings some references are smaller than
# that tolerance, such as fifteen heads in fifteen flips, 1/32768.
# Surprise: the question asks for a probability, and both 0 and three times the right value count as right.
# Seen:
#   7 of 300 references below 1e-4
#   reference 3.051757812e-05: 1/32768 1.0, 0 1.0, 0.0001 1.0, 0.001 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" reasoning-gym==0.1.25
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import reasoning_gym

dataset = reasoning_gym.create_dataset("coin_flip", size=300, seed=1)
small = [entry for entry in dataset if 0 < float(entry["answer"]) < 1e-4]
print(len(small), "of 300 references below 1e-4")
scores = {answer: dataset.score_answer(answer, small[0]) for answer in ("1/32768", "0", "0.0001", "0.001")}
print(f"reference {small[0]['answer']}:", ", ".join(f"{answer} {score}" for answer, score in scores.items()))
assert list(scores.values()) == [1.0, 1.0, 1.0, 0.0], "the behaviour has changed"
PYTHON
