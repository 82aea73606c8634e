"""Check replies against the orders that they answer; pure, no sockets and no clock.

`Replies` is told of every order that is sent (`ordered`) and of every member that is gone (`forget`). Every reply comes
by here before it is an event (`take`), so that nothing which cannot be the answer to its order ever reaches a batch, a
metric or the journal. What a field may be by itself was checked when it was decoded (the types in
`tandem.common.messages`); here it is compared with what was asked for, by a rule a message. ``docs/protocol.md`` lists
the rules' docstrings (`tandem.coordinator.inspect.protocol_page`).
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from tandem.common.config import Config
from tandem.common.errors import RefitError, WireError
from tandem.common.messages import (
    Attest,
    Attested,
    AwaitCheckpoint,
    BuildEngine,
    BuildTrainer,
    CheckpointCopied,
    CheckpointSaved,
    Command,
    CommitVersion,
    ConnectMesh,
    CopyWeights,
    EngineBuilt,
    Evaluate,
    Evaluated,
    Failed,
    Generate,
    Generated,
    InstallProgram,
    MeshConnected,
    Message,
    OpenRendezvous,
    Order,
    PlanTransfers,
    ProgramInstalled,
    RecordSamples,
    Refit,
    Refitted,
    RendezvousOpened,
    Reply,
    RestoreSamples,
    SampleScored,
    SamplesFinished,
    SamplesMissing,
    SamplesRecorded,
    SaveCheckpoint,
    Train,
    Trained,
    TrainerBuilt,
    TransfersPlanned,
    VersionCommitted,
    WeightsCopied,
)
from tandem.common.model_sizes import vocabulary_size
from tandem.common.wire import Arrays
from tandem.common.worker_shards import process_of
from tandem.refit import layout

_SHOWN = 100
"""Characters of a value that an error shows."""
_ADDRESS = re.compile(r"tcp://[^\s/]+:[0-9]{1,5}")
_SPEAKER = "trainer-0"
"""The rank whose metrics are the run's."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What no sample of a run goes beyond."""

    vocabulary: int
    max_tokens: int
    """Of a whole sequence."""
    max_turns: int
    plays: bool = False
    """Whether an agent makes them, whose prompts are its own."""

    @staticmethod
    def of(config: Config) -> Limits:
        """Return those of a run whose model's folder is there."""
        policy, longest = config.policy, config.policy.max_total_sequence_length
        if policy.generation.backend == "vllm":
            longest = max(longest, policy.generation.vllm_cfg.max_model_len)
        agent = config.agent
        turns = config.grpo.max_rollout_turns if agent is None else agent.max_completions
        known = vocabulary_size(policy)
        return Limits(vocabulary=known, max_tokens=longest, max_turns=turns, plays=agent is not None)


class _Member:
    """What is known of a process from its orders and replies."""

    def __init__(self) -> None:
        self.is_engine = False
        self.num_tensors: tuple[int, ...] = ()
        """In the layout of each of its parts."""
        self.versions: list[int] = []
        """That it was given, in ascending order."""
        self.version = 0
        """That it has said to hold, the last time."""


class _Asked:
    """An order whose answer has not come, or not all of it."""

    def __init__(self, name: str, order: Order, member: _Member, limits: Limits) -> None:
        self.name = name
        self.order: Any = order
        """Of the type that the rule of the reply goes with."""
        self.member = member
        self.limits = limits
        self.oldest_version = member.version
        """That the member can make tokens with while it carries the order out."""
        self.arrived: set[tuple[int, int]] = set()
        """Samples that are here, by group and place."""
        self.num_tokens = 0
        """That the policy made in these samples."""


class _Rule(NamedTuple):
    order: type[Command]
    """What the reply answers."""
    check: Callable[[_Asked, Any], None] | None
    """None: there is nothing to compare."""


