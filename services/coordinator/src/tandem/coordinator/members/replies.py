"""The check of replies against their requests; pure, no sockets and no clock.

`Replies` is told of every request that is sent (`ordered`) and of every process that is lost (`forget`). Every reply
passes `take` before it becomes an event. A reply that cannot answer its request thus never reaches a batch, a metric or
the journal.

Decoding has already checked each field by itself (the types in `tandem.common.messages`). Here fields are compared with
the request, by one rule for each message (`reply_rules`). ``docs/protocol.md`` lists the rules' docstrings
(``scripts/protocol_page.py``).
"""

from __future__ import annotations

import bisect

from tandem.common.errors import WireError
from tandem.common.messages import Attest, BuildEngine, Failed, Generate, Order, Refit, Reply, SamplesFinished
from tandem.common.wire import Arrays
from tandem.coordinator.members.reply_checks import SHOWN, Asked, Limits, Member, must
from tandem.coordinator.members.reply_rules import RULES


class Replies:
    """The unanswered requests, and the check whether a reply can answer one."""

    def __init__(self, limits: Limits, newest: int = 0) -> None:
        """`newest` is at least every command id that an earlier coordinator gave out."""
        self._limits = limits
        self._asked: dict[int, Asked] = {}
        self._members: dict[str, Member] = {}
        self._newest = newest
        """Highest command id so far."""

    def ordered(self, name: str, order: Order) -> None:
        """Note a request that is sent to a process."""
        self._newest = max(self._newest, order.command_id)
        if isinstance(order, BuildEngine):  # it begins anew, without any version
            self._members[name] = Member()
        member = self._members.setdefault(name, Member())
        match order:
            case BuildEngine():
                member.is_engine = True
            case Refit() if name in order.only or not order.only:
                if order.version not in member.versions[-1:]:
                    bisect.insort(member.versions, order.version)
            case Generate() | Attest():  # the requests that this cancels are never answered
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
        """Expect nothing more of a process; another of its name begins anew."""
        self._asked = {i: asked for i, asked in self._asked.items() if asked.name != name}
        self._members.pop(name, None)

    def forget_orders(self) -> None:
        """Accept no more answers to earlier requests."""
        self._asked = {}

    def take(self, name: str, reply: Reply | Failed, arrays: Arrays) -> bool:
        """Check a reply; return whether it answers an open request, rather than one that is over.

        Raise `WireError` if it cannot be an answer to that request; its text begins with the message and the field.
        """
        try:
            return self._take(name, reply, arrays)
        except WireError as error:
            raise WireError(f"{type(reply).__name__}.{error}") from error

    def _take(self, name: str, reply: Reply | Failed, arrays: Arrays) -> bool:
        asked = self._asked.get(reply.command_id)
        if asked is None:
            must(reply.command_id <= self._newest, "command_id", reply.command_id, "of a command")
            return False
        must(asked.name == name, "command_id", reply.command_id, f"of a command to {name}, not to {asked.name}")
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
