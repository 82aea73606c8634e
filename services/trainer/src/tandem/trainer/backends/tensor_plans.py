"""Tensor-parallel plans for known architectures of Transformers, or custom ones.

A plan has a style for each module, for its input, parameters and output (`ParallelStyle`, as in Megatron-LM, Shoeybi et
al. 2019, arXiv:1909.08053, section 3). Afterwards every parameter is a DTensor on one mesh. Modules that a plan does
not name are whole on every rank.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, parallel

from tandem.common.errors import ConfigError, nearest
from tandem.config.installed.model_fields import is_cut_like_llama
from tandem.config.models.families import FUSED_HEADS, TENSOR_PLANS, find_language_prefix, find_other_prefixes
from tandem.trainer.models import scalar_head

Plan = Mapping[str, parallel.ParallelStyle]
"""A style for each module, by its path; ``*`` stands for any part between two dots."""

# It warns of each tensor that takes two steps to be gathered over a mesh of two dimensions: checkpoints do that.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "norm",
)
_FEED_FORWARDS = ("mlp", "shared_experts")
"""Names of feed-forward modules, unless they are a mixture of experts, where the parts see plain tensors."""
_CUSTOM = "policy.dtensor_cfg.custom_parallel_plan"


class PlainStyle(parallel.ParallelStyle):
    """Keeps a module's own parameters whole, or split, and runs it on plain tensors."""

    def __init__(self, *placements: tuple[Placement, Placement]) -> None:
        """Take the placement of the parameters, and of their gradients on the ranks, for each axis of the mesh."""
        super().__init__()
        self._placements, self._gradients = zip(*placements, strict=True)

    @classmethod
    def make_whole(cls, *, sums: bool) -> PlainStyle:
        """Return a style that keeps parameters whole on every rank.

        With `sums`, ranks see different tokens or heads, so that their gradients are summed. Otherwise they are equal.
        """
        return cls((Replicate(), Partial() if sums else Replicate()))

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for name in dict(module.named_parameters(recurse=False)):
            _distribute(module, name, device_mesh, *self._placements)
        module.forward = functools.partial(self._run, module, module.forward)
        return module

    def _run(self, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # An attribute of the instance hides the parameter of the same name.
        plain = {
            name: parameter.to_local(grad_placements=self._gradients)
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        }
        vars(module).update(plain)
        try:
            return forward(*args, **kwargs)
        finally:  # recomputation stops a forward pass in its middle
            for name in plain:
                del vars(module)[name]


class VocabularyRows(parallel.ParallelStyle):
    """Splits the output layer by rows, and gives it the hidden states whole and plain.

    Code that computes with its weight knows that it is a part, and returns the whole gradient of the hidden states.
    """

    def __init__(self, hidden: Placement) -> None:
        """Take the placement of the arriving hidden states."""
        super().__init__()
        self._hidden = hidden

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not isinstance(parameter, DTensor):  # it is one if it is tied to the embedding
                _distribute(module, name, device_mesh, Shard(0))
        _gather_inputs(module, device_mesh, self._hidden)
        return module


class AdapterStyle(parallel.ParallelStyle):
    """Applies a style to a layer and, if it has an adapter, matching styles to the adapter's two matrices.

    The side of the adapter that the layer's ranks have whole is whole. The other is split like the layer.
    """

    def __init__(self, style: parallel.ParallelStyle) -> None:
        """Take the style of the layer."""
        super().__init__()
        self._style = style

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        from tandem.trainer.lora import dropouts_of, matrices_of  # PEFT takes seconds to import

        style = self._style
        matrices = matrices_of(module)
        if matrices is None:
            return self._apply_style(style, module, device_mesh)
        self._apply_style(style, module.get_submodule("base_layer"), device_mesh)
        if isinstance(style, parallel.ColwiseParallel):
            _gather_inputs(matrices[0], device_mesh, style.input_layouts[0])
            styles: tuple[parallel.ParallelStyle, parallel.ParallelStyle] = (
                PlainStyle.make_whole(sums=False),
                parallel.ColwiseParallel(output_layouts=style.output_layouts[0]),
            )
        elif isinstance(style, parallel.RowwiseParallel):
            first = parallel.RowwiseParallel(
                input_layouts=style.input_layouts[0], output_layouts=style.output_layouts[0]
            )
            styles = first, PlainStyle.make_whole(sums=not style.output_layouts[0].is_replicate())
        elif isinstance(style, PlainStyle):
            styles = style, style
        else:
            allowed = "a layer with an adapter can be ColwiseParallel or RowwiseParallel"
            raise ConfigError(f"{_CUSTOM}: {allowed}, not {type(style).__name__}")
        for matrix, style_of_matrix in zip(matrices, styles, strict=True):
            self._apply_style(style_of_matrix, matrix, device_mesh)
        for dropout, is_share in zip(dropouts_of(module), _shares(style), strict=True):
            if dropout is not None:
                dropout.is_share = is_share
        return module

    def _apply_style(
        self, style: parallel.ParallelStyle, module: torch.nn.Module, device_mesh: DeviceMesh
    ) -> torch.nn.Module:
        style.src_data_rank = self.src_data_rank
        return style._apply(module, device_mesh)


def _shares(style: parallel.ParallelStyle) -> tuple[bool, bool]:
    """Tell whether the input, and the output, of a layer of this style differ between ranks."""
    if isinstance(style, parallel.ColwiseParallel | parallel.RowwiseParallel):
        arrives, leaves = style.input_layouts[0], style.output_layouts[0]
        return not arrives.is_replicate(), not leaves.is_replicate()
    return False, False


def cut(
    model: Any, mesh: DeviceMesh, *, sequence_parallel: bool, custom_plan: str | None, adapts: bool = False
) -> None:
    """Split a whole model over the ranks of a mesh of one dimension, in place. It must be the same on all ranks.

    `adapts` says whether layers may have adapters.

    Raises `ConfigError` if there is no plan for the model, or the custom one does not exist or does not fit.
    """
    plan: Plan
    if custom_plan is None:
        plan = plan_of(model, mesh.size(), sequence_parallel=sequence_parallel)
    else:
        plan = load_plan(custom_plan, model)
    layer, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    head = scalar_head(model) if layer is None else layer
    is_tied = head.weight is embedding.weight
    head_name = next(name for name, module in model.named_modules() if module is head)
    # The output layer is split by rows whatever a plan says. The plan only says how the hidden states arrive.
    of_head = [style for path, style in plan.items() if _matches(head_name, path)]
    inside = {path: style for path, style in plan.items() if not _matches(head_name, path)}
    if adapts:
        inside = {path: AdapterStyle(style) for path, style in inside.items()}
    parallel.parallelize_module(model, mesh, inside, src_data_rank=None)
    if (prefix := find_language_prefix(model.config.model_type)) and sequence_parallel:
        _split_embeddings(model.get_submodule(prefix.removesuffix(".")), mesh)
    if is_tied:
        _cut_rows(embedding, mesh)
        head.weight = embedding.weight
    layouts = [getattr(style, "input_layouts", None) for style in of_head]
    arrives = layouts[0][0] if layouts and layouts[0] else Replicate()
    if layer is None:  # and the head is too small to be split
        _gather_inputs(head, mesh, arrives)
    else:
        VocabularyRows(arrives)._apply(head, mesh)
    for name, module in list(model.named_modules()):
        if any(not isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            _style_of_rest(model, name)._apply(module, mesh)


def plan_of(model: Any, size: int, *, sequence_parallel: bool) -> Plan:
    """Return the plan for a model of a known architecture on `size` ranks, or of one that is cut like Llama.

    Raises `ConfigError` for any other.

    With `sequence_parallel`, activations outside of attention and feed-forward layers are split along the sequence
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2). Experts are whole on every rank, and each rank then
    computes its own tokens. If one layer makes queries, keys and values, it is split by rows in any order, and its
    output is gathered: every rank attends with all heads. Of a vision model, only the language model is split.
    Experts that are shared out already stay as they are.
    """
    key, has_parts = "policy.dtensor_cfg.tensor_parallel_size", bool(find_language_prefix(model.config.model_type))
    config = model.config.get_text_config() if has_parts else model.config
    if not has_parts and config.model_type not in TENSOR_PLANS:
        supported = ", ".join(TENSOR_PLANS)
        if not is_cut_like_llama(config.model_type):
            raise ConfigError(
                f"{key}: {size}, but there is no plan for {config.model_type}, only for {supported}, and those that "
                f"Transformers cuts like Llama; {_CUSTOM} may name one"
            )
        if sequence_parallel:
            raise ConfigError(
                f"policy.dtensor_cfg.sequence_parallel: true, but the norms of {config.model_type} are not known to be "
                f"those of {supported}"
            )
    fuses_heads = config.model_type in FUSED_HEADS
    for heads in () if fuses_heads else (config.num_attention_heads, config.num_key_value_heads):
        if heads % size:
            raise ConfigError(f"{key}: {size} does not divide {heads} heads of attention")
    between: Placement = Shard(1) if sequence_parallel else Replicate()
    styles: dict[str, Callable[[], parallel.ParallelStyle]] = {
        # Features of images replace embeddings, and what comes of it is split afterwards.
        "embed_tokens": lambda: parallel.RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Replicate() if has_parts else between
        ),
        "self_attn": lambda: parallel.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": between}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
    }
    styles |= dict.fromkeys(("lm_head", "score"), lambda: parallel.ColwiseParallel(input_layouts=between))
    styles |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), parallel.ColwiseParallel)
    styles |= dict.fromkeys(("o_proj", "down_proj"), lambda: parallel.RowwiseParallel(output_layouts=between))
    if fuses_heads:
        styles |= dict.fromkeys(
            ("qkv_proj", "gate_up_proj"), lambda: parallel.ColwiseParallel(output_layouts=Replicate())
        )
        styles |= dict.fromkeys(
            ("o_proj", "down_proj"), lambda: parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        )
    if sequence_parallel:
        styles |= dict.fromkeys((*_NORMS, "gate", "router", "experts"), lambda: PlainStyle.make_whole(sums=True))
    plan: dict[str, parallel.ParallelStyle] = {}
    other_prefixes = find_other_prefixes(model.config.model_type)
    for name, module in model.named_modules():
        is_shared_out = any(isinstance(each, DTensor) for each in module.parameters(recurse=False))
        if name.startswith(other_prefixes) or is_shared_out:
            continue
        end = name.rpartition(".")[2]
        if end in _FEED_FORWARDS and any(hasattr(module, part) for part in ("gate_proj", "gate_up_proj")):
            plan[name] = parallel.PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
        elif end in styles:
            plan[name] = styles[end]()
    return plan


