"""Megatron-Core's stand-ins for CUDA are for machines without it: where there is a GPU, nothing imports them."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import tandem.trainer.backends.megatron as backend

FOLDER = Path(backend.__file__).parent
FENCED = "tandem.trainer.backends.megatron.on_cpu"


def test_no_module_outside_of_them_imports_them_when_it_is_imported() -> None:
    for path in FOLDER.parents[1].rglob("*.py"):
        if path.parent.name == "on_cpu":
            continue
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ImportFrom):
                named = {f"{statement.module}.{alias.name}" for alias in statement.names}
                assert not [name for name in named if name.startswith(FENCED)], path


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_process_with_a_gpu_does_without_them(has_gpu: bool) -> None:
    probe = (
        "import sys, torch\n"
        f"torch.cuda.is_available = lambda: {has_gpu}\n"
        "from tandem.trainer.backends.megatron import preparing\n"
        "preparing.prepare()\n"
        "from tandem.trainer.backends.megatron import backend, model\n"
        "preparing.has_kernels(), model._modules()\n"
        f"print([name for name in sys.modules if name.startswith({FENCED!r})] != [])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == [str(not has_gpu)], done.stderr
