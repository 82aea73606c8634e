"""Meshes: who streams to whom, in groups as small as their connections allow."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.refit.program import Mesh, Transfer


def meshes(transfers: Sequence[Transfer], order: Sequence[str]) -> tuple[Mesh, ...]:
    """Return a mesh for each cluster of receivers that pass bytes on to each other, with all that send to them.

    Args:
        transfers: all of a plan.
        order: all members; ranks in a mesh follow it, receivers first.

    """
    cluster: dict[str, set[str]] = {}
    senders: dict[str, set[str]] = {}
    for transfer in transfers:
        if transfer.transport != "stream":
            continue
        mine = cluster.setdefault(transfer.destination, {transfer.destination})
        if transfer.round == 0:
            senders.setdefault(transfer.destination, set()).add(transfer.source)
            continue
        theirs = cluster.setdefault(transfer.source, {transfer.source})
        if theirs is not mine:
            mine |= theirs
            cluster.update(dict.fromkeys(theirs, mine))
    made: list[Mesh] = []
    done: set[str] = set()
    for receiver in order:
        receivers = cluster.get(receiver, set()) - done
        if receivers:
            done |= receivers
            sending = set().union(*(senders.get(member, ()) for member in receivers)) - receivers
            ranks = [m for m in order if m in receivers] + [m for m in order if m in sending]
            made.append(Mesh(f"to {receiver}", tuple(ranks)))
    return tuple(made)