def load_plan(path: str, model: torch.nn.Module) -> Plan:
    """Return the plan at a dotted path: a dict of module paths and styles, or a function that returns one.

    Raises `ConfigError` if there is none, or if it names a module that the model lacks.
    """
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{_CUSTOM}: cannot import {path!r}: {error}") from error
    if not hasattr(module, name):
        raise ConfigError(f"{_CUSTOM}: {module_name} has no {name!r}{nearest(name, list(vars(module)))}")
    attribute = getattr(module, name)
    plan = attribute() if callable(attribute) else attribute
    if not (
        isinstance(plan, dict) and plan and all(isinstance(style, parallel.ParallelStyle) for style in plan.values())
    ):
        raise ConfigError(
            f"{_CUSTOM}: {path!r} is no plan: a dict from paths of modules to styles of "
            "torch.distributed.tensor.parallel, or a function that returns one"
        )
    modules = [each for each, _ in model.named_modules()]
    for pattern in plan:
        if not any(_matches(each, pattern) for each in modules):
            raise ConfigError(f"{_CUSTOM}: {path!r} names {pattern!r}, which the model has not")
    return plan


def _matches(name: str, pattern: str) -> bool:
    """Match as `parallelize_module` does, part by part."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))


def _style_of_rest(model: torch.nn.Module, name: str) -> parallel.ParallelStyle:
    """Return the style of a module with parameters that no plan has split."""
    if name.endswith(".self_attn") and _is_cut_by_rows(model.get_submodule(name), "q_proj"):  # its sinks, one a head
        return PlainStyle((Shard(0), Shard(0)))
    return PlainStyle.make_whole(sums=_sees_some_heads(model, name))


def _sees_some_heads(model: torch.nn.Module, name: str) -> bool:
    """Tell whether a module normalises queries or keys that a plan has split by heads."""
    parent, _, end = name.rpartition(".")
    if end not in ("q_norm", "k_norm"):
        return False
    return _is_cut_by_rows(model.get_submodule(parent), f"{end[0]}_proj")


def _is_cut_by_rows(module: torch.nn.Module, projection: str) -> bool:
    weight = getattr(getattr(module, projection, None), "weight", None)
    return isinstance(weight, DTensor) and list(weight.placements) == [Shard(0)]


def _cut_rows(embedding: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Split an embedding that is also the output layer, unless a plan has done it.

    Raises `ConfigError` if it was split differently.
    """
    weight = embedding.weight
    if not isinstance(weight, DTensor):
        parallel.RowwiseParallel(input_layouts=Replicate())._apply(embedding, mesh)
    elif list(weight.placements) != [Shard(0)]:
        raise ConfigError(f"{_CUSTOM}: the embedding is the output layer too, so only RowwiseParallel can cut it")


