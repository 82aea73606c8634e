"""The cost of a refit that streams what changed: a plan's links at a share of changed elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tandem.config import Config
from tandem.config.schema import LinkRates
from tandem.refit.cost import RefitCost, cost
from tandem.refit.layout import Layout
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
    config: Config, links: Sequence[FlowLink], layouts: Mapping[str, Layout], num_sources: int, rates: LinkRates
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
