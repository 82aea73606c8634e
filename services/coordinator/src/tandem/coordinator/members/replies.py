"""Check replies against the orders that they answer; pure, no sockets and no clock.

`Replies` is told of every order that is sent (`ordered`) and of every member that is gone (`forget`). Every reply comes
by here before it is an event (`take`), so that nothing which cannot be the answer to its order ever reaches a batch, a
metric or the journal. What a field may be by itself was checked when it was decoded (the types in
`tandem.common.messages`); here it is compared with what was asked for, by a rule a message (`reply_rules`), whose
docstrings ``docs/protocol.md`` lists (`tandem.coordinator.members.protocol_page`).
"""

from __future__ import annotations

import bisect

from tandem.common.errors import WireError
from tandem.common.messages import Attest, BuildEngine, Failed, Generate, Order, Refit, Reply, SamplesFinished
from tandem.common.wire import Arrays
from tandem.coordinator.members.reply_checks import SHOWN, Asked, Limits, Member, must
from tandem.coordinator.members.reply_rules import RULES


class Replies:
    """The orders that are not answered yet, and whether a reply can be the answer to one."""

    def __init__(self, limits: Limits, newest: int = 0) -> None:
        """`newest` is not below the id of any order that the members were given by an earlier coordinator."""
        self._limits = limits
        self._asked: dict[int, Asked] = {}
        self._members: dict[str, Member] = {}
        self._newest = newest
        """Of all ids of orders so far."""

    def ordered(self, name: str, order: Order) -> None:
        """Note an order that is sent to a member."""
        self._newest = max(self._newest, order.command_id)
        if isinstance(order, BuildEngine):  # which begins anew: it holds no version that it was given before
            self._members[name] = Member()
        member = self._members.setdefault(name, Member())
        match order:
            case BuildEngine():
                member.is_engine = True
            case Refit() if name in order.only or not order.only:
                if order.version not in member.versions[-1:]:
                    bisect.insort(member.versions, order.version)
            case Generate() | Attest():  # what it gives up for this, it never answers
                oldest = order.cancel_before if isinstance(order, Generate) else order.command_id
                self._asked = {
                    i: asked
                    for i, asked in self._asked.items()
                    if asked.name != name or type(asked.order) is not type(order) or i >= oldest
                }
            case _:
                pass
        self._asked[order.command_id] = Asked(name, order, member, self._limits)

    def forget(self, name: str) -> None:
        """Expect nothing more of a member; another of the name begins anew."""
        self._asked = {i: asked for i, asked in self._asked.items() if asked.name != name}
        self._members.pop(name, None)

    def forget_orders(self) -> None:
        """Take no answer any more to what was ordered so far."""
        self._asked = {}

    def take(self, name: str, reply: Reply | Failed, arrays: Arrays) -> bool:
        """Check a reply; return whether it answers an order that is still open, and not one that is over.

        Raises `WireError`, which begins with the message and the field, if it cannot be an answer to that order.
        """
        try:
            return self._take(name, reply, arrays)
        except WireError as error:
            raise WireError(f"{type(reply).__name__}.{error}") from error

    def _take(self, name: str, reply: Reply | Failed, arrays: Arrays) -> bool:
        asked = self._asked.get(reply.command_id)
        if asked is None:
            must(reply.command_id <= self._newest, "command_id", reply.command_id, "of an order")
            return False
        must(asked.name == name, "command_id", reply.command_id, f"of an order to {name}, not to {asked.name}")
        if not isinstance(reply, Failed):
            rules, kind = RULES[type(reply)], type(asked.order)
            names = " or a ".join(rule.order.__name__ for rule in rules)
            found = [rule for rule in rules if rule.order is kind]
            must(bool(found), "command_id", reply.command_id, f"of a {names}, not of a {kind.__name__}")
            if found[0].check is not None:
                found[0].check(asked, reply)
        for array in arrays:
            raise WireError(f"{array[:SHOWN]}: arrays came with a message that has none")
        if isinstance(reply, SamplesFinished):
            return True  # more answers follow
        del self._asked[reply.command_id]
        return True
