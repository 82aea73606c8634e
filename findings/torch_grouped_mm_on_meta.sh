#!/usr/bin/env bash
# torch 2.13.0 refuses on the device meta the grouped product of float32 that it computes on the CPU.
#
# Behaviour: `torch._grouped_mm` multiplies rows by the matrix of their group, which is how Transformers 5.24 runs the
# experts of a layer. On a CPU it takes float32 and gives what a loop over the groups gives. Its function for tensors
# without elements, which says what shape an operator returns, raises for float32, and takes bfloat16.
# Surprise: that function stands for the operator wherever shapes are asked for, in tracing and in estimates of memory,
# and is stricter than it: a model with experts in float32 runs, and cannot be run on meta.
# Seen:
#   cpu float32: equal to a loop
#   meta float32: RuntimeError, BF16 is expected
#   meta bfloat16: (4, 8)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"

cat >multiply.py <<'PYTHON'
import torch

torch.manual_seed(0)
ends = torch.tensor([3, 4], dtype=torch.int32)
rows, matrices = torch.randn(4, 8), torch.randn(2, 8, 8)
loop = torch.cat([rows[:3] @ matrices[0], rows[3:] @ matrices[1]])
is_equal = torch.allclose(torch._grouped_mm(rows, matrices, offs=ends), loop, atol=1e-5)
print("cpu float32:", "equal to a loop" if is_equal else "another result")
for dtype in (torch.float32, torch.bfloat16):
    rows, matrices = torch.empty(4, 8, dtype=dtype, device="meta"), torch.empty(2, 8, 8, dtype=dtype, device="meta")
    name = str(dtype).removeprefix("torch.")
    try:
        print(f"meta {name}:", tuple(torch._grouped_mm(rows, matrices, offs=ends.to("meta")).shape))
    except RuntimeError as error:
        print(f"meta {name}: RuntimeError,", "BF16 is expected" if "BF16" in str(error) else error)
PYTHON
"$folder/venv/bin/python" multiply.py 2>"$folder/errors" >output.txt || { cat "$folder/errors"; exit 1; }
cat output.txt
diff output.txt - <<'SEEN'
cpu float32: equal to a loop
meta float32: RuntimeError, BF16 is expected
meta bfloat16: (4, 8)
SEEN
