"""An optimizer's state that waits in host memory: nothing of it is lost, and the device has its memory meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tandem.trainer.backends.holding import OffloadedStorages, state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

NUM = 1 << 22
"""So many that a tensor has memory of its own: small ones share theirs with what stays."""


def test_the_state_comes_back_as_it_was_and_its_memory_is_free_meanwhile() -> None:
    device = torch.device("cuda")
    parameter = torch.nn.Parameter(torch.randn(NUM, device=device))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    held = state_of(optimizer, device)
    before, free = [each.clone().cpu() for each in held], torch.cuda.mem_get_info()[0]
    offloaded = OffloadedStorages(held)
    assert torch.cuda.mem_get_info()[0] >= free + 2 * 4 * NUM, "two moments of float32 are with the device still"
    assert all(host.is_pinned() for _, parts in offloaded._held for host in parts)
    offloaded.reload()
    assert all(torch.equal(own.cpu(), was) for own, was in zip(held, before, strict=True))
    optimizer.step()
    assert parameter.isfinite().all()


def test_pinned_memory_is_as_large_as_what_is_moved() -> None:
    tensor = torch.arange((9 << 20) // 4 + 3, dtype=torch.int32, device="cuda")  # torch would pin 16 MiB for it
    before = pinned_bytes()
    offloaded = OffloadedStorages([tensor])
    held = tensor.numel() * 4
    # A device's storage may be larger than its tensor, and the last part is rounded up.
    assert held <= pinned_bytes() - before <= held + (1 << 20)
    offloaded.reload()
    assert torch.equal(tensor.cpu(), torch.arange(held // 4, dtype=torch.int32))


def pinned_bytes() -> int:
    """Return how much has been taken so far, whether or not it was given back."""
    return int(torch.cuda.host_memory_stats()["active_bytes.allocated"])


def test_copies_are_waited_for_before_the_memory_goes() -> None:
    program = """
        import torch
        from tandem.trainer.backends.holding import OffloadedStorages
        tensor = torch.arange(1000.0, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # not the default stream, which much else waits for
            offloaded = OffloadedStorages([tensor])
            offloaded.reload()
        print(float(tensor.sum()))
    """
    # Where GPUs are simulated: what nobody waits for does not happen.
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "SIMULATED_GPU_LATE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout.strip() == "499500.0", ended.stderr
