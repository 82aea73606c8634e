"""Predicted time of a refit at given rates, and a lower bound for any plan.

All transfers run at once: a process uses several kinds of wire together, but each kind carries one byte after another.
So a round takes as long as the busiest process needs on its busiest wire, and a refit takes the sum of its rounds. A
received bucket is installed (copied to its place) while the next bucket travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.config.schema import LinkRates
from tandem.refit.layout import Layout
from tandem.refit.planning.flows import FlowLink
from tandem.refit.transports import registry
from tandem.refit.transports.transport import Route, Wire

_GB = 1e9


class RefitCost(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time of a refit, and its lower bound."""

    seconds: float
    """Predicted time of the plan."""
    bound_s: float
    """``max(egress, ingress, install)`` with every load spread evenly: no plan for these bytes is faster."""
    limited_by: str
    """The slowest step, such as ``trainer-3 sends 2.1 GB over the network``."""
    egress_s: float
    """Sending from trainers with an even load; memory that engines read directly costs nothing."""
    ingress_s: float
    """Receiving from trainers at the busiest host, with the load spread evenly over its processes."""
    install_s: float
    """Writing the largest engine's weights in its own memory."""


def cost(links: Sequence[FlowLink], layouts: Mapping[str, Layout], num_sources: int, rates: LinkRates) -> RefitCost:
    """Predict the time that the links of a plan take.

    Args:
        links: of `tandem.refit.planner.plan` or `survey`.
        layouts: of all processes.
        num_sources: number of trainers, over which an even load would be spread.
        rates: of the wires.

    """
    device_of = {member: layout.device for member, layout in layouts.items()}
    host_of = {member: layout.host for member, layout in layouts.items()}
    loads: dict[int, Load] = {}
    received: dict[str, int] = {}
    for link in links:
        transport = registry.find(link.transport)
        wire = transport.wire(Route.between(layouts[link.source], layouts[link.destination]))
        if wire is None:
            continue
        load = loads.setdefault(link.round, {})
        # A sender converts before it sends; an engine that copies for itself reads unconverted data.
        num_bytes = link.num_bytes if transport.is_sent else max(link.num_bytes, link.num_read)
        for end in ((link.destination, "receives", wire), (link.source, "sends", wire))[: 1 + transport.is_sent]:
            load[end] = load.get(end, 0) + num_bytes
        received[link.destination] = received.get(link.destination, 0) + link.num_bytes
    rounds = [max(_seconds(load, rates), default=(0.0, "")) for load in loads.values()]
    first = loads.get(0, {})
    egress_s = sum(n / _rate(wire, rates) for (_, does, wire), n in first.items() if does == "sends") / num_sources
    ingress_s = _even_ingress(first, host_of, rates)
    install_s = max((n / _install_rate(device_of[member], rates) for member, n in received.items()), default=0.0)
    bound_s = max(egress_s, ingress_s, install_s)
    return RefitCost(
        seconds=max(sum(seconds for seconds, _ in rounds), bound_s),
        bound_s=bound_s,
        limited_by=max(rounds, default=(0.0, "nothing: no byte moves"))[1],
        egress_s=egress_s,
        ingress_s=ingress_s,
        install_s=install_s,
    )


Load = dict[tuple[str, str, Wire], int]
"""Bytes by process, direction (``sends``, ``receives``) and wire."""


def _even_ingress(load: Load, host_of: Mapping[str, str], rates: LinkRates) -> float:
    """Return the seconds of the busiest host, with the bytes on each wire spread evenly over its processes."""
    entering: dict[tuple[str, Wire], list[int]] = {}
    for (member, does, wire), num_bytes in load.items():
        if does == "receives":
            entering.setdefault((host_of[member], wire), []).append(num_bytes)
    return max(
        (sum(amounts) / len(amounts) / _rate(wire, rates) for (_, wire), amounts in entering.items()), default=0.0
    )


def _install_rate(device: str, rates: LinkRates) -> float:
    return _rate("memory" if device == "cpu" else "same_gpu", rates)


def _rate(wire: Wire, rates: LinkRates) -> float:
    """Return a wire's rate in bytes per second."""
    gigabytes: float = getattr(rates, wire)
    return gigabytes * _GB


def _seconds(load: Load, rates: LinkRates) -> Iterable[tuple[float, str]]:
    """Yield the seconds of each process on each wire, with a description."""
    for (member, does, wire), num_bytes in load.items():
        wire_names = {"memory": "in memory", "same_gpu": "within its GPU", "peer_gpu": "from GPU to GPU"}
        yield (
            num_bytes / _rate(wire, rates),
            f"{member} {does} {num_bytes / _GB:.3g} GB {wire_names.get(wire, 'over the network')}",
        )


def bucket_memory(links: Sequence[FlowLink]) -> dict[str, int]:
    """Return the peak size of each process's send and receive buffers, in bytes."""
    bytes_by_round: dict[tuple[str, int], int] = {}
    size_of = _mesh_sizes([link for link in links if registry.find(link.transport).needs_mesh])
    for link in links:
        transport = registry.find(link.transport)
        num_bytes = transport.buffer_bytes(size_of.get(link.destination, 1), link.num_bytes)
        if not num_bytes:
            continue
        for member in (link.source, link.destination):
            bytes_by_round[member, link.round] = bytes_by_round.get((member, link.round), 0) + num_bytes
    peak: dict[str, int] = {}
    for (member, _), num_bytes in bytes_by_round.items():
        peak[member] = max(peak.get(member, 0), num_bytes)
    return peak


def _mesh_sizes(links: Sequence[FlowLink]) -> dict[str, int]:
    """Return the size of each receiver's transfer group; engines that pass weights on to each other share one."""
    transfer_group_of: dict[str, set[str]] = {}
    for link in links:
        transfer_group_of.setdefault(link.destination, {link.destination}).add(link.source)
    for link in links:
        if link.round and transfer_group_of[link.destination] is not transfer_group_of.get(link.source):
            joined = transfer_group_of[link.destination] | transfer_group_of.get(link.source, set())
            transfer_group_of.update(dict.fromkeys(joined & transfer_group_of.keys(), joined))
    return {receiver: len(members) for receiver, members in transfer_group_of.items()}
