"""Transports are objects that the planner asks: one more is a module and a line in the registry."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from spool_transport import Spool

from tandem.common.errors import RefitError
from tandem.config.schema import LinkRates
from tandem.refit import program as programs
from tandem.refit.cost import bucket_memory, cost
from tandem.refit.layout import (
    CudaMemory,
    Layout,
    LayoutBuilder,
    PrivateMemory,
    SharedMemory,
    UnpeeredCudaMemory,
    contiguous_strides,
    whole,
)
from tandem.refit.planner import plan, survey
from tandem.refit.planning.flows import FlowLink
from tandem.refit.transports import registry
from tandem.refit.transports.transport import Route
from tandem.refit.weights import bind

RATES = LinkRates(memory=5.0, same_gpu=1000.0, peer_gpu=100.0, network=10.0)
SHAPE = (64, 8)


def make(host: str) -> Layout:
    """Describe one tensor, whole, in private memory."""
    builder = LayoutBuilder(host)
    storage = builder.storage("w", 4 * 64 * 8)
    builder.add(builder.tensor("w", SHAPE, "float32"), whole(SHAPE), storage, 0, contiguous_strides(SHAPE, 4))
    return builder.build()


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spool:
    transport = Spool(tmp_path)
    monkeypatch.setitem(registry.TRANSPORTS, transport.name, transport)
    return transport


@pytest.mark.usefixtures("spool")
def test_a_transport_that_is_registered_is_planned_with_and_moves_bytes() -> None:
    sources = {"trainer-0": make("a"), "trainer-1": make("b")}
    engines = {"rollout-0": make("a"), "rollout-1": make("a")}
    made = plan(sources, engines, allow_alias=False, grain=1)
    assert {link.transport for link in made.links} == {"spool"}, "also what engines pass on to each other"
    assert {link.reason for link in made.links if link.round == 0} == {"same host, which has a spool"}
    assert {link.source for link in made.links if link.round == 0} == {"trainer-0"}, "its other replica is far"
    assert {link.round for link in made.links} == {0, 1}
    assert not made.transfer_groups

    values = torch.arange(512.0).reshape(SHAPE)
    memory = {member: values.clone() if member in sources else torch.zeros(SHAPE) for member in made.programs}
    bound = {
        member: bind(programs.decode(programs.encode(made.programs[member])), {"w": memory[member]})
        for member in made.programs
    }
    with ThreadPoolExecutor(len(bound)) as threads:
        for version in (1, 2):
            memory["trainer-0"].copy_(values * version)
            counted = [run.result() for run in [threads.submit(each.run, 20.0) for each in bound.values()]]
            assert all(torch.equal(memory[engine], values * version) for engine in engines)
    moved = {name: num_bytes for each in counted for name, num_bytes in each.items()}
    assert moved == {link.name: link.num_bytes for link in made.links}
    assert sum(link.num_bytes for link in made.links if link.round == 0) == values.nbytes, "it is sent there once"


@pytest.mark.usefixtures("spool")
def test_a_transport_that_is_registered_has_a_price() -> None:
    sources, engines = {"trainer-0": make("a")}, {"rollout-0": make("a")}
    (link,) = survey(sources, engines, allow_alias=False).links
    assert link.transport == "spool"
    assert cost([link], {**sources, **engines}, 1, RATES).limited_by.startswith("trainer-0 sends")
    assert cost([link], {**sources, **engines}, 1, RATES).seconds == pytest.approx(2048 / 5e9)
    assert bucket_memory([link]) == {"trainer-0": 2048, "rollout-0": 2048}


@pytest.mark.usefixtures("spool")
def test_where_a_transport_does_not_reach_another_is_taken() -> None:
    links: tuple[FlowLink, ...] = survey({"t": make("a")}, {"e": make("b")}, allow_alias=False).links
    assert [(link.transport, link.reason) for link in links] == [("stream", "different hosts")]


def test_a_place_that_no_transport_reaches_is_an_error(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TRANSPORTS", {spool.name: spool})
    with pytest.raises(RefitError, match="no transport brings bytes out of PrivateMemory from another host"):
        survey({"t": make("a")}, {"e": make("b")}, allow_alias=False)


def test_a_program_with_a_transport_that_does_not_exist_is_refused() -> None:
    made = plan({"t": make("a")}, {"e": make("b")}, allow_alias=False).programs["e"]
    damaged = programs.encode(made).replace(b"stream", b"strean")
    with pytest.raises(RefitError, match=r"no transport 'strean', only stream, shm, .*; did you mean 'stream'\?"):
        programs.decode(damaged)


@pytest.mark.parametrize(
    ("memory", "route", "name"),
    [
        (SharedMemory, Route(same_host=True, same_device=True, from_gpu=False, to_gpu=False), "shm"),
        (SharedMemory, Route(same_host=True, same_device=False, from_gpu=False, to_gpu=True), "shm"),
        (SharedMemory, Route(same_host=False, same_device=False, from_gpu=False, to_gpu=False), "stream"),
        (CudaMemory, Route(same_host=True, same_device=True, from_gpu=True, to_gpu=True), "cuda_ipc"),
        (CudaMemory, Route(same_host=True, same_device=False, from_gpu=True, to_gpu=False), "stream"),
        (UnpeeredCudaMemory, Route(same_host=True, same_device=True, from_gpu=True, to_gpu=True), "cuda_ipc"),
        (UnpeeredCudaMemory, Route(same_host=True, same_device=False, from_gpu=True, to_gpu=True), "stream"),
        (PrivateMemory, Route(same_host=True, same_device=True, from_gpu=False, to_gpu=False), "stream"),
    ],
)
def test_each_place_has_a_transport(memory: type, route: Route, name: str) -> None:
    number, _ = registry.choose(memory, route)
    assert registry.list_numbered()[number].name == name
    sent, _ = registry.choose(memory, route, sent_only=True)
    assert registry.list_numbered()[sent].is_sent