class Replies:
    """The orders that are not answered yet, and whether a reply can be the answer to one."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._asked: dict[int, _Asked] = {}
        self._members: dict[str, _Member] = {}
        self._newest = 0
        """Of all ids of orders so far."""

    def ordered(self, name: str, order: Order) -> None:
        """Note an order that is sent to a member."""
        self._newest = max(self._newest, order.command_id)
        member = self._members.setdefault(name, _Member())
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
        self._asked[order.command_id] = _Asked(name, order, member, self._limits)

    def forget(self, name: str) -> None:
        """Expect nothing more of a member; another of the name begins anew."""
        self._asked = {i: asked for i, asked in self._asked.items() if asked.name != name}
        self._members.pop(name, None)

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
            _must(reply.command_id <= self._newest, "command_id", reply.command_id, "of an order")
            return False
        _must(asked.name == name, "command_id", reply.command_id, f"of an order to {name}, not to {asked.name}")
        if not isinstance(reply, Failed):
            rules, kind = RULES[type(reply)], type(asked.order)
            names = " or a ".join(rule.order.__name__ for rule in rules)
            found = [rule for rule in rules if rule.order is kind]
            _must(bool(found), "command_id", reply.command_id, f"of a {names}, not of a {kind.__name__}")
            if found[0].check is not None:
                found[0].check(asked, reply)
        for array in arrays:
            raise WireError(f"{array[:_SHOWN]}: arrays came with a message that has none")
        if isinstance(reply, SamplesFinished):
            return True  # more answers follow
        del self._asked[reply.command_id]
        return True


# --- the rules -------------------------------------------------------------------------------------------------------


def _trainer_built(asked: _Asked, reply: TrainerBuilt) -> None:
    """`version` is that of the order, and `layout` can be read."""
    _same(asked, reply, "version")
    asked.member.num_tensors = (_num_tensors("layout", reply.layout),)


def _trained(asked: _Asked, reply: Trained) -> None:
    """`step` is that of the order, and so is `version`. `metrics` are finite numbers, and of rank 0 alone."""
    _same(asked, reply, "step")
    _must(reply.version == asked.order.step, "version", reply.version, f"the step, {asked.order.step}")
    _must(asked.name == _SPEAKER or not reply.metrics, "metrics", reply.metrics, f"empty: {_SPEAKER} has them")
    _finite(reply.metrics)


def _samples_missing(asked: _Asked, reply: SamplesMissing) -> None:
    """`step` is that of the order. `members` are sources of the order."""
    _same(asked, reply, "step")
    _known("members", reply.members, {*asked.order.sources})


def _evaluated(asked: _Asked, reply: Evaluated) -> None:
    """`step` is that of the order. `metrics` are finite numbers."""
    _same(asked, reply, "step")
    _finite(reply.metrics)


def _engine_built(asked: _Asked, reply: EngineBuilt) -> None:
    """`layouts` can be read. The address of `samples_at` is ``tcp://HOST:PORT``, `guests.url` ``http://HOST:PORT``."""
    address = reply.samples_at.address
    _must(_ADDRESS.fullmatch(address) is not None, "samples_at.address", address, "tcp://HOST:PORT")
    guests = "http://h:1" if reply.guests is None else reply.guests.url
    _must(_ADDRESS.fullmatch(guests.replace("http", "tcp", 1)) is not None, "guests.url", guests, "http://HOST:PORT")
    asked.member.num_tensors = tuple(_num_tensors(f"layouts[{i}]", each) for i, each in enumerate(reply.layouts))


def _samples_finished(asked: _Asked, reply: SamplesFinished) -> None:
    """`step` and `purpose` are those of the order, and each sample is one that was asked for, once in a message.

    Its prompt is as long as the one asked for; what the policy made is within the limits of the order, of
    `policy.max_total_sequence_length` and of `grpo.max_rollout_turns`. The versions are ones that the engine held since
    it was given the order, and its tokens are counted by them. There is text for validation alone.
    """
    _same(asked, reply, "step", "purpose")
    _check_samples(asked, reply.samples)
    versions = asked.member.versions
    held = versions[bisect.bisect_left(versions, asked.oldest_version) :]
    for row, sample in enumerate(reply.samples):
        for field in ("oldest_version", "newest_version"):
            if getattr(sample, field) not in held:
                _fits(False, row, field, sample, f"one that the engine held then: {_some(held)}")
        oldest, newest = sample.oldest_version, sample.newest_version
        _fits(oldest <= newest, row, "oldest_version", sample, "at most the newest, {}", newest)
        counts = sample.tokens_by_version
        fits = len(counts) == newest - oldest + 1 and sum(counts) == sample.response_length
        _fits(fits, row, "tokens_by_version", sample, "those of the response, {}, by version", sample.response_length)
        has_text = bool(sample.response) and reply.purpose == "train"
        _fits(not has_text, row, "response", sample, "empty: only validation has text")
        if (sample.group, sample.sample) not in asked.arrived:  # an order that is sent again is answered again
            asked.arrived.add((sample.group, sample.sample))
            asked.num_tokens += sample.response_length