def _split_embeddings(language: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Split what a language model is given along the sequence. Gradients come back whole.

    Features for its first layers, if there are any, are those of image tokens in this rank's part.
    """

    def replicate(tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)

    def split(_: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        local_kwargs: dict[str, Any] = {
            "inputs_embeds": replicate(kwargs["inputs_embeds"]).redistribute(placements=[Shard(1)]).to_local()
        }
        if kwargs.get("deepstack_visual_embeds"):
            is_feature_BT = kwargs["visual_pos_masks"]
            number_BT = (is_feature_BT.flatten().cumsum(0) - 1).view_as(is_feature_BT)
            rank, size = mesh.get_local_rank(), mesh.size()
            local_kwargs["visual_pos_masks"], number_BT = (
                each.chunk(size, dim=1)[rank] for each in (is_feature_BT, number_BT)
            )
            mine = number_BT[local_kwargs["visual_pos_masks"]]
            local_kwargs["deepstack_visual_embeds"] = [
                replicate(each).to_local(grad_placements=[Partial()])[mine]
                for each in kwargs["deepstack_visual_embeds"]
            ]
        return args, kwargs | local_kwargs

    language.register_forward_pre_hook(split, with_kwargs=True)


def _gather_inputs(module: torch.nn.Module, mesh: DeviceMesh, arrives: Placement) -> None:
    """Give a module the hidden states whole and plain. Their gradient comes back whole from every rank."""

    def gather(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor]:
        hidden = inputs[0]
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [arrives], run_check=False)
        replicated: DTensor = hidden.redistribute(placements=[Replicate()])
        return (replicated.to_local(grad_placements=[Replicate()]),)

    module.register_forward_pre_hook(gather)


def _distribute(module: torch.nn.Module, name: str, mesh: DeviceMesh, *placements: Placement) -> None:
    parameter = getattr(module, name)
    placed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
    module.register_parameter(name, torch.nn.Parameter(placed, requires_grad=parameter.requires_grad))
