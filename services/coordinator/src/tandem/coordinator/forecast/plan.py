"""``coordinator plan CONFIG``: describe a run without weights, GPUs or processes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tandem.config import Config
from tandem.config.models import lora
from tandem.coordinator.forecast import media, plan_ages, sides
from tandem.coordinator.forecast import plan_json as outline
from tandem.coordinator.forecast.drafters import DrafterForecast, forecast_drafter
from tandem.coordinator.forecast.memory import BesideModel, columns, describe_beside_models, memory_of, size_of_gpu
from tandem.coordinator.forecast.transfers import SHARE, DifferenceForecast, RefitForecast, is_on_gpus, predict
from tandem.refit.layout import Tensor
from tandem.refit.planner import LinkSurvey

_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
_ASKED = (
    "  vLLM's loader says where the weights of this family lie, when engines start; until then each tensor counts as "
    "cut evenly over the ranks of an engine"
)
_WIDTH = 120
"""Width of the output, in columns, where it is not a terminal: the reasons of links fit."""


def explain(config: Config, console: Console, given_rates: plan_ages.GivenRates = plan_ages.NOT_GIVEN) -> None:
    """Print the parts of a run, and how weights get from its trainers to its engines.

    Asynchronous steps are predicted from rates, `given_rates` or measured before. Raise `ConfigError`, `ModelError`, or
    `RefitError` if sizes do not fit the model.
    """
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    model = sides.model_shape(config)
    forecast_sides = None if isinstance(model, str) else sides.sides(config, model)
    generates = config.generates
    explained = predict(config, *forecast_sides) if forecast_sides and generates else None
    beside = () if isinstance(model, str) else describe_beside_models(config, model)
    drafter = None if isinstance(model, str) else forecast_drafter(config, model)
    _print_ranks(config, forecast_sides, console)
    for line in outline.describe_beside(config, beside):
        console.print(f"  {line}", soft_wrap=True)
    for line in outline.steps(config):
        console.print(f"  {line}")
    if forecast_sides is None:
        has_config = not isinstance(sides.find_config_json(config), str)
        console.print(
            f"unknown: parameters, memory and transfers, because {model}{'' if has_config else ';'}", soft_wrap=True
        )
        if not has_config:
            console.print("set policy.model_name=FOLDER, a folder with the config.json of a model of that shape")
    else:
        _print_memory(config, forecast_sides[0], explained, beside, console)
        if generates:
            _print_cache(config, console)
            _print_drafter(drafter, console)
    if generates:
        plan_ages.print_ages(config, given_rates, explained.cost.seconds if explained else None, console)
    if explained:
        if forecast_sides and sides.is_asked(sides.generation(config), forecast_sides[1].model):
            console.print(_ASKED, soft_wrap=True)
        _print_links(explained.survey, console)
        _print_loads(explained, console)
        _print_cost(explained, console)
    for line in outline.list_notes(config):
        console.print(f"note: {line}", soft_wrap=True)


# --- for people ------------------------------------------------------------------------------------------------------


def _print_ranks(
    config: Config, forecast_sides: tuple[sides.ForecastSide, sides.ForecastSide] | None, console: Console
) -> None:
    size = ""
    if forecast_sides:
        size = f": {_parameters([each for each in forecast_sides[0].model.tensors if not lora.is_adapter(each.name)])}"
    console.print(f"[bold]{config.policy.model_name}[/]{size}", soft_wrap=True)
    trains, generates = sides.training(config), sides.generation(config)
    console.print(f"  {outline.ranks_of_training(config)}: {sides.words(config, trains)}{_dtypes(forecast_sides, 0)}")
    if config.generates:
        ranks = generates.num_ranks
        console.print(
            f"  {ranks} engine rank{'s' if ranks > 1 else ''}: "
            f"{sides.words(config, generates)}{_dtypes(forecast_sides, 1)}"
        )
    else:
        console.print(f"  no engines: {config.algorithm} generates nothing, and no weights move")
    if forecast_sides and (
        adapters := [each for each in forecast_sides[0].model.tensors if lora.is_adapter(each.name)]
    ):
        console.print(f"  trained are adapters of {len(adapters) // 2:,} layers: {_parameters(adapters)}")
    cluster = config.cluster
    if config.generates and not is_on_gpus(config):
        console.print(f"  on the CPUs of {cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}")
    elif not config.generates or config.policy.generation.colocated.enabled:
        console.print(f"  on the same GPUs, {cluster.gpus_per_node} a node")
    else:
        console.print(f"  on different GPUs, {cluster.gpus_per_node} a node")


def _parameters(tensors: Sequence[Tensor]) -> str:
    num = sum(math.prod(tensor.shape) for tensor in tensors)
    number = f"{num / 1e9:,.1f} billion" if num >= 1e9 else f"{num / 1e6:,.1f} million"
    return f"{number} parameters in {len(tensors):,} tensors"


def _dtypes(forecast_sides: tuple[sides.ForecastSide, sides.ForecastSide] | None, side: int) -> str:
    return (
        f"; {', '.join(sorted({tensor.dtype for tensor in forecast_sides[side].model.tensors}))}"
        if forecast_sides
        else ""
    )


def _print_memory(
    config: Config,
    trainers: sides.ForecastSide,
    explained: RefitForecast | None,
    beside: Sequence[BesideModel],
    console: Console,
) -> None:
    """Print the phases of the trainer that needs most. On CPUs, attention and gathering take other memory."""
    on_gpus = is_on_gpus(config)
    of_refit = None if explained is None else explained.memory
    memory = memory_of(config, trainers, with_activations=on_gpus, of_refit=of_refit, beside=beside)
    peak, knows = memory.peak, memory.knows_activations
    is_in_host_memory = config.policy.dtensor_cfg.cpu_offload and not config.policy.megatron_cfg.enabled
    location = " (in host memory)" if is_in_host_memory else ""
    if not knows:
        listed = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in peak.parts.items())
        console.print(f"  {peak.num_bytes / 1e9:,.2f} GB a trainer{location}, without activations: {listed}")
        return
    console.print(
        f"  trainer {memory.rank} needs most{location}: {peak.num_bytes / 1e9:,.1f} GB at its peak, in {peak.name}"
    )
    names = columns(memory)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in (f"GB of trainer {memory.rank}", *names, "in all"):
        table.add_column(title, justify="right" if table.columns else "left")
    for phase in memory.phases:
        sizes = [*(phase.parts.get(name, 0.0) for name in names), phase.num_bytes]
        table.add_row(phase.name, *(f"{size / 1e9:,.2f}" for size in sizes))
    console.print(table)
    for line in media.describe_bound(config, names):
        console.print(f"  {line}")
    size = size_of_gpu()
    if size is not None and not location and peak.num_bytes > size:
        console.print(f"  [bold red]more than a GPU here has: {size / 1e9:,.1f} GB[/]")


def _print_cache(config: Config, console: Console) -> None:
    """Print what an engine keeps of a sequence, by kind of layer."""
    cache = sides.describe_cache(config)
    if cache is None:
        console.print("  what an engine keeps of a sequence is unknown: the model does not run without elements")
        return
    num, per_layer = config.policy.generation.width, _describe_layers(cache)
    at_once = f"{num * cache.num_bytes / 1e9:,.3g} GB of {num:,}"
    console.print(
        f"  an engine keeps {cache.num_bytes / 1e6:,.4g} MB of {cache.num_tokens:,} tokens, {at_once} sequences: "
        f"{per_layer}",
        soft_wrap=True,
    )


def _describe_layers(cache: sides.SequenceCache) -> str:
    return ", ".join(
        f"{layers.num_bytes / 1e6:,.3g} MB in each of {layers.num_layers} {layers.kind} layers"
        for layers in cache.layers
    )


def _print_drafter(drafter: DrafterForecast | None, console: Console) -> None:
    """Print the memory of the drafter in engines, if there is one."""
    if drafter is None:
        return
    weights = f"weights are unknown, because {drafter.unknown}"
    if not drafter.unknown:
        number = f"{drafter.num_parameters / 1e6:,.1f} million parameters"
        weights = f"{number}, {drafter.weights / 1e9:,.3g} GB of weights an engine rank"
    cache = "; what it keeps of a sequence is unknown"
    if drafter.cache is not None:
        size = f"{drafter.cache.num_bytes / 1e6:,.4g} MB of {drafter.cache.num_tokens:,} tokens"
        cache = f"; it keeps {size}: {_describe_layers(drafter.cache)}"
    console.print(f"  the drafter ({drafter.method}): {weights}{cache}", soft_wrap=True)


def _print_cost(explained: RefitForecast, console: Console) -> None:
    cost = explained.cost
    console.print(
        f"lower bound  {_time(cost.bound_s)}  = max(egress {_time(cost.egress_s)}, ingress {_time(cost.ingress_s)}, "
        f"install {_time(cost.install_s)})"
    )
    console.print(f"predicted    {_time(cost.seconds)}  limited by: {cost.limited_by}")
    if explained.differences is not None:
        _print_differences(explained.differences, console)
    if explained.frozen_cost is not None:
        links, once = explained.survey.frozen_links, explained.frozen_cost
        num_bytes = sum(link.num_bytes for link in links)
        unit, ways = _unit([num_bytes]), ", ".join(sorted({link.transport for link in links}))
        moved = f"{num_bytes / _UNITS[unit]:,.2f} {unit} of frozen weights by {ways}"
        console.print(f"first refit  {_time(once.seconds)} more: {moved}; limited by: {once.limited_by}")
    console.print(f"planned in {explained.seconds:.1f} s; rates are those of cluster.links", style="dim")


def _print_differences(moved: DifferenceForecast, console: Console) -> None:
    unit, peak = _unit([moved.num_whole]), max(moved.kept_bytes.values())
    console.print(
        f"differences  {_time(moved.cost.seconds)}, and the time to find them, if {SHARE:.0%} has changed: "
        f"{moved.num_bytes / _UNITS[unit]:,.2f} {unit} by stream instead of {moved.num_whole / _UNITS[unit]:,.2f}; a "
        f"trainer keeps up to {peak / _UNITS[_unit([peak])]:,.2f} {_unit([peak])} for it, in every phase",
        soft_wrap=True,
    )


def _print_links(survey: LinkSurvey, console: Console) -> None:
    groups: dict[tuple[str, str], list[int]] = {}
    for link in survey.links:
        groups.setdefault((link.transport, link.reason), []).append(link.num_bytes)
    total, link_unit = _unit(map(sum, groups.values())), _unit(size for sizes in groups.values() for size in sizes)
    link_unit = "MB" if link_unit == "GB" else link_unit  # links differ by orders of magnitude
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("transport", "links", total, f"{link_unit} a link: least", "median", "most", "why"):
        table.add_column(column, justify="left" if column in ("transport", "why") else "right")
    for (transport, reason), sizes in sorted(groups.items()):
        spread = (min(sizes), statistics.median(sizes), max(sizes))
        table.add_row(
            transport,
            f"{len(sizes):,}",
            f"{sum(sizes) / _UNITS[total]:,.2f}",
            *(f"{size / _UNITS[link_unit]:,.1f}" for size in spread),
            reason,
        )
    console.print(table)


def _print_loads(explained: RefitForecast, console: Console) -> None:
    survey = explained.survey
    loads: dict[str, Mapping[str, int]] = {
        "sent by, or read from, {}": survey.egress,
        "received by {}": survey.ingress,
        "peak extra memory of {}": explained.memory,
    }
    unit = _unit(size for amounts in loads.values() for size in amounts.values())
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in (f"{unit} a process", "least", "median", "most"):
        table.add_column(column, justify="right" if column in ("least", "median", "most") else "left")
    for template, amounts in loads.items():
        for kind, called in (("trainer", "a trainer"), ("rollout", "an engine rank")):
            sizes = [size for member, size in amounts.items() if member.startswith(kind)]
            if sizes:
                spread = (min(sizes), statistics.median(sizes), max(sizes))
                table.add_row(template.format(called), *(f"{size / _UNITS[unit]:,.3f}" for size in spread))
    console.print(table)


def _unit(sizes: Iterable[int]) -> str:
    """Return the unit in which the largest of some sizes is shown."""
    largest = max(sizes, default=0)
    return next((unit for unit, num_bytes in _UNITS.items() if largest >= num_bytes), "bytes")


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
