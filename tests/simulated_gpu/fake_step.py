"""Build a trainer as a plan describes it and take two steps of one of its ranks, under fake tensors.

No memory is taken and nothing is computed: torch goes through the operators, and what a GPU's allocator would hold is
added up. The other ranks are those of torch's fake process group. What decides shapes, masks and positions, is real.

usage: python -m tests.simulated_gpu.fake_step PLAN RANK OVERRIDE ...; prints a JSON object of gigabytes:
`at_optimizer`, what there is when the optimizer begins its second step, what is `kept` after it, and `peaks` of that
step's phases.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.config import Config, load_config
from tandem.refit.layout import Box
from tandem.samples.batch import SampleBatch
from tandem.trainer.backends import dtensor, make_backend, sharding
from tandem.trainer.backends.dtensor import DTensorHeldModel
from tandem.trainer.backends.holding import HoldingBackend
from tandem.trainer.backends.megatron import preparing
from tandem.trainer.backends.sharding import RankMesh
from tandem.trainer.files import checkpoints
from tests.harness.trainers.trainer_harness import train_on

LENGTH = [0]
"""Of all rows of a pass."""
TOP_K = [0]
"""Experts of a token."""
_GB, _ALIGNED = 1e9, 512
_OPTIMIZER = "optimizer step"


class Shapes(FakeTensorMode):
    """Fake tensors, of which whatever is asked is one, or true; what is made of real ones alone is real."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func not in _ANSWERED and any(isinstance(each, FakeTensor) for each in args):  # most by far
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_fake = any(isinstance(each, FakeTensor) for each in tensors)
        if is_fake and func is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if is_fake and func in (aten.allclose.default, aten.equal.default):
            return True
        if tensors and not is_fake and func.namespace != "c10d" and not any(each.is_meta for each in tensors):
            return func(*args, **kwargs)
        if is_fake and func is aten.masked_select.default:
            return args[0].new_empty(num_routed(args[1]))
        if is_fake and func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:  # which CPUs compute
            return args[0].new_empty(len(args[0]), args[1].shape[-1])
        if func is aten.index.Tensor:
            args = args[0], [part for index in args[1] for part in _places(index)]
        return super().__torch_dispatch__(func, types, args, kwargs)


_ANSWERED = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.allclose.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten._grouped_mm.default,
}
"""Operators whose results, or their sizes, depend on values."""


def num_routed(map_EN: torch.Tensor) -> int:
    """Return how many tokens of a map go to experts, each to as many as the model says."""
    return map_EN.shape[1] * TOP_K[0]


def _places(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    is_mask = index is not None and index.dtype == torch.bool and not isinstance(index, FakeTensor)
    return [*index.nonzero(as_tuple=True)] if index is not None and is_mask else [index]


class Meter(TorchDispatchMode):
    """Adds up the storages on GPUs that live."""

    def __init__(self) -> None:
        super().__init__()
        self.current, self.phase = 0, _OPTIMIZER
        self.peaks: dict[str, int] = {}
        """By phase; all that is in no other is the optimizer's."""
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in (made,) if isinstance(made, torch.Tensor) else tree_leaves(made):
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
            if isinstance(local, torch.Tensor) and local.is_cuda:
                storage = local.untyped_storage()
                if storage._cdata not in self._sizes:
                    self._sizes[storage._cdata] = 0
                    weakref.finalize(storage, self._forget, storage._cdata)
                self.resized(storage)
        return made

    def resized(self, storage: torch.UntypedStorage) -> None:
        if (before := self._sizes.get(storage._cdata)) is None:
            return
        num_bytes = -(-storage.nbytes() // _ALIGNED) * _ALIGNED
        self._sizes[storage._cdata] = num_bytes
        self.current += num_bytes - before
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.current)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key)


