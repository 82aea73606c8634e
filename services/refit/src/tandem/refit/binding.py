"""The binding of a transfer program to a process's memory, in which every source is opened."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tandem.common.errors import RefitError
from tandem.refit.bound import BoundProgram
from tandem.refit.merging import BoundMerging
from tandem.refit.program import Staging, TransferProgram
from tandem.refit.quantise import BoundQuantisation
from tandem.refit.transfer import LinkTransfer
from tandem.refit.transports import registry
from tandem.refit.transports.end import TransferEnd
from tandem.refit.transports.memory import NamedStorages
from tandem.refit.transports.process_group import ConnectedGroup
from tandem.refit.transports.stream import StreamTransport
from tandem.refit.transports.transport import BoundTransfers


def bind(
    program: TransferProgram,
    storages: Mapping[str, torch.Tensor],
    transfer_groups: Mapping[str, ConnectedGroup] | None = None,
) -> BoundProgram:
    """Bind a program to memory.

    Args:
        program: made by `tandem.refit.planner` for this process.
        storages: this process's live memory by storage name. Byte 0 of a storage is the first element of its tensor.
            A ``uint8`` tensor stands for memory of any type. Parameters that are read in place are re-pointed at the
            source's memory at once: each optimizer step is visible immediately, and a write to them faults.
        transfer_groups: the connected transfer groups of the program (`process_group.connect`), by name. They are
            looked up at each run, so they may be connected, or reconnected after a failure, once the program is bound.

    Raises:
        RefitError: a source cannot be opened, or memory differs from the plan. No parameter was changed.

    """
    member = program.member
    device = next((tensor.device for tensor in storages.values()), torch.device("cpu"))
    staging = {each.name: _allocate(each, device) for each in program.staging}
    if collisions := staging.keys() & storages.keys():
        raise RefitError(f"{member} has parameters named like staging memory: {', '.join(sorted(collisions))}")
    memory = NamedStorages(member, {**storages, **staging})
    own_transfer_groups = {transfer_group.name: transfer_group for transfer_group in program.transfer_groups}
    end = TransferEnd(
        member, memory, device, own_transfer_groups, {} if transfer_groups is None else transfer_groups, {}
    )
    rounds = _bind_rounds(program, end)
    quantisers = [BoundQuantisation(quantisation, memory) for quantisation in program.quantisations]
    for _, bound in (each for round_ in rounds for each in round_):
        bound.install()  # no parameter was touched before this line, and nothing can fail after it
    merger = None
    if program.merging is not None:  # planned memory was checked while binding; look it up again where it lies now
        merger = BoundMerging(member, program.merging, NamedStorages(member, {**storages, **staging}))
    return BoundProgram(member, rounds, quantisers, merger, staging, device)


def _allocate(staging: Staging, device: torch.device) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, staging.dtype)
    return torch.empty(staging.num_bytes // dtype.itemsize, dtype=dtype, device=device)


def _bind_rounds(program: TransferProgram, end: TransferEnd) -> list[list[tuple[bool, BoundTransfers]]]:
    """Bind the transfers of each round by transport, in running order: frozen tensors first."""
    grouped: dict[tuple[int, bool, bool, str], list[LinkTransfer]] = {}
    for transfer in (*program.receives, *program.sends):
        is_sent = registry.find(transfer.transport).is_sent
        key = transfer.round, not transfer.is_frozen, is_sent, transfer.transport
        grouped.setdefault(key, []).append(transfer)
    rounds: dict[int, list[tuple[bool, BoundTransfers]]] = {}
    for (number, changes, _, name), transfers in sorted(grouped.items(), key=lambda item: item[0]):
        transport = registry.find(name)
        # Engines that pass weights on share a host, and would have to keep what they passed on.
        if program.largest_difference and changes and number == 0 and transport.name == StreamTransport.name:
            from tandem.refit.transports.differences import DifferenceStream  # most runs need none of it

            transport = DifferenceStream(program.largest_difference)
        rounds.setdefault(number, []).append((not changes, transport.bind(transfers, end)))
    return list(rounds.values())
