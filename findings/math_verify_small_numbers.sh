#!/usr/bin/env bash
# math-verify 0.9.0 takes different small numbers for equal: the charge of an electron equals its mass.
#
# Behaviour: two numbers are compared after rounding, by default to 6 decimal places behind the point (the argument
# `float_rounding`), whatever their size. So below about 5e-7 all numbers written as decimals are one, however many
# significant digits differ.
# Surprise: a wrong answer to a question of physics or of small probabilities is rewarded as correct. Zero, an integer,
# is told from them, so a test with 0 does not show it.
# Seen:
#   1.6\times 10^{-19} and 9.1\times 10^{-31}: True
#   0.0000001 and 0.0000002: True
#   0.0001 and 0.0002: False
#   0.0000001 and 0: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" "math-verify[antlr4_13_2]==0.9.0" \
  latex2sympy2_extended==1.11.0 sympy==1.14.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
from math_verify import parse, verify

PAIRS = {
    (r"1.6\times 10^{-19}", r"9.1\times 10^{-31}"): True,
    ("0.0000001", "0.0000002"): True,
    ("0.0001", "0.0002"): False,
    ("0.0000001", "0"): False,
}
seen = {pair: verify(*(parse(f"${number}$") for number in pair)) for pair in PAIRS}
for (gold, answer), equal in seen.items():
    print(f"{gold} and {answer}: {equal}")
assert seen == PAIRS, "the behaviour has changed"
PYTHON
