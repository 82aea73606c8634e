"""What does a step of 1,024 samples x 8,192 tokens cost the coordinator, for 8, 64 and 512 trainer ranks?

The coordinator's own parts do what they do in a run: they ask up to 128 engines for samples, admit and check
every record that comes back, make a batch of them, assign it, and send every rank its command; the step is over when
every rank has answered. Ranks and engines are stand-ins, a few processes with many sockets each, that speak the real
protocol and compute nothing. Processor time is that of the coordinator's process, with the threads of its sockets.

Beside it stands the former way: the arrays of every sample come to the coordinator, which joins them to one batch and
sends that to every rank. It is measured for 8 ranks, and with ``--long`` for 64: for 512 it would be 39 GB in
stand-ins' memory.

The goal: under 0.5 s of processor time for any number of ranks, and bytes that do not depend on tokens.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.measure import keep_ratios
from benchmarks.sample_plane import GROUP_SIZE, NUM_GROUPS, cluster_of
from benchmarks.smoke import IS_SMOKE, sized

LENGTHS = (512, 8192)
CLUSTERS = sized(((8, 8), (64, 64), (512, 128)), ((2, 2),))
"""Ranks and engines."""
MOST_RANKS_OF_THE_FORMER_WAY = sized(8, 8, long=64)
NUM_ROUNDS = sized(3, 1, long=5)
GOAL_S = 0.5


@pytest.mark.timeout(1800)
def test_a_step_of_the_coordinator(benchmark: BenchmarkFixture) -> None:
    found: dict[str, Any] = {}

    def measure() -> None:
        for num_ranks, num_engines in CLUSTERS:
            for length in LENGTHS:
                with cluster_of(num_ranks, num_engines, length) as cluster:
                    cluster.step()  # warms up
                    rounds = [cluster.step() for _ in range(NUM_ROUNDS)]
                    name = f"{num_ranks} ranks, {num_engines} engines, {length} tokens"
                    found[name] = {
                        "seconds of processor time, medians": {
                            part: statistics.median(each[part] for each in rounds) for part in rounds[0]
                        },
                        "seconds of processor time, all rounds": [each["all"] for each in rounds],
                        "bytes to each rank": cluster.bytes_to_ranks // num_ranks,
                    }
                    if num_ranks <= MOST_RANKS_OF_THE_FORMER_WAY:
                        former = cluster.former_step()["all"]
                        found[name]["former way: seconds of processor time"] = former
                        found[name]["former way: bytes to each rank"] = cluster.bytes_to_ranks // num_ranks

    benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update(
        {
            "samples": NUM_GROUPS * GROUP_SIZE,
            "load average of the machine": os.getloadavg(),
            "steps": found,
        }
    )
    of_former = "former way: seconds of processor time"
    keep_ratios(
        benchmark,
        "the former way, times as long",
        {
            name: step[of_former] / step["seconds of processor time, medians"]["all"]
            for name, step in found.items()
            if of_former in step
        },
    )
    print()
    for name, step in found.items():
        seconds = step["seconds of processor time, medians"]
        former = step.get("former way: seconds of processor time")
        beside = f"; the former way {former:.2f} s" if former is not None else ""
        print(f"{name}: {1e3 * seconds['all']:.0f} ms, {step['bytes to each rank']} bytes to each rank{beside}")
    for num_ranks, num_engines in CLUSTERS:
        sizes = {found[f"{num_ranks} ranks, {num_engines} engines, {n} tokens"]["bytes to each rank"] for n in LENGTHS}
        assert len(sizes) == 1, "bytes depend on tokens"
    assert IS_SMOKE or max(step["seconds of processor time, medians"]["all"] for step in found.values()) < GOAL_S
