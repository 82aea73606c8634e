#!/usr/bin/env bash
# safetensors 0.8.0 saves a NumPy array in Fortran order with its shape but with the numbers in other places.
#
# Behaviour: `safetensors.numpy.save` writes the array's memory in the order it lies there, and the format has row-major
# order only. Reading back gives the right shape and type and a permuted content; no error, no warning. The
# documentation asks for contiguous and dense arrays, which NumPy says this one is (`flags.f_contiguous`).
# Surprise: `numpy.save` keeps the values, and safetensors' PyTorch interface refuses a transposed tensor by an error.
# Exporting a weight as `array.T` is the ordinary way to turn between layouts; the file loads, the model is broken.
# Seen:
#   row-major: [[0, 1, 2], [3, 4, 5]] read back as [[0, 1, 2], [3, 4, 5]]
#   Fortran order: [[0, 1, 2], [3, 4, 5]] read back as [[0, 3, 1], [4, 2, 5]]
#   transposed: [[0, 3], [1, 4], [2, 5]] read back as [[0, 1], [2, 3], [4, 5]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install --quiet --no-deps --target "$folder/packages" safetensors==0.8.0 numpy==2.4.6
cd "$folder"

PYTHONPATH=packages python3 <<'PYTHON'
import numpy as np
from safetensors.numpy import load, save

matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
cases = {"row-major": matrix, "Fortran order": np.asfortranarray(matrix), "transposed": matrix.T}
kept = []
for name, array in cases.items():
    back = load(save({"weight": array}))["weight"]
    assert array.flags.forc
    kept.append(np.array_equal(array, back))
    print(f"{name}: {array.astype(int).tolist()} read back as {back.astype(int).tolist()}")
assert kept == [True, False, False], "the behaviour has changed"
PYTHON
