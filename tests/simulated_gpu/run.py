"""Run a command on GPUs that are simulated on the CPU.

The CUDA build of torch needs a driver and kernels of a GPU. Three libraries stand in for them: one has the functions of
the CUDA runtime, of the driver and of NCCL (`device.h` says what a device is here), one those of NVML, which tells of
devices; both are preloaded. The third has torch's operators, computed by its kernels for the CPU on the same memory
(`operators.cpp`), and is loaded by whoever imports torch (`hook/sitecustomize.py`). They are compiled here, with the
headers that torch brings, once for each version of them. Triton's kernels run in its interpreter.

usage: python tests/simulated_gpu/run.py COMMAND ...

Read from the environment: SIMULATED_GPU_COUNT (2), SIMULATED_GPU_MEMORY (bytes of a device), SIMULATED_GPU_PEERS
(0: no device reaches another's memory), SIMULATED_GPU_LATE (1: what is queued on a stream, kernels and NCCL's
operations too, runs when somebody waits for it and no earlier, so that a wait which is missing shows),
SIMULATED_GPU_CARRIED (a file with a line for what crosses between processes: "nccl" or "ipc", and bytes),
SIMULATED_GPU_STATE (a file in which processes
count what they hold of each device), SIMULATED_GPU_STAND_IN (1: an engine in the place of vLLM's,
`hook/stand_in_engine.py`), CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
IS_RUNNING = "SIMULATED_GPU_OPERATORS" in os.environ
"""Whether GPUs are simulated in this process."""
_RUNTIME = ("device", "runtime", "driver", "nccl")
_DRIVERS = re.compile(r"CUDAAPI\s+(cu\w+)\s*\(")
_RENAMED = re.compile(r"#define\s+cu\w+\s+(cu\w+_v\d+)\b")
_NOT_STUBBED = re.compile(r"^(?!cu|__cuda|nccl).*|.*(_ptsz|_ptds)$")


def build() -> tuple[Path, Path, Path]:
    """Return the libraries for the runtime, for NVML and for the operators; compile them where that has not been done.

    Raises `subprocess.CalledProcessError`, when the compiler has said why.
    """
    site = Path(sysconfig.get_path("purelib"))
    sources = [*sorted(HERE.glob("*.cpp")), HERE / "device.h", Path(__file__)]
    text = b"".join(source.read_bytes() for source in sources) + importlib.metadata.version("torch").encode()
    folder = Path(sys.prefix) / "simulated_gpu" / hashlib.sha256(text).hexdigest()[:16]
    libraries = folder / "libcuda.so.1", folder / "libnvidia-ml.so.1", folder / "liboperators.so"
    if not all(library.exists() for library in libraries):
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            _compile(Path(made), site)
            if not folder.exists():
                os.rename(made, folder)
                os.mkdir(made)  # for what removes it
    return libraries


def environment() -> dict[str, str]:
    """Return the variables that have a command run on simulated GPUs; compile what it needs."""
    runtime, nvml, operators = build()
    python_path = os.pathsep.join(filter(None, [str(HERE / "hook"), os.environ.get("PYTHONPATH")]))
    return {
        "SIMULATED_GPU_COUNT": "2",
        **os.environ,
        "LD_PRELOAD": f"{runtime}:{nvml}",
        "SIMULATED_GPU_OPERATORS": str(operators),
        "PYTHONPATH": python_path,
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",  # what it compiles for a GPU is Triton that is not interpreted
    }


def _compile(folder: Path, site: Path) -> None:
    """Compile both libraries into a folder."""
    cuda, nccl, torch = site / "nvidia/cu13/include", site / "nvidia/nccl/include", site / "torch"
    common = ["g++", "-O1", "-fPIC", "-pthread", f"-I{cuda}", f"-I{cuda / 'cccl'}", f"-I{nccl}"]
    objects = []
    for name in _RUNTIME:
        objects.append(str(folder / f"{name}.o"))
        subprocess.run([*common, "-std=c++17", "-c", str(HERE / f"{name}.cpp"), "-o", objects[-1]], check=True)
    stubs = folder / "stubs.cpp"
    provided = _functions([*map(Path, objects)], "--extern-only")
    wanted = _functions([site / "nvidia/cu13/lib/libcudart.so.13", site / "nvidia/nccl/lib/libnccl.so.2"], "--dynamic")
    # The driver's library is not there to be asked: its names are those that the header gives them.
    header = (cuda / "cuda.h").read_text()
    wanted |= {*_DRIVERS.findall(header), *_RENAMED.findall(header)}
    lines = ["namespace simulated { [[noreturn]] void missing(const char*); }", 'extern "C" {']
    for name in sorted(wanted - provided):
        if not _NOT_STUBBED.match(name):
            lines.append(f'void {name}() {{ simulated::missing("{name}"); }}')
    stubs.write_text("\n".join([*lines, "}", ""]))
    runtime, operators = folder / "libcuda.so.1", folder / "liboperators.so"
    subprocess.run(
        [*common, "-w", "-shared", str(stubs), *objects, "-Wl,-soname,libcuda.so.1", "-o", str(runtime)], check=True
    )
    nvml = ["-std=c++17", "-shared", str(HERE / "nvml.cpp"), str(runtime), "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([*common, *nvml, "-o", str(folder / "libnvidia-ml.so.1")], check=True)
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
    source = str(HERE / "operators.cpp")
    libraries = [f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    subprocess.run(
        [*common, "-std=c++20", "-w", *headers, "-shared", source, *libraries, "-o", str(operators)], check=True
    )


def _functions(files: list[Path], how: str) -> set[str]:
    """Return the names that object files define."""
    command = ["nm", how, "--defined-only", "--format=posix", *map(str, files)]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split("@")[0].split()[0] for line in lines if line and not line.endswith(":")}


if __name__ == "__main__":
    variables = environment()
    os.execvpe(sys.argv[1], sys.argv[1:], variables)
