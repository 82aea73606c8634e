"""Weights cross from one live process to another, and processes are killed while they do."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tandem.common.errors import RefitError
from tandem.launch.child import ForkedChild
from tandem.refit import layout
from tandem.refit.layout import Layout, SharedMemory
from tandem.refit.planner import plan
from tandem.refit.program import TransferProgram, decode, encode
from tandem.refit.transports import shm
from tandem.refit.weights import BoundProgram, bind
from tests.harness import leaks
from tests.harness.processes import shm_processes, wires
from tests.harness.processes.shm_processes import FUSED, SHAPES, engine_layout, engine_parameters, values_of
from tests.harness.processes.wires import TIMEOUT_S, Wire
from tests.harness.runs import consoles


class Peer:
    """Another process, spoken to in lines."""

    def __init__(self, process: ForkedChild, wire: Wire) -> None:
        self.process = process
        self._wire = wire
        self.tell, self.reply = wire.tell, wire.reply

    def ask(self, command: bytes) -> bytes:
        self.tell(command)
        return self.reply()

    def kill(self) -> None:
        self.process.kill()
        assert self.process.wait(TIMEOUT_S) == -signal.SIGKILL


class Peers:
    """Starts others, which end with it."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._where = stack.enter_context(wires.listening())

    def start(self, kind: str, *ranks: int) -> Peer:
        words = [str(self._where.path), kind, *map(str, ranks)]
        out, errors = (os.fdopen(number, "wb", closefd=False) for number in (1, 2))
        process = consoles.fork_server().start(shm_processes.__name__, words, out, errors)
        self._stack.callback(_end, process)
        name = " ".join(words[1:3])
        return Peer(process, self._where.accept([name], process, self._stack)[name])


def _end(process: ForkedChild) -> None:
    """Wait for a process that has no wire any more."""
    try:
        process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


@pytest.fixture
def peers() -> Iterator[Peers]:
    with contextlib.ExitStack() as stack:
        yield Peers(stack)


def start_writers(peers: Peers, num_ranks: int = 1) -> tuple[list[Peer], dict[str, Layout]]:
    writers = [peers.start("writer", rank, num_ranks) for rank in range(num_ranks)]
    held = [layout.decode(bytes.fromhex(writer.reply().decode())) for writer in writers]
    return writers, {f"trainer-{rank}": described for rank, described in enumerate(held)}


def make_program(sources: dict[str, Layout], dtype: str = "float32", *, allow_alias: bool = False) -> TransferProgram:
    planned = plan(sources, {"rollout-0": engine_layout(dtype)}, allow_alias=allow_alias)
    return decode(encode(planned.programs["rollout-0"]))


def run(bound: BoundProgram) -> int:
    return sum(bound.run(TIMEOUT_S).values())


def assert_holds(parameters: dict[str, torch.Tensor], version: int, dtype: torch.dtype = torch.float32) -> None:
    """Compare every element; `Tensor.to` rounds as a conversion should."""
    values = {name: value.to(dtype) for name, value in values_of(version).items()}
    fused = torch.cat([values[name].flatten() for name in FUSED])
    torch.testing.assert_close(parameters["qk"], fused, rtol=0, atol=0)
    for name in SHAPES.keys() - FUSED:
        torch.testing.assert_close(parameters[name], values[name].flatten(), rtol=0, atol=0)


