#!/usr/bin/env bash
# math-verify 0.9.0 reads scientific notation with Euler's number: 1e-5 is e - 5.
#
# Behaviour: inside \boxed{} or dollar signs the `e` of `1e-5` becomes the constant 2.718..., so the value is e - 5,
# and `2.5e10` is 25 e. Outside of them the number stops before the `e`: `1e-5` is 1.
# Surprise: this is how Python prints small and large floats. A model that computes 0.00001 and boxes it as
# 1e-5 is marked wrong, and an unboxed 1e-5 is marked as equal to 1.
# Seen:
#   \boxed{1e-5} is -2.28172, equals \boxed{0.00001}: False
#   \boxed{2.5e10} is 67.957
#   1e-5 is 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --target "$folder/packages" "math-verify[antlr4_13_2]==0.9.0" \
  latex2sympy2_extended==1.11.0 sympy==1.14.0
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import math

from math_verify import parse, verify

boxed, large, bare = (parse(text) for text in (r"\boxed{1e-5}", r"\boxed{2.5e10}", "1e-5"))
equal = verify(parse(r"\boxed{0.00001}"), boxed)
print(rf"\boxed{{1e-5}} is {float(boxed[0]):.6g}, equals \boxed{{0.00001}}: {equal}")
print(rf"\boxed{{2.5e10}} is {float(large[0]):.6g}")
print("1e-5 is", float(bare[0]))
unchanged = math.isclose(boxed[0], math.e - 5) and not equal and math.isclose(large[0], 25 * math.e) and bare[0] == 1
assert unchanged, "the behaviour has changed"
PYTHON
