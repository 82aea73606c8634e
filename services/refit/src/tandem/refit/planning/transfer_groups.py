"""Transfer groups: processes that send to each other, in groups as small as their connections allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.common.worker_shards import process_of
from tandem.refit.layout import Layout
from tandem.refit.transfer import LinkTransfer, TransferGroup
from tandem.refit.transports import registry


def transfer_groups(transfers: Sequence[LinkTransfer], layouts: Mapping[str, Layout]) -> tuple[TransferGroup, ...]:
    """Return a transfer group for each cluster of receivers that pass bytes on, with all their senders.

    The workers of a process are in one cluster, because they are connected, lost and restored together.

    Args:
        transfers: all of a plan.
        layouts: of all processes; ranks in a group follow their order, receivers first.

    """
    cluster: dict[str, set[str]] = {}
    senders: dict[str, set[str]] = {}
    first_shard: dict[str, str] = {}

    def join(first: str, second: str) -> None:
        mine, theirs = (cluster.setdefault(shard, {shard}) for shard in (first, second))
        if theirs is not mine:
            mine |= theirs
            cluster.update(dict.fromkeys(theirs, mine))

    for transfer in transfers:
        if not registry.find(transfer.transport).needs_mesh:
            continue
        receiver = transfer.destination
        join(receiver, first_shard.setdefault(process_of(receiver), receiver))
        if transfer.round == 0:
            senders.setdefault(receiver, set()).add(transfer.source)
        else:
            join(receiver, transfer.source)
    groups: list[TransferGroup] = []
    grouped: set[str] = set()
    for receiver in layouts:
        receivers = cluster.get(receiver, set()) - grouped
        if receivers:
            grouped |= receivers
            sending = set().union(*(senders.get(member, ()) for member in receivers)) - receivers
            ranks = [m for m in layouts if m in receivers] + [m for m in layouts if m in sending]
            is_on_cpu = any(layouts[member].device == "cpu" for member in ranks)
            groups.append(TransferGroup(f"to {process_of(receiver)}", tuple(ranks), "cpu" if is_on_cpu else "cuda"))
    return tuple(groups)
