"""The simulated GPU itself: what is wrong on a real one is seen on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.simulated_gpu.run import IS_RUNNING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_RUNNING, reason="python tests/simulated_gpu/run.py pytest ... runs it"),
]
MIB = 1 << 20


def in_a_process(program: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """Run a program on other GPUs than this process has."""
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    command = [sys.executable, "-c", "import torch\n" + textwrap.dedent(program)]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=120, check=False)


def printed(program: str, **environment: object) -> str:
    ended = in_a_process(program, **environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.strip()


def test_its_memory_has_an_end_and_figures_that_follow() -> None:
    program = """
        torch.empty(1, device="cuda")
        before = torch.cuda.mem_get_info()[0]
        held = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
        print(before - torch.cuda.mem_get_info()[0] >> 20, torch.cuda.mem_get_info()[1] >> 20)
        try:
            torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            print("CUDA out of memory" in str(error))
        del held
        torch.cuda.empty_cache()
        print(torch.empty(50 << 20, dtype=torch.uint8, device="cuda").numel() >> 20)
    """
    assert printed(program, SIMULATED_GPU_MEMORY=64 * MIB).split() == ["40", "64", "True", "50"]


def test_processes_share_its_memory_until_they_die(tmp_path: Path) -> None:
    variables = {"SIMULATED_GPU_MEMORY": 64 * MIB, "SIMULATED_GPU_STATE": tmp_path / "state"}
    program = """
        import subprocess, sys
        hold = "import torch, sys; x = torch.empty(40 << 20, dtype=torch.uint8, device='cuda'); print(1, flush=True)"
        other = subprocess.Popen([sys.executable, "-c", hold + "; sys.stdin.read()"], stdin=-1, stdout=-1)
        other.stdout.readline()
        print(torch.cuda.mem_get_info()[0] >> 20)
        other.kill()
        other.wait()
        print(torch.cuda.mem_get_info()[0] >> 20)
    """
    assert printed(program, **variables).split() == ["24", "64"]


def test_memory_that_is_freed_is_gone() -> None:
    program = """
        import ctypes
        held = torch.ones(8 << 20, dtype=torch.uint8, device="cuda")
        address = held.data_ptr()
        torch.cuda.synchronize()
        print(ctypes.string_at(address, 2), flush=True)
        del held
        torch.cuda.empty_cache()
        ctypes.string_at(address, 2)
    """
    ended = in_a_process(program)
    assert ended.stdout.strip() == str(b"\1\1")
    assert ended.returncode == -signal.SIGSEGV


def test_devices_are_those_that_are_visible() -> None:
    program = """
        print(torch.cuda.device_count(), [torch.cuda.get_device_properties(each).uuid for each in range(2)][-1])
    """
    both = printed(program, SIMULATED_GPU_COUNT=3, CUDA_VISIBLE_DEVICES="0,2").split()
    swapped = printed(program, SIMULATED_GPU_COUNT=3, CUDA_VISIBLE_DEVICES="1,2").split()
    assert both == swapped
    assert both[0] == "2"
    assert printed("print(torch.cuda.is_available())", CUDA_VISIBLE_DEVICES="") == "False"


def test_what_is_not_provided_says_its_name() -> None:
    called = in_a_process('import ctypes; ctypes.CDLL("libcuda.so.1").cudaGraphLaunch(None, None)')
    assert called.returncode == -signal.SIGABRT
    assert "cudaGraphLaunch is called, and the simulated GPU does not provide it" in called.stderr


def test_an_operator_that_cannot_be_computed_says_its_name() -> None:
    tensor_BHTD = torch.ones(1, 1, 8, 8, device="cuda")
    with pytest.raises(NotImplementedError, match="cannot compute aten::_flash_attention_forward on the CPU"):
        torch.ops.aten._flash_attention_forward(
            tensor_BHTD, tensor_BHTD, tensor_BHTD, None, None, 8, 8, 0.0, False, False
        )


MISSING_WAITS = """
    import json
    other, source = torch.cuda.Stream(), torch.ones(1000).pin_memory()

    def polled():
        done = other.record_event()
        while not done.query():
            pass

    def found(work, wait):
        there = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            work(there)
        wait()
        return float(there.sum())

    works = {
        "a copy": lambda there: there.copy_(source, non_blocking=True),
        "a kernel": lambda there: there.add_(1),
        "kernels": lambda there: there.add_((there.cos() / 2).sum(0, keepdim=True) / 500),
        "a product": lambda there: torch.mm(there.view(10, 100) + 0.1, torch.ones(100, 100, device="cuda") / 10,
                                            out=there.view(10, 100)),
    }
    waits = {
        "stream": lambda: torch.cuda.current_stream().wait_stream(other),
        "synchronized stream": other.synchronize,
        "synchronized device": torch.cuda.synchronize,
        "event that is asked": polled,
        "nothing": lambda: None,
    }
    print(json.dumps({wait: [round(found(work, waits[wait])) for work in works.values()] for wait in waits}))
