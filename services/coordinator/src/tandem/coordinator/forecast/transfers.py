"""The transfers that a configuration leads to, with their times, whole or of what changed.

Trainers and engines are laid out from the model's ``config.json`` and the configuration's parallel sizes (`sides`). The
run's own planner computes the transfers; `tandem.refit.cost` computes their time at the rates of ``cluster.links``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from tandem.config import Config, placement, schema
from tandem.coordinator.forecast.drafters import add_refitted_drafter
from tandem.coordinator.forecast.sides import ForecastSide
from tandem.refit.adapters.deployment import HostNames
from tandem.refit.cost import RefitCost, bucket_memory, cost
from tandem.refit.layout import Address, CudaMemory, Layout, SharedMemory
from tandem.refit.planner import LinkSurvey, survey
from tandem.refit.planning.flows import FlowLink
from tandem.refit.transports.stream import StreamTransport

SHARE = 0.01
"""Share of elements that an optimizer step is taken to change; `benchmarks/test_differences.py` measures it."""

_OF_WHOLE = 1.6
"""Bytes per changed element over those of an element in bfloat16: its value, and its place in 1.1 bytes."""


class DifferenceForecast(msgspec.Struct, frozen=True):
    """A refit to engines that hold the version before."""

    cost: RefitCost
    """Cost on the wires. What it takes to find the differences comes on top."""
    num_bytes: int
    """Bytes from trainers to engines, over streams."""
    num_whole: int
    """The same without differences."""
    kept_bytes: dict[str, int]
    """Bytes that each trainer keeps between refits, at most: of what several engines get it keeps one copy."""


def differences(
    config: Config, links: Sequence[FlowLink], layouts: Mapping[str, Layout], num_sources: int, rates: schema.LinkRates
) -> DifferenceForecast | None:
    """Predict a refit in which `SHARE` has changed; None if the configuration sends no differences."""
    if config.refit.differences == "off" or config.policy.adapters is not None:
        return None
    whole_links = [link for link in links if _differs(link)]
    if not whole_links:
        return None
    smaller = [_smaller(link) if _differs(link) else link for link in links]
    kept_bytes: dict[str, int] = {}
    for link in whole_links:
        kept_bytes[link.source] = kept_bytes.get(link.source, 0) + link.num_bytes
    return DifferenceForecast(
        cost=cost(smaller, layouts, num_sources, rates),
        num_bytes=sum(link.num_bytes for link in smaller if _differs(link)),
        num_whole=sum(link.num_bytes for link in whole_links),
        kept_bytes=kept_bytes,
    )


def _differs(link: FlowLink) -> bool:
    return link.transport == StreamTransport.name and link.round == 0


def _smaller(link: FlowLink) -> FlowLink:
    return msgspec.structs.replace(link, num_bytes=round(link.num_bytes * SHARE * _OF_WHOLE))


class RefitForecast(msgspec.Struct, frozen=True):
    """All that is known of a refit in advance."""

    survey: LinkSurvey
    cost: RefitCost
    """Cost of every version but an engine's first."""
    frozen_cost: RefitCost | None
    """Additional cost of frozen weights in the first version; None if there are none."""
    memory: dict[str, int]
    """Peak bytes beside the weights, by process: buckets of streams, and staging."""
    seconds: float
    """Time that laying out and planning took."""
    differences: DifferenceForecast | None = None
    """The same refit with differences; None if the configuration sends none."""


def predict(config: Config, trainers: ForecastSide, engines: ForecastSide) -> RefitForecast:
    """Lay out both sides and plan. Raise `RefitError` if sizes do not fit the model."""
    started = time.perf_counter()
    engines = add_refitted_drafter(config, engines)
    before, after = _hosts(config, trainers, engines)
    sources = _name_members("trainer", trainers.deployment.layouts(trainers.model, before))
    sources = {member: _reachable(layout) for member, layout in sources.items()}
    destinations = _name_members("rollout", engines.deployment.layouts(engines.model, after))
    shared = config.policy.generation.colocated.enabled  # for any algorithm, as if it had engines
    may_alias = config.refit.alias == "auto"
    link_survey = survey(sources, destinations, allow_alias=shared and may_alias, alias_frozen=may_alias)
    layouts = {**sources, **destinations}
    memory = bucket_memory(link_survey.links)
    for member, num_bytes in bucket_memory(link_survey.frozen_links).items():
        memory[member] = max(memory.get(member, 0), num_bytes)
    for engine, num_bytes in link_survey.staging.items():
        memory[engine] = memory.get(engine, 0) + num_bytes
    links, rates = (link_survey.links, link_survey.frozen_links), config.cluster.links
    smaller = differences(config, link_survey.links, layouts, len(sources), rates)
    for trainer, num_bytes in smaller.kept_bytes.items() if smaller else ():
        memory[trainer] = memory.get(trainer, 0) + num_bytes
    refit_cost, once = (cost(of, layouts, len(sources), rates) if of else None for of in links)
    assert refit_cost is not None, "engines want something that is trained"
    return RefitForecast(link_survey, refit_cost, once, memory, time.perf_counter() - started, smaller)


def _hosts(config: Config, trainers: ForecastSide, engines: ForecastSide) -> tuple[HostNames, HostNames]:
    """Return the hosts of trainers and engines: one process for each GPU, or all spread over the nodes without GPUs."""
    num_trainers, num_engines = trainers.deployment.num_ranks, engines.deployment.num_ranks
    if not is_on_gpus(config):
        num_nodes = config.cluster.num_nodes
        return (
            HostNames("node", -(-num_trainers // num_nodes), has_gpus=False),
            HostNames("node", -(-num_engines // num_nodes), has_gpus=False),
        )
    hosts = HostNames("node", config.cluster.gpus_per_node)
    return hosts, msgspec.structs.replace(hosts, first=placement.find_first_gpu_of_engines(config))


def is_on_gpus(config: Config) -> bool:
    """Return whether weights lie on GPUs: the embedded engine keeps its own on the CPU, and its trainers do, too."""
    return config.cluster.gpus_per_node > 0 and config.policy.generation.kind.is_on_gpus


def _name_members(kind: str, layouts: Iterable[Layout]) -> dict[str, Layout]:
    return {f"{kind}-{rank}": layout for rank, layout in enumerate(layouts)}


def _reachable(layout: Layout) -> Layout:
    """Return a trainer's layout as it will be: in memory that the processes of its host can open."""
    address: Address = SharedMemory(0, 0, 0) if layout.device == "cpu" else CudaMemory(0, layout.device, b"", 0)
    storages = tuple(msgspec.structs.replace(storage, address=address) for storage in layout.storages)
    return msgspec.structs.replace(layout, storages=storages)
