"""Checks of replies while a run is set up: what is built, installed, planned and connected."""

from __future__ import annotations

import re

from tandem.common.errors import RefitError, WireError
from tandem.common.messages import (
    EngineBuilt,
    InstallProgram,
    ProgramInstalled,
    TrainerBuilt,
    TransferGroupConnected,
    TransfersPlanned,
)
from tandem.common.worker_shards import process_of
from tandem.coordinator.processes.reply_checks import UnansweredRequest, all_among, must, same
from tandem.refit import layout, program

_ADDRESS = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}")


def trainer_built(request: UnansweredRequest, reply: TrainerBuilt) -> None:
    """`version` is that of the command, and `layout` can be read."""
    same(request, reply, "version")
    request.state.num_tensors = (_num_tensors_of("layout", reply.layout),)


def engine_built(request: UnansweredRequest, reply: EngineBuilt) -> None:
    """`layouts` can be read. The address of `samples_at` is ``tcp://HOST:PORT``, `external_requests.url` ``http://HOST:PORT``."""
    address = reply.samples_at.address
    must(_ADDRESS.fullmatch(address) is not None, "samples_at.address", address, "tcp://HOST:PORT")
    external_requests = "http://h:1" if reply.external_requests is None else reply.external_requests.url
    must(
        _ADDRESS.fullmatch(external_requests.replace("http", "tcp", 1)) is not None,
        "external_requests.url",
        external_requests,
        "http://HOST:PORT",
    )
    request.state.num_tensors = tuple(_num_tensors_of(f"layouts[{i}]", each) for i, each in enumerate(reply.layouts))


def program_installed(request: UnansweredRequest, reply: ProgramInstalled) -> None:
    """From then on, digests cover the tensors that its programs receive, if those are not its layout."""
    command: InstallProgram = request.command
    received = map(program.num_received, command.programs)
    numbers = zip(request.state.num_tensors, received, strict=False)
    request.state.num_tensors = tuple(current if num is None else num for current, num in numbers)


def transfer_group_connected(request: UnansweredRequest, reply: TransferGroupConnected) -> None:
    """`transfer_group` is that of the command."""
    same(request, reply, "transfer_group")


def transfers_planned(request: UnansweredRequest, reply: TransfersPlanned) -> None:
    """There is a program for every worker shard with a layout in the command, and for no other.

    Senders are processes of these shards. Transfer groups have different names; groups and links connect these shards.
    """
    parts = {*request.command.sources, *request.command.destinations}
    processes = {process_of(part) for part in parts}
    all_among("programs", reply.programs, parts)
    all_among("programs", parts, {*reply.programs}, "one of those that have a program")
    all_among("senders", reply.senders, processes)
    names = [transfer_group.name for transfer_group in reply.transfer_groups]
    must(len({*names}) == len(names), "transfer_groups", names, "of different names")
    for transfer_group in reply.transfer_groups:
        all_among(f"transfer_groups[{transfer_group.name!r}]", transfer_group.members, parts)
    for link in reply.num_bytes:
        must(link.count(">") == 1, "num_bytes", link, "a link, such as trainer-0>rollout-0")
        all_among("num_bytes", link.split(">"), parts)


def _num_tensors_of(field: str, encoded: bytes) -> int:
    """Return the number of tensors in a layout. Raise `WireError` if it cannot be read."""
    try:
        return layout.num_tensors(encoded)
    except RefitError as error:
        raise WireError(f"{field}: {error}") from error