"""


@pytest.mark.parametrize("late", [0, 1])
def test_a_wait_that_is_missing_shows_as_a_wrong_result(late: int) -> None:
    found = json.loads(printed(MISSING_WAITS, SIMULATED_GPU_LATE=late))
    without = found.pop("nothing")
    assert set(map(tuple, found.values())) == {(1000, 1000, 1000, 1000)}
    assert without == ([0, 0, 0, 0] if late else [1000, 1000, 1000, 1000])


def test_an_operator_waits_for_the_device_that_its_tensors_are_on() -> None:
    program = """
        source = torch.ones(1000).pin_memory()
        there = torch.zeros(1000, device="cuda:1")
        torch.cuda.synchronize(1)
        there.copy_(source, non_blocking=True)
        print(torch.cuda.current_device(), float(there.sum()))
    """
    assert printed(program, SIMULATED_GPU_LATE=1).split() == ["0", "1000.0"]


def test_random_numbers_follow_from_its_own_seed() -> None:
    def draw() -> list[torch.Tensor]:
        numbers = torch.randn(5, device="cuda"), torch.randperm(9, device="cuda")
        return [each.cpu() for each in (*numbers, torch.nn.functional.dropout(torch.ones(9, device="cuda")))]

    torch.manual_seed(3)
    of_cpu = torch.randn(5)
    torch.manual_seed(3)
    first, state = draw(), torch.cuda.get_rng_state()
    then = draw()
    assert torch.equal(torch.randn(5), of_cpu), "the CPU's generator is another"
    torch.cuda.set_rng_state(state)
    assert all(map(torch.equal, draw(), then))
    torch.cuda.manual_seed(3)
    assert all(map(torch.equal, draw(), first))
    assert not all(map(torch.equal, first, then))


def test_operators_write_where_they_are_told_to() -> None:
    base = torch.zeros(4, 6, device="cuda")
    column = base[:, 2]
    column.add_(torch.arange(4.0, device="cuda"))
    assert base.cpu()[:, 2].tolist() == [0, 1, 2, 3]
    out = torch.empty(0, device="cuda")
    torch.mul(base, 2, out=out)
    assert torch.equal(out.cpu(), base.cpu() * 2)
    assert torch.equal(torch.stack(list(base.unbind(1)), dim=1), base)
    assert base.to("cuda:1").device.index == 1


def test_the_backward_pass_runs_in_torchs_own_threads() -> None:
    torch.manual_seed(0)
    here = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.RMSNorm(8), torch.nn.Linear(8, 1))
    there = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.RMSNorm(8), torch.nn.Linear(8, 1))
    there.load_state_dict(here.state_dict())
    there.cuda()
    inputs = torch.randn(5, 8)
    here(inputs).sum().backward()
    there(inputs.cuda()).sum().backward()
    for own, other in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(other.grad.cpu(), own.grad)
