"""``coordinator plan CONFIG``: what a refit of this configuration will be, without weights, GPUs or processes.

Trainers and engines are laid out from the model's ``config.json`` and the parallel sizes in the configuration, and the
same planner that a run uses says what moves; `tandem.refit.cost` says how long that takes at the rates of
``cluster.links``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from tandem.common.config import Config
from tandem.common.errors import ConfigError, ModelError
from tandem.common.placement import first_gpu_of_engines
from tandem.refit.adapters.catalogue import ModelShape, from_checkpoint, from_config
from tandem.refit.adapters.deployment import Deployment, Hosts
from tandem.refit.adapters.dtensor import DTensor
from tandem.refit.adapters.huggingface import HuggingFace
from tandem.refit.adapters.megatron import Megatron
from tandem.refit.adapters.vllm import Vllm
from tandem.refit.cost import Cost, bucket_memory, cost
from tandem.refit.layout import Address, CudaMemory, Layout, SharedMemory
from tandem.refit.planner import Survey, survey

_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "bytes": 1.0}
_WIDTH = 120
"""Columns where the output is no terminal: the reasons of links fit."""


class Side(msgspec.Struct, frozen=True):
    """Trainers, or engines."""

    kind: str
    deployment: Deployment
    model: ModelShape
    """As this side keeps it."""
    words: str
    """Backend and parallel sizes, for people."""


class Explained(msgspec.Struct, frozen=True):
    """All that is known of a refit before there is one."""

    survey: Survey
    cost: Cost
    memory: dict[str, int]
    """Peak bytes beside the weights, by member: buckets of streams, and staging."""
    seconds: float
    """That laying out and planning took."""


def explain(config: Config, console: Console) -> None:
    """Print how weights get from the trainers to the engines of `config`.

    Raises `ConfigError`, `ModelError`, or `RefitError` where sizes do not fit the model.
    """
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH)
    trainers, engines = sides(config)
    explained = predict(config, trainers, engines)
    _print_sides(config, trainers, engines, console)
    _print_links(explained.survey, console)
    _print_loads(explained, console)
    found = explained.cost
    console.print(
        f"lower bound  {_time(found.bound_s)}  = max(egress {_time(found.egress_s)}, ingress {_time(found.ingress_s)}, "
        f"install {_time(found.install_s)})"
    )
    console.print(f"predicted    {_time(found.seconds)}  limited by: {found.limited_by}")
    console.print(f"planned in {explained.seconds:.1f} s; rates are those of cluster.links", style="dim")


def predict(config: Config, trainers: Side, engines: Side) -> Explained:
    """Lay both sides out and plan. Raises `RefitError` where sizes do not fit the model."""
    started = time.perf_counter()
    before, after = _hosts(config, trainers, engines)
    sources = _named("trainer", trainers.deployment.layouts(trainers.model, before))
    sources = {member: _reachable(layout) for member, layout in sources.items()}
    destinations = _named("rollout", engines.deployment.layouts(engines.model, after))
    shared = config.policy.generation.colocated.enabled  # whatever the algorithm: engines are supposed
    found = survey(sources, destinations, allow_alias=shared and config.refit.alias == "auto")
    layouts = {**sources, **destinations}
    memory = bucket_memory(found.links)
    for engine, num_bytes in found.staging.items():
        memory[engine] = memory.get(engine, 0) + num_bytes
    predicted = cost(found.links, layouts, len(sources), config.cluster.links)
    return Explained(found, predicted, memory, time.perf_counter() - started)


def _hosts(config: Config, trainers: Side, engines: Side) -> tuple[Hosts, Hosts]:
    """Return where trainers and engines run: one process a GPU, or all spread over the nodes where none is used."""
    num_trainers, num_engines = trainers.deployment.num_ranks, engines.deployment.num_ranks
    if not _on_gpus(config):
        num_nodes = config.cluster.num_nodes
        return (
            Hosts("node", -(-num_trainers // num_nodes), has_gpus=False),
            Hosts("node", -(-num_engines // num_nodes), has_gpus=False),
        )
    hosts = Hosts("node", config.cluster.gpus_per_node)
    return hosts, msgspec.structs.replace(hosts, first=first_gpu_of_engines(config))


def _on_gpus(config: Config) -> bool:
    """Say whether weights lie on GPUs: the embedded engine keeps its own on the CPU, and what trains with it too."""
    return config.cluster.gpus_per_node > 0 and config.policy.generation.backend != "transformers"


def sides(config: Config) -> tuple[Side, Side]:
    """Return trainers and engines as the configuration describes them."""
    model = model_shape(config)
    policy, num_trainers = config.policy, config.cluster.trainers
    megatron = policy.megatron_cfg
    if megatron.enabled:
        tp, pp, cp = (
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            megatron.context_parallel_size,
        )
        ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size
        trained = Megatron(
            tp=tp,
            pp=pp,
            cp=cp,
            dp=config.data_parallel_size,
            ep=ep,
            etp=etp,
            num_layers_in_first_stage=megatron.num_layers_in_first_pipeline_stage,
            num_layers_in_last_stage=megatron.num_layers_in_last_pipeline_stage,
        )
        trainers = Side("trainer", trained, model.with_dtype(policy.precision), _sizes("Megatron-Core", trained))
    else:
        tensor = policy.dtensor_cfg.tensor_parallel_size
        shard = num_trainers // tensor
        words = f"DTensor, FSDP{shard} × TP{tensor}" if tensor > 1 else f"DTensor, FSDP{shard}"
        trainers = Side("trainer", DTensor(shard=shard, tensor=tensor), model.with_dtype("float32"), words)
    return trainers, _engines(config, model)


_ENGINE_DTYPES = {
    "auto": "",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
    "fp8": "fp8",
}
"""Element types by vLLM's names for them, and NeMo-RL's ``fp8``; ``auto`` is the policy's own."""


