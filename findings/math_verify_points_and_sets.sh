#!/usr/bin/env bash
# math-verify 0.9.0: a point equals a set of its coordinates, and equality is neither symmetric nor transitive there.
#
# Behaviour: `(1,2)` is read as an open interval, which is compared with a set as a list of two numbers in rising order;
# `(2,1)` is read as a tuple, which only equals the set when it stands as the answer.
# Surprise: the point (1,2) and the set {1,2} are the same, and the sets {1,2} and {2,1} are, but the point and {2,1}
# are not. Whether (2,1) equals {1,2} depends on which of the two is the reference.
# Seen:
#   reference (1,2), answer \{1,2\}: True
#   reference \{1,2\}, answer \{2,1\}: True
#   reference (1,2), answer \{2,1\}: False
#   reference (2,1), answer \{1,2\}: False
#   reference \{1,2\}, answer (2,1): True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" "math-verify[antlr4_13_2]==0.9.0" \
  latex2sympy2_extended==1.11.0 sympy==1.14.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
from math_verify import parse, verify

PAIRS = {
    ("(1,2)", r"\{1,2\}"): True,
    (r"\{1,2\}", r"\{2,1\}"): True,
    ("(1,2)", r"\{2,1\}"): False,
    ("(2,1)", r"\{1,2\}"): False,
    (r"\{1,2\}", "(2,1)"): True,
}
seen = {pair: verify(*(parse(f"${value}$") for value in pair)) for pair in PAIRS}
for (gold, answer), equal in seen.items():
    print(f"reference {gold}, answer {answer}: {equal}")
assert seen == PAIRS, "the behaviour has changed"
PYTHON
