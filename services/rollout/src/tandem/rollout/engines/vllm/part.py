"""One worker's slice of a vLLM model: what refits write, and what is derived from it.

It knows vLLM's internals, as some of its neighbours do. Everything here is called through
`tandem.rollout.engines.vllm.workers`, in this process or from another, so arguments and results are plain data.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tandem.common.errors import ModelError
from tandem.common.memory import MemoryMeter
from tandem.config.models.families import VLLM_TABLES
from tandem.refit import layout, program
from tandem.refit.adapters import catalogue, deployment, vllm
from tandem.refit.digests.comparison import encode_digests
from tandem.refit.digests.slices import ElementSampling
from tandem.refit.digests.task import DigestTask, VersionDigest
from tandem.refit.layout import Layout, PrivateMemory, Storage
from tandem.refit.weights import Weights, device_name, host_name
from tandem.rollout.engines.vllm import float8, insides, token_columns
from tandem.rollout.engines.vllm.learned import LearnedParameters, ParameterViews
from tandem.rollout.engines.vllm.packed import PackedModule

if TYPE_CHECKING:
    from tandem.refit.transfer import TransferGroup
    from tandem.refit.transports.meeting import GroupStore

_KEEP_WEIGHTS = 1
"""Level of vLLM's sleep. Weights wait in host memory, because an engine may be asked once more for the same version."""
_ABSORBED = ("W_UV", "W_UK_T")
"""Matrices that latent attention multiplies by, computed from its projection of latent keys and values."""


def weights_of(
    config: Mapping[str, Any],
    parameters: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    sizes: vllm.Vllm,
    rank: int,
    block: tuple[int, int] | None = None,
) -> Weights:
    """Describe the live parameters of one worker.

    Args:
        config: Hugging Face configuration of the model.
        parameters: by name, tied ones once. Bytes outside all tensors, such as padding of the vocabulary, become zero.
        dtype: of the weights, except those in float8.
        sizes: of the engine.
        rank: of the worker in it.
        block: rows and columns that share a scale, if the weights of linear layers are in float8.

    Raises:
        ModelError: the architecture is unknown, or the model has a parameter that a refit would not write.
        RefitError: the model lacks a parameter, or has it in another size.

    """
    if config.get("model_type") not in VLLM_TABLES:
        raise ModelError(f"vLLM's {config.get('model_type')} cannot be refitted; known are {', '.join(VLLM_TABLES)}")
    name_of_dtype = str(dtype).removeprefix("torch.")
    device = device_name(next(iter(parameters.values())).device)
    model = catalogue.make_shape(config, name_of_dtype)
    layout = sizes.layout(model if block is None else model.quantised(block), rank, host_name(), device)
    storages = {name: Storage(name, parameter.nbytes, PrivateMemory()) for name, parameter in parameters.items()}
    located = deployment.locate(layout, storages)
    names = [storage.name for storage in located.storages]
    unwritten = sorted(parameters.keys() - set(names))
    if unwritten:
        raise ModelError(f"vLLM's {config['model_type']} has parameters that hold no tensor: {', '.join(unwritten)}")
    expected_dtypes = dtypes_of(located)
    for name in names:
        parameter = parameters[name]
        expected = expected_dtypes.get(name, dtype)  # padding alone has no tensor in it
        if parameter.dtype != expected or not parameter.is_contiguous():
            raise ModelError(
                f"vLLM has {name} as {parameter.dtype} with strides {parameter.stride()}, not plain {expected}"
            )
        parameter.data.zero_()
    return Weights(located, {name: parameters[name] for name in names})


def dtypes_of(layout: Layout) -> dict[str, torch.dtype]:
    """Return the element type of each storage."""
    storages, tensors = layout.pieces.storage_P.tolist(), layout.pieces.tensor_P.tolist()
    return {
        layout.storages[storage].name: getattr(torch, layout.tensors[tensor].dtype)
        for storage, tensor in zip(storages, tensors, strict=True)
    }