def batch_of(config: Config) -> SampleBatch:
    """Return the longest sequences that the plan allows, the second half of each generated."""
    num, length = config.policy.train_global_batch_size, config.policy.max_total_sequence_length
    is_counted_T = np.tile(np.arange(length) >= length // 2, num)
    return SampleBatch(
        lengths_S=np.full(num, length, np.int32),
        token_ids_T=np.ones(num * length, np.int32),
        loss_mask_T=is_counted_T,
        generation_logprobs_T=np.where(is_counted_T, -3.0, 0.0).astype(np.float32),
        advantages_S=np.linspace(-1, 1, num, dtype=np.float32),
        rewards_S=np.linspace(0, 1, num, dtype=np.float32),
    )


def follow(meter: Meter) -> None:
    """Do by other means what fake tensors do not follow."""
    resize, shard = torch.UntypedStorage.resize_, RankMesh.shard

    def resized(self: torch.UntypedStorage, num_bytes: int) -> Any:
        made = resize(self, num_bytes)
        meter.resized(self)
        return made

    def moved(self: RankMesh, model: torch.nn.Module, settings: Any) -> None:
        shard(self, move(model, self.device), settings)

    def numpy(self: FakeTensor) -> np.ndarray[Any, Any]:
        return np.zeros(tuple(self.shape), str(self.dtype).removeprefix("torch."))

    torch.UntypedStorage.resize_ = resized  # type: ignore[assignment, method-assign]
    torch.nn.Module.to = move  # type: ignore[method-assign, assignment]
    RankMesh.shard = moved  # type: ignore[method-assign]
    FakeTensor.numpy = numpy  # type: ignore[method-assign, assignment]
    checkpoints._tell = lambda message: [message]
    for allow in (torch.backends.cuda.enable_flash_sdp, torch.backends.cuda.enable_mem_efficient_sdp):
        allow(True)  # whose memory is asked for, not what they compute


def move(
    model: torch.nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> torch.nn.Module:
    """Give a model parameters and buffers on a device, with the marks of those that are elsewhere."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (parameter.device, parameter.dtype) != (
                device or parameter.device,
                dtype or parameter.dtype,
            ):
                there = torch.nn.Parameter(parameter.detach().to(device, dtype), parameter.requires_grad)
                marks = {key: value for key, value in vars(parameter).items() if key not in vars(there)}
                there.__dict__.update(marks)
                module._parameters[name] = there
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model


class _Nothing:
    """Tensors of a checkpoint that has none."""

    def read(self, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        return torch.zeros(box.shape, dtype=torch.bfloat16, device="cuda")


def follow_megatron() -> None:
    """Do the same for Megatron-Core."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from tandem.trainer.backends.megatron import held
    from tandem.trainer.backends.megatron.pipeline import ModelPipeline

    run = ModelPipeline.run

    def noted(self: ModelPipeline, rows: Any, *arguments: Any, **options: Any) -> None:
        LENGTH[0] = rows[0].token_ids_1M.numel()
        run(self, rows, *arguments, **options)

    def gather_objects(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own] * len(found)

    @contextlib.contextmanager
    def apart(*_: Any, **__: Any) -> Iterator[Any]:
        yield types.SimpleNamespace(wait=lambda: None)

    def shapes(self: Any, *_: Any) -> tuple[list[int], list[int]]:
        shape = [LENGTH[0], 1, self.config.hidden_size]
        return shape, shape

    held.open_tensors = lambda *_: _Nothing()  # type: ignore[assignment, return-value]
    dist.all_gather_object = gather_objects  # type: ignore[assignment]
    param_and_grad_buffer._coalescing_manager = apart
    clip_grads.l2_norm_impl = lambda *_: (torch.zeros(1, device="cuda"), None)
    ModelPipeline.run = noted  # type: ignore[method-assign]
    P2PCommunicator._communicate_shapes = shapes


def follow_experts() -> None:
    """Route tokens evenly, by numbers that are real: how many go where decides shapes.

    Token n goes to experts n K, n K + 1 and so on, on this rank and on every other. All else of the dispatcher runs.
    """
    from megatron.core.transformer.moe import token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, gather = dispatcher.preprocess, token_dispatcher.gather_from_sequence_parallel_region

    def even(self: Any, map_NE: torch.Tensor) -> Any:
        num_tokens, num_experts = map_NE.shape
        TOP_K[0] = self.config.moe_router_topk
        experts = np.arange(num_tokens * TOP_K[0]).reshape(num_tokens, -1) % num_experts
        real = np.zeros((num_tokens, num_experts), bool)
        np.put_along_axis(real, experts, values=True, axis=1)
        return preprocess(self, torch.from_numpy(real))

    def gathered(values: torch.Tensor, group: Any = None, **options: Any) -> torch.Tensor:
        if isinstance(values, FakeTensor):
            whole: torch.Tensor = gather(values, group=group, **options)
            return whole
        return values.repeat(group.size())

    def read_sizes(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                if isinstance(sizes := getattr(self, name), torch.Tensor):
                    setattr(self, name, sizes.numpy())
        return tokens_per_expert

    dispatcher.preprocess = even
    dispatcher._maybe_dtoh_and_synchronize = read_sizes
    token_dispatcher.gather_from_sequence_parallel_region = gathered


def follow_shared_experts() -> None:
    """Send as many copies to each expert, on this rank and on every other."""

    def counts(experts_S: torch.Tensor, num_experts: int, group: dist.ProcessGroup) -> Any:
        size = group.size()
        each = -(-len(experts_S) // (size * num_experts))
        ends = [min(len(experts_S), rank * num_experts * each) for rank in range(size + 1)]
        sent = [end - start for start, end in itertools.pairwise(ends)]
        received_E = torch.full((size * num_experts,), each, device=experts_S.device)
        return received_E, [sent, [sent[group.rank()]] * size]

    sharding._counts = counts


def tell_phases(meter: Meter, is_megatron: bool) -> None:
    """Note in which phase of a step memory is taken."""

    def during(phase: str, owner: Any, name: str) -> None:
        called = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            before, is_within = meter.phase, meter.phase != _OPTIMIZER and phase != _OPTIMIZER
            meter.phase = before if is_within else phase
            try:
                return called(*arguments, **options)
            finally:
                meter.phase = before

        setattr(owner, name, noted)

    during("log-probabilities", HoldingBackend, "scores")
    if is_megatron:
        from tandem.trainer.backends.megatron.pipeline import ModelPipeline

        during("forward and backward passes", ModelPipeline, "run")
    else:
        during("forward and backward passes", DTensorHeldModel, "train_step")
        during(_OPTIMIZER, DTensorHeldModel, "take_step")


def main(plan: str, rank: str, *overrides: str) -> None:
    config = load_config(plan, list(overrides), to_run=False)
    is_megatron = config.policy.megatron_cfg.enabled
    if not is_megatron:  # there are no weights to read
        new = ["policy.new_model.characters=ab", "policy.new_model.config.model_type=any"]
        config = load_config(plan, [*overrides, *new], to_run=False)
    dist.init_process_group("fake", rank=int(rank), world_size=config.cluster.trainers, store=FakeStore())
    if not is_megatron:
        ranks = dtensor._arranged(config, config.holds, torch.device("cuda", 0))
        dtensor._arranged = lambda *_: ranks
    meter, at_optimizer = Meter(), list[int]()
    follow(meter)
    if is_megatron:
        preparing.prepare()
        follow_megatron()
        follow_experts()
    else:
        follow_shared_experts()
    tell_phases(meter, is_megatron)

    def begins(*_: Any) -> None:
        meter.phase = _OPTIMIZER  # to the end of what has called it
        at_optimizer.append(meter.current)

    register_optimizer_step_pre_hook(begins)
    with Shapes(allow_non_fake_inputs=True), meter:
        backend = make_backend(config, checkpoint=None)
        for _ in range(2):
            meter.peaks.clear()
            at_optimizer.clear()
            train_on(backend, batch_of(config), config)
    peaks = {phase: num_bytes / _GB for phase, num_bytes in meter.peaks.items()}
    print(json.dumps({"at_optimizer": max(at_optimizer) / _GB, "kept": meter.current / _GB, "peaks": peaks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