def _generated(asked: _Asked, reply: Generated) -> None:
    """`step` and `purpose` are those of the order. Every sample was sent; there are `num_samples`, of `num_tokens`."""
    _same(asked, reply, "step", "purpose")
    wanted = sum(len(group.seeds) for group in asked.order.groups)
    _must(len(asked.arrived) == wanted, "command_id", reply.command_id, f"of an order whose {wanted} samples were sent")
    _must(reply.num_samples == wanted, "num_samples", reply.num_samples, f"{wanted}, as asked for")
    _must(reply.num_tokens == asked.num_tokens, "num_tokens", reply.num_tokens, f"{asked.num_tokens}, as were sent")


def _samples_restored(asked: _Asked, reply: SamplesFinished) -> None:
    """`step` is that of the order, and each sample is of a group that was asked for, once in a message.

    There are no more of a group than it has; none is longer than `policy.max_total_sequence_length`, and there is no
    text.
    """
    _same(asked, reply, "step")
    _must(reply.purpose == "train", "purpose", reply.purpose, "train")
    groups = {group for keys in asked.order.files.values() for _, group in keys}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(reply.samples):
        _fits(sample.group in groups, row, "group", sample, "one that was asked for")
        _fits(sample.sample < asked.order.num_samples, row, "sample", sample, "below {}", asked.order.num_samples)
        _fits((sample.group, sample.sample) not in seen, row, "sample", sample, "one that is not there twice")
        most = asked.limits.max_tokens
        if sample.branches:
            _check_branches(asked.limits, row, sample)
        else:
            _fits(sample.num_tokens <= most, row, "num_tokens", sample, "at most {}", most)
        made = sample.prompt_length + sample.response_length
        _fits(made <= sample.num_tokens, row, "num_tokens", sample, "at least {}", made)
        _fits(sample.oldest_version <= sample.newest_version, row, "oldest_version", sample, "at most the newest")
        _fits(not sample.response, row, "response", sample, "empty: only validation has text")
        seen.add((sample.group, sample.sample))
    asked.arrived |= seen


def _all_restored(asked: _Asked, reply: Generated) -> None:
    """`step` is that of the order. Every sample was sent; there are `num_samples`, and no token was made for them."""
    _same(asked, reply, "step")
    _must(reply.purpose == "train", "purpose", reply.purpose, "train")
    wanted = asked.order.num_samples * sum(map(len, asked.order.files.values()))
    _must(len(asked.arrived) == wanted, "command_id", reply.command_id, f"of an order whose {wanted} samples were sent")
    _must(reply.num_samples == wanted, "num_samples", reply.num_samples, f"{wanted}, as asked for")
    _must(reply.num_tokens == 0, "num_tokens", reply.num_tokens, "0: none was made")


def _samples_recorded(asked: _Asked, reply: SamplesRecorded) -> None:
    """`step` is that of the order. What was written and what is missing are all that was asked for."""
    _same(asked, reply, "step")
    wanted = sum(len(group.advantages) for group in asked.order.groups)
    _must(reply.num_missing <= wanted, "num_missing", reply.num_missing, f"at most {wanted}, as asked for")
    rest = wanted - reply.num_missing
    _must(reply.num_samples == rest, "num_samples", reply.num_samples, f"{rest}, as asked for but for those missing")


def _mesh_connected(asked: _Asked, reply: MeshConnected) -> None:
    """`mesh` is that of the order."""
    _same(asked, reply, "mesh")


def _refitted(asked: _Asked, reply: Refitted) -> None:
    """`version` is that of the order. `num_bytes` are of links that the process is an end of."""
    _same(asked, reply, "version")
    for link in reply.num_bytes:
        ends = [process_of(end) for end in link.split(">")]
        _must(len(ends) == 2 and asked.name in ends, "num_bytes", link, f"a link of {asked.name}")
    if asked.name in asked.order.only or not asked.order.only:
        asked.member.version = reply.version


def _attested(asked: _Asked, reply: Attested) -> None:
    """`version` is that of the order. `digests` are of every worker shard, 8 bytes for each tensor of its layout."""
    _same(asked, reply, "version")
    _check_digests(asked, reply.digests)


def _weights_copied(asked: _Asked, reply: WeightsCopied) -> None:
    """`version` is that of the order. `digests` are as in an `Attested` if they were asked for, else there are none."""
    _same(asked, reply, "version")
    if asked.order.with_digests:
        _check_digests(asked, reply.digests)
    else:
        _must(not reply.digests, "digests", len(reply.digests), "none, since they were not asked for")


