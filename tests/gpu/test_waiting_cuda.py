"""A stream that computes on a GPU and waits for another: what is counted as its wait, and what is not."""

from __future__ import annotations

import time

import pytest
import torch

from tandem.trainer.rank_time import measured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]

CYCLES = 4_000_000_000
"""Of a GPU's clock: about two seconds, beside which it does not count what a busy machine takes."""


def test_a_stream_waits_for_another_that_is_busy() -> None:
    other = torch.cuda.Stream()
    started = time.perf_counter()
    with measured(torch.device("cuda")) as found:
        with torch.cuda.stream(other):
            torch.cuda._sleep(CYCLES)
            done = other.record_event()
        torch.cuda.current_stream().wait_event(done)
    total_s = time.perf_counter() - started
    assert found.waited_s > 0.9 * total_s
    assert found.compute_s < 0.1 * total_s


def test_its_own_work_is_no_wait_nor_is_what_other_streams_do_meanwhile() -> None:
    other = torch.cuda.Stream()
    with measured(torch.device("cuda")) as found:
        with torch.cuda.stream(other):
            torch.cuda._sleep(CYCLES // 4)
            done = other.record_event()
        torch.cuda._sleep(CYCLES)
        torch.cuda.current_stream().wait_event(done)
    assert found.waited_s < 0.1 * found.compute_s


def test_collectives_are_called_as_before_once_it_is_over() -> None:
    group = torch.distributed.ProcessGroup(0, 1)
    methods = {name: vars(torch.distributed.ProcessGroup)[name] for name in ("allreduce", "barrier", "broadcast")}
    with measured(torch.device("cuda")):
        pass
    assert {name: vars(torch.distributed.ProcessGroup)[name] for name in methods} == methods
    with pytest.raises(RuntimeError):  # of the group, which has no backend: its method was found
        group.barrier()
