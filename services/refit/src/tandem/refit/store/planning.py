"""Plans with a store: engines that trainers would stream to read the store instead."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tandem.common.worker_shards import process_of
from tandem.refit import planner
from tandem.refit.layout import Layout
from tandem.refit.planner import TransferPlan
from tandem.refit.program import TransferProgram
from tandem.refit.store.published import publish_layout
from tandem.refit.transports import registry


def plan(
    sources: Mapping[str, Layout], destinations: Mapping[str, Layout], *, allow_alias: bool, alias_frozen: bool
) -> TransferPlan:
    """Plan how every wanted element reaches its engine; arguments and errors are those of `planner.plan`.

    All trainers publish the share that they digest. Engines within reach of their memory read that as they would
    without a store.
    """
    direct = planner.plan(sources, destinations, allow_alias=allow_alias, alias_frozen=alias_frozen)
    far_engines = {process_of(part) for part in destinations if _is_sent_to(direct.programs[part])}
    far = {part: layout for part, layout in destinations.items() if process_of(part) in far_engines}
    if not far:
        return direct
    shares = {
        member: publish_layout(member, layout, direct.programs[member].verification).layout
        for member, layout in sources.items()
    }
    stored = planner.plan(shares, far, allow_alias=False)
    near = {part: layout for part, layout in destinations.items() if part not in far}
    programs = {
        member: msgspec.structs.replace(each, sends=(), transfer_groups=()) for member, each in direct.programs.items()
    }
    if near:
        again = planner.plan(sources, near, allow_alias=allow_alias, alias_frozen=alias_frozen)
        for member in (*sources, *near):
            program = again.programs[member]
            programs[member] = msgspec.structs.replace(program, verification=programs[member].verification)
    for part in far:
        programs[part] = stored.programs[part]
    return TransferPlan(
        programs=programs,
        links=(*(again.links if near else ()), *stored.links),
        frozen_links=(*(again.frozen_links if near else ()), *stored.frozen_links),
        transfer_groups=again.transfer_groups if near else (),
        received={part: (stored if part in far else direct).received[part] for part in destinations},
    )


def _is_sent_to(program: TransferProgram) -> bool:
    return any(not each.round and registry.find(each.transport).is_sent for each in program.receives)
