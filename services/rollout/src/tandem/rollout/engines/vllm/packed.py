"""Packed weights of vLLM's kernels for CPUs: plain ones are kept, and packed after each refit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import msgspec
import torch

_EXPERTS = ("w13_weight", "w2_weight")
_UNPACKED = "_cpu_unpacked_conv_weight"
"""Attribute of a convolution with packed weights: the plain ones as a matrix, which drafts are computed with."""


class PackedModule(Protocol):
    """A layer whose kernels read packed weights."""

    @property
    def layer(self) -> Any:
        """The layer of vLLM's model."""
        ...

    @property
    def plain(self) -> torch.nn.Module:
        """A module with the parameters of `layer` as a checkpoint's loader fills them."""
        ...

    def pack(self) -> None:
        """Fill the packed copy from the plain module."""
        ...


class PackedExperts(msgspec.Struct, frozen=True, eq=False):
    """The experts of one layer."""

    layer: Any
    plain: torch.nn.Module
    process: Callable[[Any], None]
    """Function that packs the weights of a module."""

    def pack(self) -> None:
        """Fill the packed copy from the plain module."""
        module = _make_module({name: getattr(self.plain, name) for name in _EXPERTS})
        self.process(module)
        for name in _EXPERTS:
            getattr(self.layer, name).data.copy_(getattr(module, name).data)


class PackedConvolution(msgspec.Struct, frozen=True, eq=False):
    """A causal convolution in bfloat16, on processors with AVX-512 for it, and on Arm's."""

    layer: Any
    plain: torch.nn.Module
    """Module with ``weight``, of shape [channels, 1, width]."""
    pack_matrix: Callable[[torch.Tensor], torch.Tensor]
    """Function that packs a matrix of shape [channels, width]."""

    def pack(self) -> None:
        """Fill the packed copy from the plain module."""
        weight = self.plain.weight
        assert isinstance(weight, torch.nn.Parameter)
        matrix = weight.data.flatten(1).contiguous()
        setattr(self.layer, _UNPACKED, matrix)
        self.layer.weight.data.copy_(self.pack_matrix(matrix))


@contextlib.contextmanager
def keep_parameters() -> Iterator[list[PackedModule]]:
    """Have models loaded in this block keep real parameters; give the packed copies that kernels read."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    packed: list[PackedModule] = []
    former = ops._supports_onednn, utils.check_cpu_sgl_kernel, utils.dispatch_cpu_unquantized_gemm
    dispatch = utils.dispatch_cpu_unquantized_gemm
    process = CPUUnquantizedExperts.process_weights_after_loading

    def keep_and_process(experts: Any, layer: Any) -> None:
        plain = _make_module({name: getattr(layer, name).data.clone() for name in _EXPERTS})
        process(experts, layer)
        packed.append(PackedExperts(layer=layer, plain=plain, process=lambda module: process(experts, module)))

    def keep_and_dispatch(layer: Any, *args: Any, **kwargs: Any) -> None:
        shape = layer.weight.shape
        dispatch(layer, *args, **kwargs)
        matrix = vars(layer).get(_UNPACKED)
        if matrix is not None:
            plain = _make_module({"weight": matrix.clone().view(shape)})
            packed.append(PackedConvolution(layer=layer, plain=plain, pack_matrix=ops.causal_conv1d_weight_pack))

    # Both would pack the weights of linear layers and leave parameters without elements.
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    utils.dispatch_cpu_unquantized_gemm = keep_and_dispatch
    CPUUnquantizedExperts.process_weights_after_loading = keep_and_process
    try:
        yield packed
    finally:
        ops._supports_onednn, utils.check_cpu_sgl_kernel, utils.dispatch_cpu_unquantized_gemm = former
        CPUUnquantizedExperts.process_weights_after_loading = process


def _make_module(weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with these weights as parameters, in their memory."""
    module = torch.nn.Module()
    for name, weight in weights.items():
        module.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
    return module
