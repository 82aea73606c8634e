"""The answer of the refit service to layouts: a program for each process, with what it moves and takes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from tandem.common.messages import PlannedTransferGroup, PlanTransfers, TransfersPlanned
from tandem.common.worker_shards import process_of
from tandem.config.schema.run import LinkRates
from tandem.refit import planner, program
from tandem.refit.cost import cost
from tandem.refit.layout import Layout
from tandem.refit.planning.flows import FlowLink
from tandem.refit.program import TransferProgram
from tandem.refit.transports.sizes import largest_difference


def planned(
    command: PlanTransfers,
    sources: Mapping[str, Layout],
    destinations: Mapping[str, Layout],
    rates: LinkRates,
    differences: str,
    started: float,
) -> tuple[TransfersPlanned, dict[str, Layout]]:
    """Return the answer, and the destinations' layouts as they receive, of which digests are."""
    plan = planner.plan(sources, destinations, allow_alias=command.allow_alias, alias_frozen=command.alias_frozen)
    received = dict(plan.received)
    predicted = cost(plan.links, {**sources, **received}, len(sources), rates)
    reply = TransfersPlanned(
        command_id=command.command_id,
        programs={member: program.encode(each) for member, each in _programs(plan, rates, differences).items()},
        senders=tuple(dict.fromkeys(process_of(shard) for shard, each in plan.programs.items() if each.sends)),
        transfer_groups=tuple(
            PlannedTransferGroup(
                name=transfer_group.name, members=transfer_group.members, device_type=transfer_group.device_type
            )
            for transfer_group in plan.transfer_groups
        ),
        num_bytes=_sum_by_link(plan.links),
        predicted_s=predicted.seconds,
        bound_s=predicted.bound_s,
        seconds=time.perf_counter() - started,
        num_bytes_frozen=_sum_by_link(plan.frozen_links),
    )
    return reply, received


def _programs(plan: planner.TransferPlan, rates: LinkRates, differences: str) -> Mapping[str, TransferProgram]:
    """Return the programs, told to send differences where the configuration wants that."""
    programs = plan.programs
    if differences == "off" or any(each.merging is not None for each in programs.values()):
        return programs  # adapters are small, and all of them changes
    largest = largest_difference(rates.network)
    return {
        member: msgspec.structs.replace(each, largest_difference=largest) if each.transfer_groups else each
        for member, each in programs.items()
    }


def _sum_by_link(links: Iterable[FlowLink]) -> dict[str, int]:
    num_bytes: dict[str, int] = {}
    for link in links:
        num_bytes[link.name] = num_bytes.get(link.name, 0) + link.num_bytes
    return num_bytes