class WorkerPart:
    """One worker's layers, or its slices of them."""

    def __init__(
        self,
        runner: Any,
        packed: Sequence[PackedModule],
        rank: int,
        learned: LearnedParameters | ModelError | None = None,
        sleeper: Any = None,
    ) -> None:
        """Inspect the model of a vLLM model runner.

        Args:
            runner: of vLLM.
            packed: what `keep_parameters` gave while the model was loaded.
            rank: of the worker in its engine.
            learned: what `learn_layout` gave while the model was loaded; None for a family that has a table.
            sleeper: on a GPU, the worker, which can release and retake all of vLLM's memory.

        """
        self._sleeper = sleeper
        self._is_asleep = False
        self._meter = MemoryMeter()
        self._runner = runner
        module_ids = {id(module) for module in runner.get_model().modules()}
        self._packed = [each for each in packed if id(each.layer) in module_ids]  # others are of a model that drafts
        self._rank = rank
        self._learned = learned
        self._views = ParameterViews(runner.get_model())
        if isinstance(learned, LearnedParameters):
            learned.note_derived(runner.get_model(), *(each.layer for each in self._packed))
        self._absorbing = [module for module in runner.get_model().modules() if hasattr(module, _ABSORBED[0])]
        self._weights: Weights | None = None
        sizes = runner.vllm_config.additional_config.get(token_columns.ASKED)
        self.routes = None if sizes is None else token_columns.ExpertRoutes(runner, *sizes)
        """Expert routing; None unless it was asked for."""
        vocabulary = runner.vllm_config.additional_config.get(token_columns.KEPT)
        self._mask_record = None if vocabulary is None else token_columns.MaskRecord(runner, vocabulary)
        undrawable = runner.vllm_config.additional_config.get(insides.UNDRAWABLE)
        if undrawable is not None:
            _forbid(runner.get_model(), undrawable)
        self._digest: DigestTask | VersionDigest | None = None

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that hold the weights, by name, tied ones once.

        Where a kernel reads a packed copy, the parameter is the plain one, and `pack` fills the copy.
        """
        model = self._runner.get_model()
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        names = {id(module): name for name, module in model.named_modules()}
        for packed in self._packed:
            for name, parameter in packed.plain.named_parameters():
                parameters[f"{names[id(packed.layer)]}.{name}"] = parameter
        for module in self._absorbing:
            for name in _ABSORBED:
                del parameters[f"{names[id(module)]}.{name}"]
        return parameters

    def is_learned(self) -> bool:
        """Return whether its layout was learned from vLLM's loader, rather than read from a table."""
        return self._learned is not None

    def describe(self) -> bytes:
        """Return the encoded layout; the weights are zero from here on. Raises `ModelError` or `RefitError`."""
        if self._learned is not None:
            self._weights = self._describe_learned()
            return layout.encode(self._weights.layout)
        config = self._runner.vllm_config
        sizes = vllm.Vllm(
            tp=config.parallel_config.tensor_parallel_size,
            pp=config.parallel_config.pipeline_parallel_size,
            expert_parallel=config.parallel_config.enable_expert_parallel,
        )
        model = config.model_config
        block = float8.BLOCK if model.quantization else None
        settings = model.hf_config.to_dict()
        self._weights = weights_of(settings, self.parameters(), model.dtype, sizes, self._rank, block)
        return layout.encode(self._weights.layout)

    def install(self, programs: Sequence[bytes]) -> tuple[int, int]:
        """Bind its program out of those of all parts; return how many copies and bytes it moves. Raises
        `RefitError`."""
        self._digest = None
        bound = self._described().install([program.decode(programs[self._rank])])
        return bound.num_copies, bound.num_bytes

    def connect(self, transfer_group: TransferGroup, meeting: GroupStore, timeout_s: float) -> None:
        """Join a transfer group if its program includes it. Raises `RefitError`."""
        self._described().connect(transfer_group, meeting, timeout_s)

    def apply(
        self, version: int, deadline_s: float, only: Collection[str], joining_engines: Collection[str] | None = None
    ) -> dict[str, int]:
        """Run its program; return the bytes on each link. Raises `RefitError`."""
        return self._described().apply(version, deadline_s, only, joining_engines)

    def pack(self) -> None:
        """Have kernels compute with the current weights."""
        if isinstance(self._learned, LearnedParameters):
            self._views.follow()
            self._learned.compute(self.parameters())
        for packed in self._packed:
            packed.pack()
        for module in self._absorbing:
            module.process_weights_after_loading(self._runner.vllm_config.model_config.dtype)

    def begin_digest(self, sampling: ElementSampling | None) -> float:
        """Begin to digest its weights; return roughly how many seconds that takes."""
        self._digest = self._described().digest_task(sampling)
        return self._digest.expected_s

    def advance_digest(self, seconds: float) -> bool:
        """Continue the digest for this long; return whether it is done."""
        return self._digesting().advance(seconds)

    def digests(self) -> bytes:
        """Return its contribution to the digest of each tensor."""
        return encode_digests(self._digesting().result())

    def misquantised(self) -> tuple[str, ...]:
        """Return the tensors with quantised values that do not match what was received."""
        return self._described().misquantised()

    def release_cache(self) -> None:
        """Release the memory of the key-value cache; on a GPU the weights wait in host memory. No request may run."""
        self._is_asleep = True
        if self._sleeper is not None:
            self._sleeper.sleep(_KEEP_WEIGHTS)
            return
        # A layer that carries a state has several caches.
        layers = (layer if isinstance(layer, list | tuple) else (layer,) for layer in self._runner.kv_caches)
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for layer in layers for cache in layer}
        for storage in storages.values():
            _give_back(storage.data_ptr(), storage.nbytes())

    def take_cache(self) -> None:
        """Take the memory back, on a CPU as it is written; the caches are empty."""
        self._is_asleep = False
        if self._sleeper is not None:
            self._sleeper.wake_up()

    def begin_memory(self) -> None:
        """Begin to measure the memory that this process takes."""
        self._meter.begin()

    def memory(self) -> tuple[int, int]:
        """Return the peak since `begin_memory`, and what is held; what vLLM has unmapped, torch takes for held."""
        use, unmapped = self._meter.use(), 0
        if self._is_asleep and self._sleeper is not None:
            from vllm.device_allocator.cumem import CuMemAllocator

            unmapped = CuMemAllocator.get_instance().get_current_usage()
        return use.peak, max(0, use.held - unmapped)

    def routed(self, num_tokens: Mapping[str, int]) -> list[bytes]:
        """Return the routing of this many tokens of each request; see `ExpertRoutes.of`."""
        assert self.routes is not None, "asked only where the engine was told to say so"
        return self.routes.of(num_tokens)

    def masks(self, num_tokens: Mapping[str, int]) -> list[tuple[bytes, bytes]]:
        """Return the sampling masks of this many tokens of each request."""
        assert self._mask_record is not None, "it was asked for"
        return self._mask_record.of(num_tokens)

    def close(self) -> None:
        """Release the program and leave all transfer groups."""
        if self._weights is not None:
            self._weights.close()

    def _describe_learned(self) -> Weights:
        assert self._learned is not None, "it was learned while the model was loaded"
        if isinstance(self._learned, ModelError):
            raise self._learned
        buffers = dict(self._runner.get_model().named_buffers())
        return self._learned.weights(self.parameters(), buffers)

    def _described(self) -> Weights:
        assert self._weights is not None, "parts are described first"
        return self._weights

    def _digesting(self) -> DigestTask | VersionDigest:
        assert self._digest is not None, "a digest is begun first"
        return self._digest


def _give_back(address: int, num_bytes: int) -> None:
    """Return the pages within private memory to the operating system: they read as zeros, and come back when written.

    Unlike freeing and allocating again, that costs nothing for pages that are never written. Taking back the others is
    five times as fast in huge pages, where the kernel has them.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop <= start:
        return
    advise = ctypes.CDLL(None, use_errno=True).madvise
    pages = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
    advise(*pages, mmap.MADV_HUGEPAGE)
    if advise(*pages, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "the memory of the key-value cache cannot be given back")


def _forbid(model: Any, token_ids: Sequence[int]) -> None:
    """Have a model of vLLM's take all probability from tokens that are never drawn, before tokens are drawn."""
    compute_logits = model.compute_logits

    def compute(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        logits_NV: torch.Tensor | None = compute_logits(*args, **kwargs)
        if logits_NV is not None:  # only the worker that draws has them
            logits_NV[:, token_ids] = -torch.inf
        return logits_NV

    model.compute_logits = compute