def _transfers_planned(asked: _Asked, reply: TransfersPlanned) -> None:
    """There is a program for every worker shard whose layout was given, and for no other.

    Senders are their processes; meshes have names of their own, and they and links are between these worker shards.
    """
    parts = {*asked.order.sources, *asked.order.destinations}
    processes = {process_of(part) for part in parts}
    _known("programs", reply.programs, parts)
    _known("programs", parts, {*reply.programs}, "one of those that have a program")
    _known("senders", reply.senders, processes)
    names = [mesh.name for mesh in reply.meshes]
    _must(len({*names}) == len(names), "meshes", names, "of different names")
    for mesh in reply.meshes:
        _known(f"meshes[{mesh.name!r}]", mesh.members, parts)
    for link in reply.num_bytes:
        _must(link.count(">") == 1, "num_bytes", link, "a link, such as trainer-0>rollout-0")
        _known("num_bytes", link.split(">"), parts)


def _version_committed(asked: _Asked, reply: VersionCommitted) -> None:
    """`version` is that of the order. `differing` are engines whose digests were given."""
    _same(asked, reply, "version")
    engines = {process_of(part) for part in asked.order.digests}
    _known("differing", reply.differing, {name for name in engines if not name.startswith("trainer-")})


RULES: Mapping[type[Message], tuple[_Rule, ...]] = {
    RendezvousOpened: (_Rule(OpenRendezvous, None),),
    TrainerBuilt: (_Rule(BuildTrainer, _trainer_built),),
    Trained: (_Rule(Train, _trained),),
    SamplesMissing: (_Rule(Train, _samples_missing),),
    Evaluated: (_Rule(Evaluate, _evaluated),),
    CheckpointCopied: (_Rule(SaveCheckpoint, None),),
    CheckpointSaved: (_Rule(AwaitCheckpoint, None),),
    WeightsCopied: (_Rule(CopyWeights, _weights_copied),),
    EngineBuilt: (_Rule(BuildEngine, _engine_built),),
    SamplesFinished: (_Rule(Generate, _samples_finished), _Rule(RestoreSamples, _samples_restored)),
    Generated: (_Rule(Generate, _generated), _Rule(RestoreSamples, _all_restored)),
    SamplesRecorded: (_Rule(RecordSamples, _samples_recorded),),
    ProgramInstalled: (_Rule(InstallProgram, None),),
    MeshConnected: (_Rule(ConnectMesh, _mesh_connected),),
    Refitted: (_Rule(Refit, _refitted),),
    Attested: (_Rule(Attest, _attested),),
    TransfersPlanned: (_Rule(PlanTransfers, _transfers_planned),),
    VersionCommitted: (_Rule(CommitVersion, _version_committed),),
}


def rule_of(message: type[Message]) -> str:
    """Return what there is to say of a message as an answer, for the protocol's page; nothing if it is none."""
    said = [
        f"Answers `{order.__name__}`. {(check.__doc__ if check is not None else '') or ''}"
        for order, check in RULES.get(message, ())
    ]
    return " ".join(said)


# --- what rules are made of ------------------------------------------------------------------------------------------


def _check_samples(asked: _Asked, samples: Iterable[SampleScored]) -> None:
    """Compare the sizes of each sample with its order."""
    order: Generate = asked.order
    limits, groups = asked.limits, {group.group: group for group in order.groups}
    seen: set[tuple[int, int]] = set()
    for row, sample in enumerate(samples):
        group = groups.get(sample.group)
        if group is None:
            raise WireError(f"samples[{row}].group: {sample.group}, must be one that was asked for")
        prompt, made, turns = len(group.prompt_ids), sample.response_length, sample.num_turns
        _fits(sample.sample < len(group.seeds), row, "sample", sample, "below {}", len(group.seeds))
        _fits((sample.group, sample.sample) not in seen, row, "sample", sample, "one that is not there twice")
        seen.add((sample.group, sample.sample))
        if limits.plays and made:
            _check_episode(asked, row, sample)
            continue
        _fits(not sample.branches, row, "branches", sample, "none: no agent has asked for anything")
        _fits(turns >= 1 or limits.plays, row, "num_turns", sample, "at least 1")
        _fits(sample.prompt_length == prompt, row, "prompt_length", sample, "{}, as asked for", prompt)
        _fits(turns <= limits.max_turns, row, "num_turns", sample, "at most {}", limits.max_turns)
        most = min(turns * order.sampling.max_new_tokens, limits.max_tokens - prompt)
        _fits(turns <= made <= most, row, "response_length", sample, "from {} to {}", turns, most)
        length = sample.num_tokens
        _fits(length <= limits.max_tokens, row, "num_tokens", sample, "at most {}", limits.max_tokens)
        # Between two responses the environment has spoken.
        is_all = length == prompt + made if turns <= 1 else length >= prompt + made
        _fits(is_all, row, "num_tokens", sample, "that of the prompt, {}, and what follows, {}", prompt, made)
        can_end = sample.finish_reason != "turns" or turns == limits.max_turns
        _fits(can_end, row, "finish_reason", sample, "another after {} of {}", turns, limits.max_turns)


