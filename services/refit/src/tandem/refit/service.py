"""The refit service: plans transfers, and decides which weight version is current.

It consumes layouts and digests, and produces transfer programs and commits. It waits only for the coordinator's next
command. No weights pass through it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar, assert_never

import msgspec

from tandem.common import messages, wire, worker_shards
from tandem.common.errors import RefitError
from tandem.config.schema.run import LinkRates
from tandem.launch.service import ServiceContext
from tandem.refit import layout, planner, program
from tandem.refit.cost import cost
from tandem.refit.digests import comparison
from tandem.refit.digests.comparison import Digests, DigestVerdict, Held
from tandem.refit.layout import Layout
from tandem.refit.planning.flows import FlowLink
from tandem.refit.program import TransferProgram
from tandem.refit.transports.sizes import largest_difference

T = TypeVar("T")


class _MakePlan(Protocol):
    """Either planner: the plain one, or that of ``refit.store``."""

    def __call__(
        self,
        sources: Mapping[str, Layout],
        destinations: Mapping[str, Layout],
        *,
        allow_alias: bool,
        alias_frozen: bool,
    ) -> planner.TransferPlan: ...


class RefitService:
    """The run's weight plane."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._verify = context.config.refit.verify
        self._rates = context.config.cluster.links
        self._differences = context.config.refit.differences
        self._make_plan: _MakePlan = planner.plan
        if context.config.refit.store is not None:
            from tandem.refit.store import published  # most runs need none of it

            self._make_plan = published.plan_with_store
        self._sources: dict[str, Layout] = {}
        self._destinations: dict[str, Layout] = {}
        self.version: int | None = None
        """The current version: the newest that an engine was found to hold completely."""
        self._source_digests: dict[str, Digests] = {}
        """The trainers' digests of `version`."""

    def handle(self, command: messages.RefitCommand, arrays: wire.Arrays) -> None:
        """Execute one command."""
        match command:
            case messages.PlanTransfers():
                with self._context.phase("planning transfers"):
                    self._plan(command)
            case messages.CommitVersion():
                with self._context.phase(f"committing version {command.version}"):
                    self._commit(command)
            case unhandled:
                assert_never(unhandled)

    def work(self) -> bool:
        """Return False: there is nothing to do between commands."""
        return False

    def close(self) -> None:
        """Release nothing: the memory belongs to trainers and engines."""

    def _plan(self, command: messages.PlanTransfers) -> None:
        started = time.perf_counter()
        self._sources = _read(command.sources, layout.decode)
        destinations = _read(command.destinations, layout.decode)
        plan = self._make_plan(
            self._sources, destinations, allow_alias=command.allow_alias, alias_frozen=command.alias_frozen
        )
        reply, self._destinations = _describe_plan(
            command, plan, self._sources, self._rates, self._differences, started
        )
        self._context.reply(command.command_id, reply)

    def _commit(self, command: messages.CommitVersion) -> None:
        """Make the version current, and report engines with weights that differ from the trainers'."""
        verdict = self._compare(command) if command.digests else DigestVerdict((), 0)
        self.version = command.version
        reply = messages.VersionCommitted(
            command_id=command.command_id,
            version=command.version,
            differing=verdict.differing,
            digest=verdict.digest,
        )
        self._context.reply(command.command_id, reply)

    def _compare(self, command: messages.CommitVersion) -> DigestVerdict:
        digests = _read(command.digests, comparison.decode_digests)
        unknown = sorted(digests.keys() - self._sources.keys() - self._destinations.keys())
        if unknown:
            raise RefitError(f"digests came from {', '.join(unknown)}, which has no plan")
        missing = sorted(self._sources.keys() - digests.keys())
        if missing:
            raise RefitError(f"no digests came from {', '.join(missing)}, which has sent the weights")
        sources: dict[str, Digests] = {}
        held_by_sources: dict[str, Held] = {}
        for member, source in self._sources.items():
            sources[member], held_by_sources[member] = digests[member], (source, digests[member])
        # Samples of two versions cover different elements, and always differ.
        if self._verify == "full" and command.version != self.version:
            if command.has_update and comparison.is_unchanged(self._source_digests, sources):
                raise RefitError(
                    f"the optimizer has stepped, but no weight has changed since version {self.version}: engines "
                    "are not given the trained weights, or the learning rate is too small for policy.precision"
                )
            self._source_digests = sources
        engines: dict[str, dict[str, Held]] = {}
        for shard, destination in self._destinations.items():
            if shard in digests:
                engines.setdefault(worker_shards.process_of(shard), {})[shard] = destination, digests[shard]
        return comparison.compare(held_by_sources, engines)


def _read(encoded: Mapping[str, bytes], decode: Callable[[bytes], T]) -> dict[str, T]:
    """Decode the value of each worker. Raises `RefitError`, which names the worker."""
    read = {}
    for shard, payload in encoded.items():
        try:
            read[shard] = decode(payload)
        except RefitError as error:
            raise RefitError(f"{shard}: {error}") from error
    return read


def _describe_plan(
    command: messages.PlanTransfers,
    plan: planner.TransferPlan,
    sources: Mapping[str, Layout],
    rates: LinkRates,
    differences: str,
    started: float,
) -> tuple[messages.TransfersPlanned, dict[str, Layout]]:
    """Return the answer, and the destinations' layouts as they receive, of which digests are."""
    received = dict(plan.received)
    predicted = cost(plan.links, {**sources, **received}, len(sources), rates)
    reply = messages.TransfersPlanned(
        command_id=command.command_id,
        programs={member: program.encode(each) for member, each in _programs(plan, rates, differences).items()},
        senders=tuple(
            dict.fromkeys(worker_shards.process_of(shard) for shard, each in plan.programs.items() if each.sends)
        ),
        transfer_groups=tuple(
            messages.PlannedTransferGroup(
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
