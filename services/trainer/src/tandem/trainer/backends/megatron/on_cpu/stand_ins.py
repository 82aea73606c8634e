"""The CPU in the place of CUDA, in Megatron-Core's own functions.

Megatron-Core allocates on CUDA by name, and runs no forward pass without it. `replace_cuda` makes the same code
run on the CPU. In each function that training calls, it replaces the name of CUDA by that of the CPU. It also replaces
streams and pinned memory; `replace_rotation` fills in for a fused kernel. Each of these functions is checked first. If
it differs from the known releases, that is an error with its name, never a wrong number.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch
import torch.distributed as dist

from tandem.trainer.backends.megatron.insides import changed, function, module, require_arguments, require_call
from tandem.trainer.backends.megatron.on_cpu import kernels

_NAME_CUDA = {
    "pipeline_parallel.schedules": (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    ),
    "optimizer.optimizer": (
        "MixedPrecisionOptimizer.__init__",
        "Float16OptimizerWithFloat16Params.__init__",
        "FP32Optimizer.__init__",
    ),
    "optimizer.distrib_optimizer": (
        "DistributedOptimizer.__init__",
        "DistributedOptimizer._build_model_and_main_param_groups",
    ),
    "optimizer.clip_grads": ("get_grad_norm_fp32", "clip_grad_by_total_norm_fp32", "count_zeros_fp32"),
    "utils": ("local_multi_tensor_l2_norm",),
}
"""Functions, by module, with constants such as ``"cuda"`` and ``"torch.cuda.FloatTensor"``."""

_SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "tensor_parallel.random": {
        "_get_cuda_rng_state": ("device", "clone", "graph_safe"),
        "_set_cuda_rng_state": ("new_state", "device", "graph_safe"),
        "get_cuda_rng_tracker": ("use_te_rng_tracker", "inference_rng_tracker", "use_cudagraphable_rng"),
    },
    "tensor_parallel.mappings": {
        "_gather_along_first_dim": ("input_", "group", "output_split_sizes", "use_global_buffer"),
        "_reduce_scatter_along_first_dim": ("input_", "group", "input_split_sizes", "use_global_buffer"),
    },
    "transformer.moe.token_dispatcher": {
        "MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize": ("self", "point", "tokens_per_expert"),
    },
}
"""Arguments of the functions that are replaced, or called to replace something."""

_CALLS = {
    "models.common.embeddings.rope_utils": {"apply_rotary_pos_emb": "fused_apply_rotary_pos_emb_thd"},
    "distributed.param_and_grad_buffer": {
        "_ParamAndGradBucketGroup.start_grad_sync": "dist_reduce_scatter_func",
        "_ParamAndGradBucketGroup.start_param_sync": "dist_all_gather_func",
    },
}
"""Functions, by module, with the names that each looks up in its module and that are replaced."""


def replace_cuda() -> None:
    """Make Megatron-Core's functions run on the CPU. Raises `ModelError` if one is not as it was."""
    for place, names in _NAME_CUDA.items():
        for name in names:
            _name_the_cpu(place, name)
    for place, signatures in _SIGNATURES.items():
        for name, arguments in signatures.items():
            require_arguments(place, name, arguments)
    for place, calls in _CALLS.items():
        for name, called in calls.items():
            require_call(place, name, called)
    _replace_devices()
    _replace_random_states()
    _replace_streams_of_experts()
    _replace_uneven_collectives()
    _replace_lonely_collectives()


def replace_rotation() -> None:
    """Rotate heads by this project's kernel, in the place of Transformer Engine's."""
    module("models.common.embeddings.rope_utils").fused_apply_rotary_pos_emb_thd = kernels.rotate


def has_rotation() -> bool:
    """Tell whether `replace_rotation` was called."""
    return module("models.common.embeddings.rope_utils").fused_apply_rotary_pos_emb_thd is kernels.rotate


def _name_the_cpu(place: str, name: str) -> None:
    """Replace CUDA by the CPU in the constants of a function, through its decorators."""
    plain = inspect.unwrap(function(place, name))
    code = plain.__code__
    constants = tuple(_move_to_cpu(constant) for constant in code.co_consts)
    if constants == code.co_consts:
        raise changed(f"{place}.{name}", "it does not name CUDA any more")
    plain.__code__ = code.replace(co_consts=constants)


def _move_to_cpu(constant: object) -> object:
    match constant:
        case "cuda":
            return "cpu"
        case str() if constant.startswith("torch.cuda.") and constant.endswith("Tensor"):
            return constant.replace("torch.cuda.", "torch.")
        case tuple():
            return tuple(_move_to_cpu(item) for item in constant)
        case types.CodeType():
            return constant.replace(co_consts=tuple(_move_to_cpu(item) for item in constant.co_consts))
    return constant


def _replace_devices() -> None:
    """Let "the current CUDA device" be the CPU, because some forty functions allocate there."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    # What waits for it is an error: only CUDA's graphs, and streams for several instances of an optimizer, would.
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _replace_random_states() -> None:
    """Let the CPU's generator stand for CUDA's. Dropout is off, so nothing in training is random."""
    random = module("tensor_parallel.random")
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    random.get_cuda_rng_tracker(inference_rng_tracker=True)  # its `fork` does nothing


def _replace_streams_of_experts() -> None:
    """Read the sizes of the all-to-all at once, since no side stream copies them to the host."""
    dispatchers = module("transformer.moe.token_dispatcher")
    dispatcher = dispatchers.MoEAlltoAllTokenDispatcher
    if not hasattr(dispatcher, "cuda_dtoh_stream"):
        raise changed("transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher", "it has no cuda_dtoh_stream")
    dispatcher.cuda_dtoh_stream = object()  # otherwise a constructor makes one

    def read_sizes(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if isinstance(sizes := getattr(self, name), torch.Tensor):
                    setattr(self, name, sizes.numpy())
        return tokens_per_expert

    dispatcher._maybe_dtoh_and_synchronize = read_sizes


def _replace_uneven_collectives() -> None:
    """Gather and scatter parts of unequal sizes for tensor-parallel experts. Gloo cannot, so zeros are added."""
    mappings = module("tensor_parallel.mappings")
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_parts(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, None, use_global_buffer)
        gathered = input_.new_zeros(sum(output_split_sizes), *input_.shape[1:])
        torch.split(gathered, list(output_split_sizes))[group.rank()].copy_(input_)
        dist.all_reduce(gathered, group=group)
        return gathered

    def scatter_parts(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, None, use_global_buffer)
        summed = input_.clone()
        dist.all_reduce(summed, group=group)
        return torch.split(summed, list(input_split_sizes))[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = scatter_parts


def _replace_lonely_collectives() -> None:
    """Leave gradients and parameters in place if no other rank has any. Gloo would copy them twice a step."""
    buffers = module("distributed.param_and_grad_buffer")
    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        setattr(buffers, name, functools.partial(_unless_alone, getattr(buffers, name)))


def _unless_alone(collective: Any, output: torch.Tensor, share: torch.Tensor, *, group: Any, **options: Any) -> Any:
    if group.size() > 1:
        return collective(output, share, group=group, **options)
    assert output.data_ptr() == share.data_ptr(), "a share of the buffer itself"
    return None