def _engines(config: Config, model: ModelShape) -> Side:
    generation, num_engines = config.policy.generation, config.cluster.rollouts
    if generation.backend == "transformers":
        held = model.with_dtype(config.policy.precision)
        return Side("engine", HuggingFace(num_engines), held, "transformers, whole models")
    vllm = generation.vllm_cfg
    if vllm is None:
        raise ConfigError("policy.generation.vllm_cfg: required where policy.generation.backend is vllm")
    dtype = _ENGINE_DTYPES.get(vllm.precision)
    if dtype is None:
        valid = ", ".join(_ENGINE_DTYPES)
        raise ConfigError(f"policy.generation.vllm_cfg.precision: {vllm.precision!r} is not one of {valid}")
    dtype = dtype or config.policy.precision
    sizes = Vllm(
        tp=vllm.tensor_parallel_size,
        pp=vllm.pipeline_parallel_size,
        replicas=num_engines,
        expert_parallel=vllm.expert_parallel_size > 1,
    )
    held = model.with_dtype("bfloat16").quantised() if dtype == "fp8" else model.with_dtype(dtype)
    words = _sizes("vLLM", sizes) + (f", {num_engines} engines" if num_engines > 1 else "")
    return Side("engine", sizes, held, words)


def model_shape(config: Config) -> ModelShape:
    """Return the shape of ``policy.model_name``, which must be a folder, or of ``policy.new_model``.

    Raises `ConfigError` where there is neither, and `ModelError` where the folder's files are of no use.
    """
    folder, new = Path(config.policy.model_name), config.policy.new_model
    if any(folder.glob("*.safetensors")):
        return from_checkpoint(folder)
    if (folder / "config.json").is_file():
        return from_config(_read_json(folder / "config.json"))
    if new is not None:
        return from_config({"vocab_size": len(new.characters) + 2, **new.config})
    missing = "holds no config.json" if folder.is_dir() else "is no folder here"
    raise ConfigError(f"policy.model_name: {str(folder)!r} {missing}: name a model's folder, with or without weights")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _named(kind: str, layouts: Iterable[Layout]) -> dict[str, Layout]:
    return {f"{kind}-{rank}": layout for rank, layout in enumerate(layouts)}


