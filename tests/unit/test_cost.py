"""What a refit takes: figures that can be worked out by hand."""

from __future__ import annotations

import pytest

from tandem.config.schema import LinkRates
from tandem.refit.cost import cost
from tandem.refit.layout import Layout, LayoutBuilder
from tandem.refit.planning.flows import FlowLink

RATES = LinkRates(memory=5.0, same_gpu=1000.0, peer_gpu=100.0, network=10.0)


def on(host: str, device: str = "cpu") -> Layout:
    return LayoutBuilder(host, device).build()


def link(
    source: str, destination: str, transport: str, gigabytes: float, round_: int = 0, widening: int = 1
) -> FlowLink:
    return FlowLink(
        source=source,
        destination=destination,
        transport=transport,
        reason="",
        round=round_,
        num_bytes=int(gigabytes * 1e9),
        num_read=int(gigabytes * 1e9 * widening),
        num_copies=1,
        num_tensors=1,
    )


def test_copies_out_of_shared_memory_take_the_receivers_time() -> None:
    layouts = {"trainer-0": on("a"), "rollout-0": on("a"), "rollout-1": on("a")}
    found = cost([link("trainer-0", f"rollout-{i}", "shm", 10) for i in range(2)], layouts, 1, RATES)
    assert (found.seconds, found.bound_s) == (2.0, 2.0)
    assert (found.egress_s, found.ingress_s, found.install_s) == (0.0, 2.0, 2.0)
    assert found.limited_by == "rollout-1 receives 10 GB in memory"


def test_a_sender_that_does_it_all_is_slower_than_the_bound() -> None:
    layouts = {"trainer-0": on("a"), "trainer-1": on("a"), "rollout-0": on("b"), "rollout-1": on("c")}
    uneven = [link("trainer-0", "rollout-0", "stream", 10), link("trainer-0", "rollout-1", "stream", 10)]
    found = cost(uneven, layouts, 2, RATES)
    assert (found.seconds, found.bound_s) == (2.0, 2.0)  # cpu memory is slower still: 10 GB at 5 GB/s
    fast = LinkRates(memory=100.0, same_gpu=1000.0, peer_gpu=100.0, network=10.0)
    found = cost(uneven, layouts, 2, fast)
    assert (found.seconds, found.bound_s, found.egress_s) == (2.0, 1.0, 1.0)
    assert found.limited_by == "trainer-0 sends 20 GB over the network"


def test_rounds_follow_each_other() -> None:
    layouts = {"trainer-0": on("a", "g0"), "rollout-0": on("b", "g1"), "rollout-1": on("b", "g2")}
    links = [
        link("trainer-0", "rollout-0", "stream", 1),
        link("trainer-0", "rollout-1", "stream", 1),
        link("rollout-0", "rollout-1", "stream", 1, 1),
        link("rollout-1", "rollout-0", "stream", 1, 1),
    ]
    found = cost(links, layouts, 1, RATES)
    assert found.seconds == pytest.approx(2 / 10 + 1 / 100)
    assert found.bound_s == pytest.approx(2 / 10)


def test_a_gpu_reads_its_own_memory_faster_than_a_neighbours() -> None:
    layouts = {"trainer-0": on("a", "g0"), "trainer-1": on("a", "g1"), "rollout-0": on("a", "g0")}
    found = cost([link("trainer-0", "rollout-0", "cuda_ipc", 10)], layouts, 2, RATES)
    assert found.seconds == pytest.approx(10 / 1000)
    found = cost([link("trainer-1", "rollout-0", "cuda_ipc", 10)], layouts, 2, RATES)
    assert found.seconds == found.ingress_s == pytest.approx(10 / 100)
    assert found.limited_by == "rollout-0 receives 10 GB from GPU to GPU"


def test_what_is_read_in_a_larger_type_takes_longer_and_what_is_sent_does_not() -> None:
    layouts = {"trainer-0": on("a", "g0"), "rollout-0": on("a", "g1"), "rollout-1": on("b", "g2")}
    pulled = cost([link("trainer-0", "rollout-0", "cuda_ipc", 10, widening=2)], layouts, 1, RATES)
    assert pulled.seconds == pytest.approx(20 / 100)
    sent = cost([link("trainer-0", "rollout-1", "stream", 10, widening=2)], layouts, 1, RATES)
    assert sent.seconds == pytest.approx(10 / 10)


def test_what_is_read_in_place_takes_nothing() -> None:
    found = cost([link("trainer-0", "rollout-0", "alias", 0)], {"trainer-0": on("a"), "rollout-0": on("a")}, 1, RATES)
    assert (found.seconds, found.bound_s, found.limited_by) == (0.0, 0.0, "nothing: no byte moves")
