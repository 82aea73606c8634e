"""Meshes: who sends to whom, in groups as small as their connections allow."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.common.worker_shards import process_of
from tandem.refit.transfer import Mesh, Transfer
from tandem.refit.transports import registry


def meshes(transfers: Sequence[Transfer], order: Sequence[str]) -> tuple[Mesh, ...]:
    """Return a mesh for each cluster of receivers that pass bytes on to each other, with all that send to them.

    The worker shards of a process are in one cluster: what is connected, lost and brought back is the process.

    Args:
        transfers: all of a plan.
        order: all members; ranks in a mesh follow it, receivers first.

    """
    cluster: dict[str, set[str]] = {}
    senders: dict[str, set[str]] = {}
    first_shard: dict[str, str] = {}

    def join(one: str, other: str) -> None:
        mine, theirs = (cluster.setdefault(shard, {shard}) for shard in (one, other))
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
    made: list[Mesh] = []
    done: set[str] = set()
    for receiver in order:
        receivers = cluster.get(receiver, set()) - done
        if receivers:
            done |= receivers
            sending = set().union(*(senders.get(member, ()) for member in receivers)) - receivers
            ranks = [m for m in order if m in receivers] + [m for m in order if m in sending]
            made.append(Mesh(f"to {process_of(receiver)}", tuple(ranks)))
    return tuple(made)
