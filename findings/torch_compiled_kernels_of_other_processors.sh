#!/usr/bin/env bash
# torch 2.13's compiler takes kernels of another instruction set from its cache.
#
# Behaviour: the key of a compiled graph has its operations, shapes and settings, and not the instruction set that
# its C++ was written for. A process that may use fewer instructions (an older processor, or as here
# ATEN_CPU_CAPABILITY=default) finds the graph, and builds or loads C++ that is not its own.
# Surprise: hosts that share TORCHINDUCTOR_CACHE_DIR, as a home on NFS makes them, have to be alike; a function that
# compiles in an empty folder cannot be compiled in one where another host was first.
# Seen:
#   AVX2, empty cache: equal
#   DEFAULT, empty cache: equal
#   DEFAULT, cache of AVX2: BackendCompilerFailed
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy setuptools 2> /dev/null
cat > compile.py <<'PY'
import sys

import torch


def double_plus_one(values):
    return values * 2 + 1


values = torch.arange(64.0)
try:
    is_equal = torch.equal(torch.compile(double_plus_one)(values), double_plus_one(values))
    outcome = "equal" if is_equal else "other values"
except Exception as error:
    outcome = type(error).__name__
print(f"{torch.backends.cpu.get_cpu_capability()}, {sys.argv[1]}: {outcome}")
PY
run() { ATEN_CPU_CAPABILITY=$1 TORCHINDUCTOR_CACHE_DIR=$folder/$2 CUDA_VISIBLE_DEVICES= venv/bin/python compile.py "$3" 2> /dev/null; }
{
  run avx2 shared "empty cache"
  run default own "empty cache"
  run default shared "cache of AVX2"
} | tee seen
diff seen - <<'SEEN'
AVX2, empty cache: equal
DEFAULT, empty cache: equal
DEFAULT, cache of AVX2: BackendCompilerFailed
SEEN