def _reachable(layout: Layout) -> Layout:
    """Return a trainer's layout as it will be: in memory that the processes of its host can open."""
    address: Address = SharedMemory(0, 0, 0) if layout.device == "cpu" else CudaMemory(0, layout.device, b"", 0)
    storages = tuple(msgspec.structs.replace(storage, address=address) for storage in layout.storages)
    return msgspec.structs.replace(layout, storages=storages)


def _sizes(name: str, deployment: Megatron | Vllm) -> str:
    """Say which parallel sizes are not one."""
    numbers = {
        field: getattr(deployment, field)
        for field in ("tp", "pp", "cp", "ep", "dp")
        if isinstance(getattr(deployment, field, None), int)
    }
    said = [f"{field.upper()}{size}" for field, size in numbers.items() if size > 1]
    return f"{name} {' × '.join(said) or 'on one GPU'}"


# --- for people ------------------------------------------------------------------------------------------------------


def _print_sides(config: Config, trainers: Side, engines: Side, console: Console) -> None:
    num = trainers.model.num_parameters
    size = f"{num / 1e9:,.1f} billion" if num >= 1e9 else f"{num / 1e6:,.1f} million"
    console.print(
        f"[bold]{config.policy.model_name}[/]: {size} parameters in {len(trainers.model.tensors):,} tensors",
        soft_wrap=True,
    )
    for side in (trainers, engines):
        dtypes = sorted({tensor.dtype for tensor in side.model.tensors})
        ranks = side.deployment.num_ranks
        console.print(f"  {ranks} {side.kind} rank{'s' if ranks > 1 else ''}: {side.words}; {', '.join(dtypes)}")
    cluster = config.cluster
    if not _on_gpus(config):
        console.print(f"  on the CPUs of {cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}")
    elif config.policy.generation.colocated.enabled:
        console.print(f"  on the same GPUs, {cluster.gpus_per_node} a node")
    else:
        console.print(f"  on different GPUs, {cluster.gpus_per_node} a node")


def _print_links(found: Survey, console: Console) -> None:
    groups: dict[tuple[str, str], list[int]] = {}
    for link in found.links:
        groups.setdefault((link.transport, link.why), []).append(link.num_bytes)
    total, each = _unit(map(sum, groups.values())), _unit(size for sizes in groups.values() for size in sizes)
    each = "MB" if each == "GB" else each  # links differ by orders of magnitude
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("transport", "links", total, f"{each} a link: least", "median", "most", "why"):
        table.add_column(column, justify="left" if column in ("transport", "why") else "right")
    for (transport, why), sizes in sorted(groups.items()):
        spread = (min(sizes), statistics.median(sizes), max(sizes))
        table.add_row(
            transport,
            f"{len(sizes):,}",
            f"{sum(sizes) / _UNITS[total]:,.2f}",
            *(f"{size / _UNITS[each]:,.1f}" for size in spread),
            why,
        )
    console.print(table)


def _print_loads(explained: Explained, console: Console) -> None:
    found = explained.survey
    loads: dict[str, Mapping[str, int]] = {
        "sent by, or read from, {}": found.egress,
        "received by {}": found.ingress,
        "peak extra memory of {}": explained.memory,
    }
    unit = _unit(size for amounts in loads.values() for size in amounts.values())
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in (f"{unit} a process", "least", "median", "most"):
        table.add_column(column, justify="right" if column in ("least", "median", "most") else "left")
    for words, amounts in loads.items():
        for kind, called in (("trainer", "a trainer"), ("rollout", "an engine rank")):
            sizes = [size for member, size in amounts.items() if member.startswith(kind)]
            if sizes:
                spread = (min(sizes), statistics.median(sizes), max(sizes))
                table.add_row(words.format(called), *(f"{size / _UNITS[unit]:,.3f}" for size in spread))
    console.print(table)


def _unit(sizes: Iterable[int]) -> str:
    """Return the unit that the largest of some sizes is told in."""
    largest = max(sizes, default=0)
    return next((unit for unit, num_bytes in _UNITS.items() if largest >= num_bytes), "bytes")


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"
