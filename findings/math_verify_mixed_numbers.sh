#!/usr/bin/env bash
# math-verify 0.9.0 reads the mixed number 2 3/4 as 5/4 inside dollar signs and as 3 outside of them.
#
# Behaviour: in LaTeX, `2 3/4` becomes (2 + 3)/4; in plain text only one whole number of it is kept. `2\frac{3}{4}` is
# 11/4 as expected.
# Surprise: each reading is a valid number, so nothing fails: the right answer 2 3/4 is marked wrong, and it is marked
# right where the reference is 5/4 or 3.
# Seen:
#   $2\frac{3}{4}$ is 11/4
#   $2 3/4$ is 5/4
#   \boxed{2 3/4} is 5/4
#   The answer is 2 3/4. is 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" "math-verify[antlr4_13_2]==0.9.0" \
  latex2sympy2_extended==1.11.0 sympy==1.14.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
from math_verify import parse

VALUES = {r"$2\frac{3}{4}$": "11/4", "$2 3/4$": "5/4", r"\boxed{2 3/4}": "5/4", "The answer is 2 3/4.": "3"}
seen = {text: str(parse(text)[0]) for text in VALUES}
for text, value in seen.items():
    print(text, "is", value)
assert seen == VALUES, "the behaviour has changed"
PYTHON