def num_mapped() -> int:
    return sum("torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_element_arrives_at_every_version(num_ranks: int, peers: Peers) -> None:
    writers, sources = start_writers(peers, num_ranks)
    parameters = engine_parameters("float32")
    bound = bind(make_program(sources), parameters)
    assert all((parameter == -1).all() for parameter in parameters.values()), "binding alone writes nothing"
    num_bytes = sum(parameter.nbytes for parameter in parameters.values())
    for version in (0, 1, 2):
        if version:
            for writer in writers:
                writer.ask(str(version).encode())
            assert_holds(parameters, version - 1)
        assert run(bound) == num_bytes
        assert_holds(parameters, version)
    bound.close()


def test_float32_is_rounded_to_bfloat16_on_the_way(peers: Peers) -> None:
    _, sources = start_writers(peers, 2)
    parameters = engine_parameters("bfloat16")
    bound = bind(make_program(sources, "bfloat16", allow_alias=True), parameters)
    assert run(bound) == sum(parameter.nbytes for parameter in parameters.values())
    assert_holds(parameters, 0, torch.bfloat16)


def test_an_alias_shows_the_next_version_with_nothing_copied(peers: Peers) -> None:
    (writer,), sources = start_writers(peers)
    parameters = engine_parameters("float32")
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    program = make_program(sources, allow_alias=True)
    (alias,) = (transfer for transfer in program.receives if transfer.transport == "alias")
    assert set(alias.destination_storages) == parameters.keys() - {"qk"}
    bound = bind(program, parameters)
    fused_bytes = parameters["qk"].nbytes
    assert run(bound) == bound.num_bytes == fused_bytes
    assert_holds(parameters, 0)
    assert {name for name, p in parameters.items() if p.data_ptr() == addresses[name]} == {"qk"}

    writer.ask(b"1")
    for name in SHAPES.keys() - FUSED:
        torch.testing.assert_close(parameters[name], values_of(1)[name].flatten(), rtol=0, atol=0)
    run(bound)
    assert_holds(parameters, 1)


def test_a_killed_writer_leaves_readable_memory_and_nothing_else(peers: Peers) -> None:
    before, mapped_before = leaks.segments(), num_mapped()
    (writer,), sources = start_writers(peers)
    copied, aliased = engine_parameters("float32"), engine_parameters("float32")
    program = make_program(sources)
    bound = bind(program, copied)
    alias = bind(make_program(sources, allow_alias=True), aliased)
    assert num_mapped() > mapped_before
    writer.kill()
    assert leaks.segments_left(before) == set()
    for each, parameters in ((bound, copied), (alias, aliased)):
        run(each)
        assert_holds(parameters, 0)

    with pytest.raises(RefitError, match=rf"'\w+' of trainer-0: its process {writer.process.pid} is gone"):
        bind(program, engine_parameters("float32"))

    bound.close()
    alias.close()
    del aliased, parameters, each
    gc.collect()
    assert num_mapped() == mapped_before, "the memory is gone with the last tensor that reads it"


def test_a_killed_reader_leaves_nothing(peers: Peers) -> None:
    before = leaks.segments()
    (writer,), sources = start_writers(peers)
    reader = peers.start("reader")
    sums = msgspec.json.decode(reader.ask(layout.encode(sources["trainer-0"]).hex().encode()))
    assert sums["embed"] == pytest.approx(values_of(0)["embed"].double().sum().item())
    reader.kill()
    assert leaks.segments_left(before) == set()

    writer.ask(b"1")
    parameters = engine_parameters("float32")
    bind(make_program(sources), parameters).run(TIMEOUT_S)
    assert_holds(parameters, 1)


def test_a_write_to_an_alias_kills_the_engine_and_not_the_weights(peers: Peers) -> None:
    _, sources = start_writers(peers)
    reader = peers.start("reader")
    reader.ask(layout.encode(sources["trainer-0"]).hex().encode())
    reader.tell(b"scribble")
    assert reader.process.wait(TIMEOUT_S) == -signal.SIGSEGV
    parameters = engine_parameters("float32")
    bind(make_program(sources), parameters).run(TIMEOUT_S)
    assert_holds(parameters, 0)


def test_a_descriptor_that_was_used_again_is_refused(peers: Peers) -> None:
    _, sources = start_writers(peers)
    program = make_program(sources)
    (transfer,) = program.receives
    (first, *others) = transfer.source_storages
    assert isinstance(first.address, SharedMemory)
    reused = msgspec.structs.replace(first.address, inode=first.address.inode + 1)
    storages = (msgspec.structs.replace(first, address=reused), *others)
    wrong = msgspec.structs.replace(program, receives=(msgspec.structs.replace(transfer, source_storages=storages),))
    with pytest.raises(RefitError, match="the memory it was planned for is gone"):
        bind(wrong, engine_parameters("float32"))


@pytest.mark.parametrize("allow_alias", [False, True])
def test_an_engine_that_is_not_what_was_planned_for_is_refused_untouched(allow_alias: bool, peers: Peers) -> None:
    _, sources = start_writers(peers)
    program = make_program(sources, allow_alias=allow_alias)
    whole = engine_parameters("float32")
    wrong = {
        "no parameter 'embed'": {name: p for name, p in whole.items() if name != "embed"},
        "'embed' as torch.float16": {**whole, "embed": whole["embed"].half()},
        r"\d+ bytes": {**whole, "embed": whole["embed"][:5]},
    }
    for message, parameters in wrong.items():
        addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
        with pytest.raises(RefitError, match=f"rollout-0.*{message}"):
            bind(program, parameters)
        assert addresses == {name: parameter.data_ptr() for name, parameter in parameters.items()}
        assert all((parameter == -1).all() for parameter in parameters.values())


def test_what_has_no_bytes_on_the_cpu_cannot_be_shared() -> None:
    for tensor in (torch.empty(0), torch.empty(3, device="meta")):
        with pytest.raises(RefitError, match="cannot be shared"):
            shm.share(tensor)
