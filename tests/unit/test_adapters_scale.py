"""Layouts of the largest models come in seconds and in little memory, and cover every element."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tandem.refit.adapters.catalogue import ModelShape, make_shape
from tandem.refit.adapters.deployment import HostNames, ParallelDeployment
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.layout import Layout

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
DEPLOYMENTS = {
    "EP64 × PP8": ("DeepSeek-V3", Megatron(pp=8, dp=64, ep=64, num_layers_in_last_stage=5), 1),
    "TP64": ("DeepSeek-V3", Vllm(tp=64), 1),
    "PP16 × EP16": ("DeepSeek-V3", Megatron(pp=16, dp=16, ep=16, num_layers_in_last_stage=1), 1),
    "TP32 × 8 engines": ("DeepSeek-V3", Vllm(tp=32, replicas=8), 8),
    "TP8 × PP8 × EP32": (
        "DeepSeek-V3",
        Megatron(tp=8, pp=8, dp=16, ep=32, etp=1, num_layers_in_last_stage=5),
        4,
    ),
    "TP16 × DP16 with EP": ("DeepSeek-V3", Vllm(tp=16, dp=16, expert_parallel=True), 1),
    "FSDP512": ("DeepSeek-V3", DTensor(shard=512), 1),
    "Qwen3 TP4 × EP8": ("Qwen3-235B-A22B", Megatron(tp=4, dp=8, ep=8, etp=1), 4),
    "Llama TP8 × PP4": ("Llama-3.1-70B", Megatron(tp=8, pp=4), 1),
    "Llama TP16": ("Llama-3.1-70B", Vllm(tp=16), 1),
}


def example(name: str) -> ModelShape:
    return make_shape(json.loads((EXAMPLES / name / "config.json").read_bytes()))


def num_elements(layouts: Sequence[Layout], among: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Elements that all processes hold of some of the tensors, each as often as it is held."""
    total, seen = 0, {}
    for layout in layouts:
        at = layout.pieces
        if id(at) not in seen:
            seen[id(at)] = int(at.shape_PD.prod(axis=1)[among[at.tensor_P]].sum())
        total += seen[id(at)]
    return total


@pytest.mark.parametrize(("name", "sizes", "copies"), DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_a_deployment_is_laid_out_whole_in_seconds(name: str, sizes: ParallelDeployment, copies: int) -> None:
    model = example(name)
    begun = time.process_time()
    layouts = sizes.layouts(model, HostNames("host"))
    # A few seconds on one quiet core, where most take under one.
    assert time.process_time() - begun < 20
    assert len(layouts) == sizes.num_ranks
    assert all(layout.tensors is model.tensors for layout in layouts), "ranks share the names"
    assert len({layout.device for layout in layouts}) == sizes.num_ranks
    assert len({layout.host for layout in layouts}) == -(-sizes.num_ranks // 8)
    # Sums decide here, because smaller models of the same adapters are compared element by element elsewhere.
    of_experts = np.array([".experts." in tensor.name for tensor in model.tensors])
    if of_experts.any():
        total = sum(int(np.prod(tensor.shape)) for tensor in model.tensors if ".experts." in tensor.name)
        assert num_elements(layouts, of_experts) == copies * total
    else:
        whole = np.array([tensor.name.endswith("proj.weight") and ".k_" not in tensor.name for tensor in model.tensors])
        whole &= np.array([".v_" not in tensor.name for tensor in model.tensors])
        total = sum(int(np.prod(t.shape)) for t, is_whole in zip(model.tensors, whole, strict=True) if is_whole)
        assert num_elements(layouts, whole) == copies * total


def test_columns_of_replicas_are_shared() -> None:
    layouts = Vllm(tp=2, replicas=3).layouts(example("Qwen3-30B-A3B"), HostNames("host"))
    assert layouts[0].pieces is layouts[2].pieces is layouts[4].pieces
    assert layouts[0].pieces is not layouts[1].pieces


def test_memory_is_that_of_the_columns() -> None:
    model = example("DeepSeek-V3")
    tracemalloc.start()
    layouts = Vllm(tp=8).layouts(model, HostNames("host"))
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    columns = sum(layout.pieces.tensor_P.nbytes * 9 for layout in layouts)
    assert held < 1.5 * columns
    assert most < 2 * columns


def test_adapters_import_no_torch() -> None:
    names = ("huggingface", "dtensor", "megatron", "vllm", "catalogue")
    script = "import sys; from tandem.refit.adapters import " + ", ".join(names) + "; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "False"