def _check_episode(asked: _Asked, row: int, sample: SampleScored) -> None:
    """Compare the sizes of an agent's episode, whose prompts are its own, with each other and with its order."""
    limits, turns, made = asked.limits, sample.num_turns, sample.response_length
    _fits(1 <= turns <= limits.max_turns, row, "num_turns", sample, "from 1 to {}", limits.max_turns)
    most = turns * asked.order.sampling.max_new_tokens
    _fits(turns <= made <= most, row, "response_length", sample, "from {} to {}", turns, most)
    _fits(1 <= len(sample.branches) <= turns, row, "branches", sample, "from 1 to {}", turns)
    _check_branches(limits, row, sample)
    _fits(sample.finish_reason != "turns", row, "finish_reason", sample, "another: agents have no limit of turns")


def _check_branches(limits: Limits, row: int, sample: SampleScored) -> None:
    """Compare the sizes of an agent's episode with each other."""
    for branch in sample.branches:
        fits = branch.prompt_length + branch.num_made <= branch.num_tokens <= limits.max_tokens
        _fits(fits, row, "branches", sample, "at most {} tokens each, and at least what counts", limits.max_tokens)
    num_made, num_tokens = (sum(getattr(b, name) for b in sample.branches) for name in ("num_made", "num_tokens"))
    _fits(num_made == sample.response_length, row, "response_length", sample, "that of the branches, {}", num_made)
    _fits(num_tokens == sample.num_tokens, row, "num_tokens", sample, "that of the branches, {}", num_tokens)
    first = sample.branches[0].prompt_length
    _fits(first == sample.prompt_length, row, "prompt_length", sample, "that of the first branch, {}", first)


def _check_digests(asked: _Asked, digests: tuple[bytes, ...]) -> None:
    """Compare the sizes of digests with the layouts that they are of."""
    sizes = tuple(map(len, digests))
    wanted = tuple(8 * num for num in asked.member.num_tensors)
    _must(sizes == wanted, "digests", f"{_some(sizes)} bytes", f"{_some(wanted)}: 8 for each tensor of a part's layout")


def _fits(holds: bool, row: int, field: str, sample: SampleScored, must: str, *values: int) -> None:
    """Raise `WireError` unless something holds of a field of a sample; there are many, and no text is made of most."""
    if not holds:
        _must(False, f"samples[{row}].{field}", getattr(sample, field), must.format(*values))


def _num_tensors(field: str, encoded: bytes) -> int:
    try:
        return layout.num_tensors(encoded)
    except RefitError as error:
        raise WireError(f"{field}: {error}") from error


def _must(holds: bool, field: str, value: object, must: str) -> None:
    """Raise `WireError` unless something holds."""
    if not holds:
        shown = value if isinstance(value, str) else repr(value)
        raise WireError(f"{field}: {shown[:_SHOWN]}, must be {must}")


def _same(asked: _Asked, reply: object, *fields: str) -> None:
    """Compare fields that a reply has from its order."""
    for field in fields:
        value, wanted = getattr(reply, field), getattr(asked.order, field)
        _must(value == wanted, field, value, f"{wanted}, as in the order")


def _finite(metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        _must(math.isfinite(value), f"metrics[{name!r}]", value, "a finite number")


def _known(field: str, names: Iterable[str], known: set[str], what: str = "one of those in the order") -> None:
    for name in names:
        _must(name in known, field, name, what)


def _some(values: Iterable[object]) -> str:
    """Return values in a line that is not too long."""
    return ", ".join(map(str, values))[-_SHOWN:] or "none"
