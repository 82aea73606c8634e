"""How long does planning take, and how much memory, against the size of the model and the number of ranks?

Each case is a process of its own that lays both sides out, surveys (what each link would carry) or plans (a program for
every process, as bytes), so that its peak memory is its own. One core; no weights and no torch. `coordinator plan` is
measured whole, in seconds of a processor, which other work on the machine lengthens less than those of a clock.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from measure import keep_ratios
from pytest_benchmark.fixture import BenchmarkFixture

EXAMPLES = Path(__file__).parents[1] / "examples" / "models"
DEEPSEEK = "DeepSeek-V3"

CASES: dict[str, tuple[str, str, str]] = {  # the model, and the arguments of `Megatron` or `DTensor`, and of `Vllm`
    "Llama-3.1-8B, 8 + 8 ranks": ("Llama-3.1-8B", "DTensor(shard=8)", "Vllm(tp=4, replicas=2)"),
    "Llama-3.1-70B, 32 + 16 ranks": ("Llama-3.1-70B", "Megatron(tp=8, pp=4)", "Vllm(tp=16)"),
    "Qwen3-30B-A3B, 32 + 8 ranks": ("Qwen3-30B-A3B", "Megatron(tp=4, dp=8, ep=8, etp=1)", "Vllm(tp=8)"),
    "Qwen3-235B-A22B, 32 + 32 ranks": ("Qwen3-235B-A22B", "Megatron(tp=4, dp=8, ep=8, etp=1)", "Vllm(tp=32)"),
    "DeepSeek-V3, 64 + 64 ranks": (
        DEEPSEEK,
        "Megatron(pp=8, dp=8, ep=8, num_layers_in_last_stage=5)",
        "Vllm(tp=64)",
    ),
    "DeepSeek-V3, 256 + 256 ranks": (
        DEEPSEEK,
        "Megatron(pp=16, dp=16, ep=16, num_layers_in_last_stage=1)",
        "Vllm(tp=32, replicas=8)",
    ),
    "DeepSeek-V3, 512 + 512 ranks": (
        DEEPSEEK,
        "Megatron(pp=8, dp=64, ep=64, num_layers_in_last_stage=5)",
        "Vllm(tp=32, replicas=16)",
    ),
    "DeepSeek-V3, 1024 + 256 ranks": (
        DEEPSEEK,
        "Megatron(tp=8, pp=8, dp=16, ep=32, etp=1, num_layers_in_last_stage=5)",
        "Vllm(tp=16, dp=16, expert_parallel=True)",
    ),
}


COMMANDS = ["llama-8b-fsdp8-to-tp2", "deepseek-v3-ep64pp8-to-tp64", "deepseek-v3-ep64pp8-to-tp64-disjoint"]
"""Files of ``examples/plans``: a small one, and those with 512 trainers and 512 engine ranks."""


def measure(model: str, training: str, serving: str, what: str) -> dict[str, Any]:
    """Lay out and plan; runs in a process of its own."""
    from tandem.refit import planner, program
    from tandem.refit.adapters.catalogue import make_shape
    from tandem.refit.adapters.deployment import HostNames
    from tandem.refit.adapters.dtensor import DTensor
    from tandem.refit.adapters.megatron import Megatron
    from tandem.refit.adapters.vllm import Vllm

    kinds = {kind.__name__: kind for kind in (DTensor, Megatron, Vllm)}
    assert "torch" not in sys.modules
    begun = time.perf_counter()
    shape = make_shape(json.loads((EXAMPLES / model / "config.json").read_bytes()), "bfloat16")
    sides = [eval(side, kinds) for side in (training, serving)]  # of this file
    sources, engines = (
        {f"{name}-{rank}": held for rank, held in enumerate(side.layouts(shape, HostNames(name)))}
        for name, side in zip(("trainer", "rollout"), sides, strict=True)
    )
    laid_out = time.perf_counter()
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    wanted = sum(_num_bytes(held) for held in engines.values())
    made = (planner.plan if what == "plan" else planner.survey)(sources, engines, allow_alias=False)
    planned = time.perf_counter()
    found: dict[str, Any] = {
        "layouts s": laid_out - begun,
        f"{what} s": planned - laid_out,
        "ranks": [len(sources), len(engines)],
        "tensors": len(shape.tensors),
        "pieces": sum(len(held.pieces) for held in (*sources.values(), *engines.values())),
        "links": len(made.links),
        "copies": sum(link.num_copies for link in made.links),
    }
    # Every engine gets all that it wants, over links of its own.
    assert sum(link.num_bytes for link in made.links) == wanted
    if isinstance(made, planner.TransferPlan):
        sizes = [len(program.encode(each)) for each in made.programs.values()]
        found |= {
            "encode s": time.perf_counter() - planned,
            "programs MB": sum(sizes) / 1e6,
            "largest MB": max(sizes) / 1e6,
        }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**found, "peak MB, laid out": before_bytes / 1e6, "peak MB": peak / 1e6}


def _num_bytes(held: Any) -> int:
    from tandem.refit.layout import ITEM_SIZES

    sizes = [ITEM_SIZES[tensor.dtype] for tensor in held.tensors]
    at = held.pieces
    return sum(
        num * sizes[index] for num, index in zip(at.shape_PD.prod(axis=1).tolist(), at.tensor_P.tolist(), strict=True)
    )


LONG = {
    ("DeepSeek-V3, 64 + 64 ranks", "survey"): 1,
    ("DeepSeek-V3, 64 + 64 ranks", "plan"): 1,
    ("DeepSeek-V3, 256 + 256 ranks", "plan"): 1,
    ("DeepSeek-V3, 512 + 512 ranks", "plan"): 3,
}
"""Minutes of those that are for ``--long``."""


def _case(case: str, what: str) -> Any:
    """Return parameters with the mark that they need."""
    marks = [pytest.mark.long(minutes=LONG[case, what])] if (case, what) in LONG else []
    return pytest.param(case, what, marks=marks)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("case", "what"), [_case(case, what) for case in CASES for what in ("survey", "plan")])
def test_planning(benchmark: BenchmarkFixture, case: str, what: str) -> None:
    arguments = [*CASES[case], what]

    def run() -> dict[str, Any]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    found = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update({**found, "load": os.getloadavg()})
    grown = found["peak MB"] / found["peak MB, laid out"]
    keep_ratios(benchmark, "peak memory, over that before planning", {what: grown})
    shown = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items())
    print(f"\n{case}, {what}: " + ", ".join(shown))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [*COMMANDS[:-1], pytest.param(COMMANDS[-1], marks=pytest.mark.long(minutes=1))])
def test_command(benchmark: BenchmarkFixture, name: str) -> None:
    """Measure all of `coordinator plan`."""
    command = [sys.executable, "-m", "tandem.coordinator.cli", "plan", f"examples/plans/{name}.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    def run() -> dict[str, float]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env=environment, cwd=EXAMPLES.parents[1], check=False
        )
        assert done.returncode == 0, done.stderr
        assert "lower bound" in done.stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {"user s": after.ru_utime - before.ru_utime, "system s": after.ru_stime - before.ru_stime}

    found = benchmark.pedantic(run, rounds=1)
    benchmark.extra_info.update({**found, "load": os.getloadavg()})
    keep_ratios(benchmark, "processor time, of a minute", {name: sum(found.values()) / 60})
    print(f"\n{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
